"""Validation on token data that is held out from training: the mean loss of its batches, in any layout of ranks."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from trainer.worker.data import TokenData, unwrapped
from trainer.worker.metric_values import Mean, Metric
from trainer.worker.pipeline.pipelined_llama import pipeline_of
from trainer.worker.train_objects import TrainObjects
from trainer.worker.workload import WorkloadError

VAL_LOSS = "val_loss"

Validate = Callable[[nn.Module], Mapping[str, Metric]]


def held_out_validation(objects: TrainObjects, batches: int) -> Validate | None:
    """What validates on `batches` batches; None for none. Raises WorkloadError for data that holds none out."""
    if not batches:
        return None
    data: Any = unwrapped(objects.data)
    if not isinstance(data, TokenData):
        raise WorkloadError(
            f"validation.batches={batches}: {type(data).__name__} holds nothing out, only token data (data.path) does: "
            "write `validate` in the workload, or type validation.batches=0"
        )
    return lambda model: {VAL_LOSS: _mean_loss(objects, model, data)}


def _mean_loss(objects: TrainObjects, model: nn.Module, data: TokenData) -> Mean:
    """Of this rank's share; of a pipeline only the ranks of the last stage know it, and count."""
    pipeline, loss = pipeline_of(model), objects.workload.loss
    if pipeline is not None:
        found, knows = [pipeline.evaluate(batch) for batch in data.held_out()], pipeline.has_last
    else:
        found, knows = [loss(model, part).reshape(()) for batch in data.held_out() for part in batch], True
    return Mean(torch.stack(found).double().mean(), float(knows))
