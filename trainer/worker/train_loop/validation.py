"""Validation: schedule, held-out batches, and preservation of the training state."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainer.parallel.apply.pipeline_runtime import find_pipeline
from trainer.protocol.config import ValidationConfig
from trainer.worker.data import TokenData, unwrap_data
from trainer.worker.optimizer import train_mode
from trainer.worker.saved_state.rng_state import pack_rng, unpack_rng
from trainer.worker.saved_state.train_state import TrainObjects
from trainer.worker.train_loop.reduction import MetricReducer
from trainer.worker.workload import Mean, Metric, WorkloadError, hook

VAL_LOSS = "val_loss"

Validate = Callable[[nn.Module], Mapping[str, Metric]]


def held_out_validation(objects: TrainObjects, batches: int) -> Validate | None:
    """Return a validation on held-out batches, or None for 0. Raises WorkloadError for data without such batches."""
    if not batches:
        return None
    data: Any = unwrap_data(objects.data)
    if not isinstance(data, TokenData):
        raise WorkloadError(
            f"validation.batches={batches}: {type(data).__name__} has no held-out batches; only token data has them: "
            "write `validate` in the workload, or set validation.batches=0"
        )
    return lambda model: {VAL_LOSS: _mean_loss(objects, model, data)}


def _mean_loss(objects: TrainObjects, model: nn.Module, data: TokenData) -> Mean:
    """Return the mean loss of this rank's share. In a pipeline, only ranks with the last stage have a loss."""
    pipeline, loss = find_pipeline(model), objects.workload.loss
    if pipeline is not None:
        found, has_loss = [pipeline.evaluate(batch) for batch in data.held_out()], pipeline.has_last
    else:
        found, has_loss = [loss(model, part).reshape(()) for batch in data.held_out() for part in batch], True
    return Mean(torch.stack(found).double().mean(), float(has_loss))


LOSS = "loss"
"""Name of a metric that every checkpoint has, regardless of the workload."""


def refuse_unknown_metric(wanted: str, returned: Collection[str]) -> None:
    """Raise WorkloadError if the metric for the best checkpoints does not exist."""
    known = (LOSS, *returned)
    if wanted and wanted not in known:
        names = ", ".join(dict.fromkeys(known))
        raise WorkloadError(f"checkpoint.best.metric={wanted}: the workload has no such number, only {names}")


def steps_on_plateau(scheduler: object) -> TypeGuard[torch.optim.lr_scheduler.ReduceLROnPlateau]:
    """Return whether the scheduler steps on validation results instead of after every optimizer step."""
    return isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


class Validation:
    """Validation with the workload's `validate` or on held-out data. The result is the same on every rank."""

    def __init__(self, objects: TrainObjects, config: ValidationConfig, *, last: int) -> None:
        """Validate every `config.every` steps (0: never) and after step `last`. Raises WorkloadError."""
        self._objects, self._every, self._last = objects, config.every, last
        self._validate: Validate | None = hook(objects.workload, "validate")
        if self._validate is None:
            self._validate = held_out_validation(objects, config.batches)
        self.names: tuple[str, ...] = ()
        """Metric names from the newest validation, including names without a value."""

    @property
    def exists(self) -> bool:
        """Whether the run has a validation."""
        return self._validate is not None

    def is_due(self, step: int) -> bool:
        """Return whether to validate after this step."""
        if self._validate is None or not step:
            return False
        return step == self._last or bool(self._every and step % self._every == 0)

    def run(self) -> dict[str, float]:
        """Validate now. Collective. Raises WorkloadError for a result that is not a number."""
        assert self._validate is not None
        with _evaluation(self._objects):
            found = self._validate(self._objects.model)
        reducer = MetricReducer("validate", self._objects.layout)
        numbers = reducer.reduce(found)
        self.names = reducer.names
        self._step_on_plateau(numbers)
        return numbers

    def _step_on_plateau(self, numbers: dict[str, float]) -> None:
        scheduler = self._objects.scheduler
        # If the first metric has no value, do not use another metric instead.
        if steps_on_plateau(scheduler) and self.names and self.names[0] in numbers:
            scheduler.step(numbers[self.names[0]])


@contextmanager
def _evaluation(objects: TrainObjects) -> Iterator[None]:
    """Disable gradients, set evaluation mode and restore generators, so that validation does not affect training."""
    model, optimizer, device = objects.model, objects.optimizer, objects.layout.device
    modes = [(module, module.training) for module in model.modules()]
    generators = pack_rng(device)
    evaluate = getattr(optimizer, "eval", None)
    if callable(evaluate):
        evaluate()
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            if type(module).train is not nn.Module.train:  # it may undo its own `eval()`, as LoRA does
                module.train(mode)
        for module, mode in modes:  # a module's `train()` thaws parts that the workload has frozen
            module.training = mode
        for module in model.modules():
            if isinstance(module, FSDPModule):  # without a backward pass, the last units stay unsharded
                module.reshard()
        if callable(evaluate):
            train_mode(optimizer)
        unpack_rng(generators, device)
