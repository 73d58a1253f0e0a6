"""What a workload's `loss()` must return."""

from typing import Any

import torch

from trainer.worker.workload import WorkloadError


def scalar_loss(workload: object, loss: Any) -> torch.Tensor:
    """What `loss()` of a user has returned; raises WorkloadError for what no backward pass can begin with."""
    if isinstance(loss, torch.Tensor) and not loss.dim() and loss.requires_grad:
        return loss
    if not isinstance(loss, torch.Tensor):
        found = "None" if loss is None else f"a {type(loss).__name__}"
    else:
        found = f"a tensor of shape {list(loss.shape)}" if loss.dim() else "a tensor without a gradient"
    raise WorkloadError(
        f"{type(workload).__name__}.loss() returned {found}: it must return the mean loss of the micro-batch, a tensor "
        "with one number, no dimension, and a gradient"
    )
