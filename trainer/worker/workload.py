"""The workload: protocol, base class, hooks and metric values.

docs/writing-a-workload.md shows them in one example. Everything that a restart must restore must be in
parameters, persistent buffers, the optimizer's or the scheduler's `state_dict()`, the data's position, the random
generators of torch, Python and NumPy, or the result of the workload's own `state_dict()`.
"""

import importlib
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from trainer.costs.micro_batches import micro_batch_size
from trainer.parallel.apply.data_parallel import apply_data_parallel, mixed_precision, offloads_optimizer
from trainer.parallel.apply.fsdp_units import CannotShard, fsdp_units
from trainer.parallel.apply.mesh import Layout
from trainer.parallel.dimension import Splits
from trainer.parallel.parallel_config import DIMENSIONS
from trainer.protocol.config import JobConfig, WorkloadConfig
from trainer.protocol.rank_progress.progress import Phase
from trainer.protocol.token_shards import TokensError
from trainer.worker.data import Data, StatefulData, TokenData
from trainer.worker.optimizer import HostAdamW, adamw
from trainer.worker.reporting.phase_tracker import current_tracker

Number = float | int | torch.Tensor
"""A number, or a tensor with one element."""


@dataclass(frozen=True)
class Mean:
    """Mean over the data-parallel ranks, weighted by, for example, the number of samples.

    A plain number counts as a Mean.
    """

    value: Number
    weight: Number = 1.0


@dataclass(frozen=True)
class Sum:
    """Sum over the data-parallel ranks. Ranks that read the same data are averaged and count once."""

    value: Number


@dataclass(frozen=True)
class Rank0:
    """Value of rank 0 only."""

    value: Number


Metric = Number | Mean | Sum | Rank0 | None
"""None means no value this time."""


class WorkloadError(Exception):
    """The workload or the configuration cannot work; retrying would not help."""


