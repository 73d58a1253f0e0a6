"""What a workload's `loss` may return."""

from typing import Any

import pytest
import torch

from trainer.worker.train_loop.reduction import scalar_loss
from trainer.worker.workload import WorkloadError


class Mine:
    pass


@pytest.mark.parametrize(
    ("loss", "found"),
    [
        (None, "None"),
        (0.5, "a float"),
        ((1, 2), "a tuple"),
        (torch.ones(2, requires_grad=True), r"a tensor of shape \[2\]"),
        (torch.ones(1, requires_grad=True), r"a tensor of shape \[1\]"),
        (torch.tensor(0.5), "a tensor without a gradient"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_the_users_error(loss: Any, found: str) -> None:
    with pytest.raises(WorkloadError, match=rf"^Mine\.loss\(\) returned {found}: it must return the mean loss"):
        scalar_loss(Mine(), loss)


def test_a_scalar_is_taken_as_it_is() -> None:
    loss = torch.ones(2, requires_grad=True).sum()
    assert scalar_loss(Mine(), loss) is loss
