"""What a rank trains: the workload and what it made."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from trainer.worker.data import Data
from trainer.worker.parallel.mesh import Layout
from trainer.worker.workload import Scheduler, Workload


@dataclass(frozen=True, kw_only=True)
class TrainObjects:
    """The workload and what it made, sharded and on its device."""

    workload: Workload
    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: Data
    layout: Layout
    scheduler: Scheduler | None = None
    """The workload's own; None: the learning rate follows `optimizer.lr`."""
    set_initial_weights: Callable[[], None] | None = None
    """To be called when no checkpoint was restored; None: the model has them already."""