class Workload(Protocol):
    """Interface between the loop and the model. It is created by `Class(config, **config.workload.args)`."""

    def build_model(self) -> nn.Module:
        """Return the model, on the CPU or on the meta device. Torch has the same seed on every rank."""

    def parallelize(self, model: nn.Module, layout: Layout) -> nn.Module:
        """Shard the model, move it to `layout.device`, and make sure that every parameter has its initial value."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer. Its groups' `lr` follows the schedule, times the group's `lr_scale` if present."""

    def build_data(self, layout: Layout) -> Data | StatefulData:
        """Return this rank's data. Ranks that share layers (tp) or sequences (cp) read the same data."""

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Return the mean loss over a micro-batch as a scalar. All micro-batches and ranks have equal weight."""


class Scheduler(Protocol):
    """A user's own learning-rate schedule, for example from `torch.optim.lr_scheduler`."""

    def step(self) -> None:
        """Set the groups' `lr` for the next step. Called after every optimizer step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a restart must restore."""

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore the state."""


class BaseWorkload:
    """Default workload: FSDP for every child of the model, AdamW, and token shards from `data.path`.

    The last five methods are hooks that do nothing unless overridden.
    """

    strictly_deterministic = False
    """Whether an operation without a deterministic kernel raises.

    If it does not, it warns, and fused attention on GPUs may differ in the last bits between two runs.
    """

    flops_per_step: float | None = None
    """Model FLOPs of an optimizer step over all ranks, forward and backward, for TFLOP/s and MFU in steps.jsonl."""

    def __init__(self, config: JobConfig, **args: Any) -> None:
        self.config, self.args = config, args

    def parallelize(self, model: nn.Module, layout: Layout) -> nn.Module:
        """Apply FSDP to `fsdp_units` and the rest of the model. Tensor and context parallelism are not supported."""
        if refused := missing_parallelize(type(self), self.config):
            raise WorkloadError(refused)
        model.to(layout.device)
        _refuse_batch_norm(model, layout, self.config)
        units = fsdp_units(model)
        try:
            apply_data_parallel(units, model, layout, self.config, mixed_precision(self.config))
        except CannotShard as error:
            raise WorkloadError(str(error)) from error
        return model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return adamw(model, self.config.optimizer, on_host=offloads_optimizer(self.config))

    def build_data(self, layout: Layout) -> Data | StatefulData:
        if not self.config.data.path:
            raise WorkloadError(
                "data.path is empty: write build_data() in the workload, or set data.text, or set "
                "data.path to a folder of `orch data prepare`"
            )
        try:
            return self._token_data(layout)
        except TokensError:  # a folder that is unreadable here may be readable on another node
            raise
        except ValueError as error:
            raise WorkloadError(str(error)) from error

    def _token_data(self, layout: Layout) -> TokenData:
        data, train = self.config.data, self.config.train
        size = micro_batch_size(self.config.parallel.pipeline, train, layout.dp_size)
        return TokenData(
            Path(data.path), replace(train, micro_batch_size=size), shuffle=data.shuffle,
            dp_rank=layout.dp_rank, dp_size=layout.dp_size, device=layout.device,
            held_out=self.config.validation.batches,
        )  # fmt: skip

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Scheduler | None:
        """Return your own learning-rate schedule, or None for `optimizer.lr` with warm-up and cosine decay.

        `ReduceLROnPlateau` steps after every validation, with the first number that `validate` returns.
        """
        return None

    def validate(self, model: nn.Module) -> Mapping[str, Metric]:
        """Return validation metrics. Called on every rank every `validation.every` steps and after the last step.

        The model is in eval mode without gradients, and the random generators are restored afterwards.
        """
        return {}

    def metrics(self) -> Mapping[str, Metric]:
        """Return metrics of this step. Called on every rank after the backward pass."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return other state to restore, such as a gradient scaler's state, running averages or counters.

        Called on every rank. Tensors that are equal on all ranks are saved once, DTensors in shards, everything else
        per rank.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`. Called after model and optimizer have been restored."""
        if state:
            names = ", ".join(sorted(map(str, state))[:4])
            raise WorkloadError(
                f"the checkpoint has a workload state ({names}), but {type(self).__name__} has no "
                "load_state_dict(): put the code back as it was, or add one"
            )


@contextmanager
def evaluating() -> Iterator[None]:
    """Mark an evaluation, or other work that takes minutes, within the workload's data or loss.

    The block has the time limit of a slow phase and does not count as work. Outside a rank, it has no effect.
    """
    tracker = current_tracker()
    if tracker is None:
        yield
        return
    tracker.begin_slow_phase(Phase.EVAL)
    try:
        yield
    finally:
        tracker.end_slow_phase()


def hook(workload: object, name: str) -> Callable[..., Any] | None:
    """Return an optional method of a workload, or None if it is missing or inherited from BaseWorkload."""
    found = getattr(workload, name, None)
    inherited = getattr(type(workload), name, None) is getattr(BaseWorkload, name)
    return found if callable(found) and not inherited else None


def missing_parallelize(kind: type[Any], config: JobConfig) -> str:
    """Return why a class with BaseWorkload's `parallelize` cannot use this layout, or "" if it can."""
    if getattr(kind, "parallelize", None) is not BaseWorkload.parallelize:
        return ""
    for dimension in DIMENSIONS:
        if dimension.splits is not Splits.BATCH and dimension.size(config.parallel) > 1:
            remedy = f"write one, or set parallel.{dimension.key}=1"
            size = attrgetter(dimension.key)(config.parallel)
            return f"parallel.{dimension.key}={size}, but {kind.__name__} does not override `parallelize`: {remedy}"
    return ""


def _refuse_batch_norm(model: nn.Module, layout: Layout, config: JobConfig) -> None:
    """Refuse BatchNorm in half precision on CPUs, whose kernels need running statistics in the same precision."""
    found = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    if found and layout.device.type == "cpu" and config.train.dtype != "float32":
        raise WorkloadError(
            f"train.dtype={config.train.dtype}: torch has no BatchNorm in this dtype on CPUs: type train.dtype=float32"
        )


def build_optimizer(workload: Workload, model: nn.Module) -> torch.optim.Optimizer:
    """Return the workload's optimizer. Raises WorkloadError for a custom optimizer that cannot run in host memory."""
    made = workload.build_optimizer(model)
    config = getattr(workload, "config", None)
    if isinstance(config, JobConfig) and offloads_optimizer(config) and not isinstance(made, HostAdamW):
        raise WorkloadError(
            f"parallel.fsdp.offload=optimizer, but {type(workload).__name__} builds a {type(made).__name__} of its "
            "own, and only the built-in AdamW can run in host memory: type parallel.fsdp.offload=all"
        )
    return made


def build_scheduler(workload: object, optimizer: torch.optim.Optimizer) -> Scheduler | None:
    """Return the workload's own schedule, or None. Raises WorkloadError for a schedule that cannot be restored."""
    make = hook(workload, "build_scheduler")
    made: Scheduler | None = make(optimizer) if make is not None else None
    missing = [name for name in ("step", "state_dict", "load_state_dict") if not callable(getattr(made, name, None))]
    if made is not None and missing:
        raise WorkloadError(f"{type(made).__name__}, which build_scheduler() returns, has no {missing[0]}()")
    return made


def find(config: WorkloadConfig) -> type[Any]:
    """Import the class named by `workload.target`. Raises WorkloadError with the location and the reason."""
    for folder in config.path:
        if folder not in sys.path:
            sys.path.append(folder)  # after orch's folders, so that a user's module never shadows orch's
    module_name, _, class_name = config.target.partition(":")
    if not class_name:
        raise WorkloadError(f"workload.target={config.target}: must look like package.module:Class")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise WorkloadError(f"workload.target={config.target}: cannot import {module_name}: {error}") from error
    kind = getattr(module, class_name, None)
    if not isinstance(kind, type):
        file = getattr(module, "__file__", None) or "built into Python"
        raise WorkloadError(f"workload.target={config.target}: {module_name} ({file}) has no class {class_name}")
    return kind


def build(config: JobConfig) -> Workload:
    """Create the workload. Raises WorkloadError for arguments that its class does not accept."""
    kind = find(config.workload)
    try:
        made: Workload = kind(config, **config.workload.args)
    except (TypeError, ValueError) as error:
        name = kind.__name__
        remedy = f"; {name} is not a BaseWorkload: write class {name}(orch.BaseWorkload)"
        why = f"{error}{'' if issubclass(kind, BaseWorkload) else remedy}"
        raise WorkloadError(f"workload {config.workload.target} cannot be created: {why}") from error
    return made


_OURS = Path(__file__).parents[2]
_LONGEST = 500
"""Maximum characters of an error to show."""


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Convert any exception to a WorkloadError with `what` and the location. Redirect prints to stderr."""
    try:
        with redirect_stdout(sys.stderr):
            yield
    except WorkloadError as error:
        cause = error.__cause__
        raise WorkloadError(f"{error}{_place(cause) if cause is not None else ''}") from cause
    except (Exception, SystemExit) as error:  # noqa: BLE001  # outermost edge of the user's code
        message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        message = message if len(message) <= _LONGEST else f"{message[: _LONGEST - 3]}..."
        raise WorkloadError(f"{what} raised {' '.join(message.split())}{_place(error)}") from error


def _place(error: BaseException) -> str:
    """Return ` at FILE:LINE`: the innermost line in user code, or the line of a syntax error."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not _is_library(frame.filename)]
    return f" at {own[-1].filename}:{own[-1].lineno}" if own else ""


def _is_library(name: str) -> bool:
    path = Path(name)
    ours = any(path.is_relative_to(_OURS / package) for package in ("orch", "orchestrator", "trainer", "checkpointing"))
    return ours or "site-packages" in path.parts or name.startswith(("<", sys.prefix, sys.base_prefix))
