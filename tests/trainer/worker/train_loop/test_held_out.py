"""Validation on what is held out: of token data alone; layouts are held to one rank's in the table of strategies."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from trainer.protocol.config_sections.recipe_config import TrainConfig
from trainer.worker.data import TokenData
from trainer.worker.train_loop.validation import held_out_validation
from trainer.worker.workload import Mean, WorkloadError


def objects(data: Any) -> Any:
    """The loss of a micro-batch is the mean of its tokens."""
    return SimpleNamespace(data=data, workload=SimpleNamespace(loss=lambda _, batch: batch.double().mean()))


def test_the_mean_is_that_of_all_micro_batches_of_all_batches(text_tokens):
    train = TrainConfig(seq_len=16, batch_size=8, micro_batch_size=4)
    data = TokenData(text_tokens, train, shuffle=True, dp_rank=0, dp_size=1, device=torch.device("cpu"), held_out=2)
    rows = [part for batch in data.held_out() for part in batch]
    validate = held_out_validation(objects(data), 2)
    assert validate is not None
    found = cast(Mean, validate(torch.nn.Identity())["val_loss"])
    assert (float(found.value), found.weight) == (pytest.approx(float(torch.cat(rows).double().mean())), 1.0)


def test_nothing_is_validated_without_batches():
    assert held_out_validation(objects(None), 0) is None


def test_data_of_a_users_own_holds_nothing_out():
    class Points:
        pass

    with pytest.raises(WorkloadError, match="has no held-out batches.*write `validate`.*or type validation.batches=0"):
        held_out_validation(objects(Points()), 3)
