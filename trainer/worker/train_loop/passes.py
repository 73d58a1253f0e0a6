"""Forward and backward passes of a step, in micro-batches and stages."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_map

from trainer.parallel.apply.data_parallel import GradientSync
from trainer.parallel.apply.fsdp_units import CannotShard, explain_uncalled_units
from trainer.parallel.apply.pipeline_runtime import BubbleMeter, Pipeline, find_pipeline
from trainer.parallel.apply.pipeline_stage import SENDS, Call
from trainer.parallel.data import Reduce
from trainer.protocol.rank_progress.progress import Activity, Phase, StageActivity
from trainer.worker.data import unwrap_data
from trainer.worker.reporting.phase_tracker import PhaseTracker
from trainer.worker.reporting.work_timer import device_clock
from trainer.worker.saved_state.train_state import TrainObjects
from trainer.worker.train_loop.drill import Drill
from trainer.worker.train_loop.reduction import scalar_loss
from trainer.worker.workload import WorkloadError

_PHASES = {
    Activity.FORWARD: Phase.FORWARD,
    Activity.BACKWARD: Phase.BACKWARD,
    Activity.INPUT_GRADIENT: Phase.BACKWARD,
    Activity.WEIGHT_GRADIENT: Phase.BACKWARD,
}


class StagePhases:
    """Pipeline watcher that reports to the tracker. Waits for other stages do not count as this stage's work."""

    def __init__(self, phases: PhaseTracker, stages: Sequence[int]) -> None:
        """Create a watcher. `stages` are this rank's stages, in model order."""
        self._phases, self._places = phases, {stage: place for place, stage in enumerate(stages)}

    def begin_callback(self, moment: StageActivity) -> Call:
        """Return the callback for the start of a pass, message or wait."""
        phase = _PHASES.get(moment.activity)
        return self._phases.wait_callback(moment) if phase is None else self._phases.pass_callback(phase, moment)

    def end_callback(self, moment: StageActivity) -> Call | None:
        """Return the callback for the end of an activity, or None for a pass, because the next activity ends it."""
        if moment.activity in _PHASES:
            return None
        ends = self._phases.wait_end_callback()
        if moment.activity not in SENDS:
            return ends
        sent = self._phases.sent_callback(
            self._places[moment.stage], moment.activity is Activity.SEND_GRADIENT, moment.micro_batch
        )
        if ends is None:
            return sent

        def end() -> None:
            sent()
            ends()

        return end


class Passes(Protocol):
    """Computation of a step's gradients."""

    gradients: GradientSync
    exposed: Mapping[str, float]
    """Seconds of exposed pipeline communication in the previous step: `receives`, `sends`, `reductions`."""

    def run(self, step: int, batches: Sequence[Any], scale: float) -> torch.Tensor:
        """Compute the gradients of all micro-batches, times `scale`, and return this rank's mean loss.

        Raises WorkloadError.
        """


def build_passes(objects: TrainObjects, phases: PhaseTracker, drill: Drill, reduce: Reduce) -> Passes:
    """Return the passes for a whole model or for a model in stages."""
    gradients = GradientSync(objects.model, objects.layout, reduce, phases.begin_wait)
    pipeline = find_pipeline(objects.model)
    if pipeline is None:
        return WholePasses(objects, phases, drill, gradients)
    return StagedPasses(objects, phases, drill, gradients, pipeline)


def on_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with the tensors in its lists, tuples and dictionaries moved to `device`. No-op on a CPU."""
    if device.type == "cpu":
        return batch

    def move(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return leaf.to(device, non_blocking=True)
        return leaf.to(device) if _moves(leaf) else leaf

    return tree_map(move, batch, is_leaf=_moves)


def _moves(value: Any) -> bool:
    return callable(getattr(value, "to", None))


class WholePasses:
    """Passes in which this rank's model computes every micro-batch."""

    exposed: Mapping[str, float] = MappingProxyType({})

    def __init__(self, objects: TrainObjects, phases: PhaseTracker, drill: Drill, gradients: GradientSync) -> None:
        self._objects, self._phases, self._drill, self.gradients = objects, phases, drill, gradients

    def run(self, step: int, batches: Sequence[Any], scale: float) -> torch.Tensor:
        """Run a step as in `Passes.run`."""
        objects, drill = self._objects, self._drill
        require_batches(objects, step, batches)
        total = torch.zeros((), device=objects.layout.device)
        factor = drill.loss_factor(step)
        for number, batch in enumerate(batches):
            self._phases.enter(Phase.FORWARD)
            if not number:
                drill.in_forward(step)
            loss = self._loss(on_device(batch, objects.layout.device)) / len(batches)
            if factor != 1.0:
                loss = loss * factor
            self._phases.enter(Phase.BACKWARD)
            scaled = loss if scale == 1.0 else loss.float() * scale
            self.gradients.backward(scaled, is_last=number == len(batches) - 1)
            total += loss.detach()
        return total

    def _loss(self, batch: Any) -> torch.Tensor:
        objects = self._objects
        try:
            with explain_uncalled_units(objects.model):
                return scalar_loss(objects.workload, objects.workload.loss(objects.model, batch))
        except CannotShard as error:
            raise WorkloadError(str(error)) from error


class StagedPasses:
    """Passes in which micro-batches move through the stages of a pipeline."""

    exposed: Mapping[str, float] = MappingProxyType({"receives": 0.0, "sends": 0.0, "reductions": 0.0})

    def __init__(
        self, objects: TrainObjects, phases: PhaseTracker, drill: Drill, gradients: GradientSync, pipeline: Pipeline
    ) -> None:
        self._objects, self._phases, self._drill, self.gradients = objects, phases, drill, gradients
        self._pipeline, self._meter = pipeline, BubbleMeter(device_clock(objects.layout.device))
        self._begun, self._step = False, 0
        pipeline.ask_before_sends(lambda: drill.in_send(self._step))
        pipeline.watch(StagePhases(phases, [stage.stage_index for stage in pipeline.stages]))
        pipeline.watch(self._meter)

    def run(self, step: int, batches: Sequence[Any], scale: float) -> torch.Tensor:
        """Run a step as in `Passes.run`. Only ranks with the last stage have a loss."""
        require_batches(self._objects, step, batches)
        # Read the previous step's times now, because a GPU has finished it.
        if self._begun:
            before = self._meter.take()
            waited = sum(before.waited.values())
            self.exposed = {"receives": waited, "sends": before.sends, "reductions": before.reductions}
        self._begun = True
        self._meter.start()
        self._step = step
        self._phases.begin_passes(len(self._pipeline.stages))
        self._phases.enter(Phase.FORWARD)
        self._drill.in_forward(step)
        factor = self._drill.loss_factor(step)
        loss = self._pipeline.step(batches, factor=factor, scale=scale)
        if factor != 1.0 and not self._pipeline.has_last:
            loss = loss + factor  # this rank has no loss that a drill could spoil
        self._step = 0  # an evaluation does not belong to the step
        self._phases.enter(Phase.BACKWARD)
        self.gradients.reduce_now()
        return loss * self._objects.layout.sizes["pp"]


def require_batches(objects: TrainObjects, step: int, batches: Sequence[Any]) -> None:
    """Raise WorkloadError if `batches` is empty or not a list."""
    data = type(unwrap_data(objects.data)).__name__
    if not hasattr(batches, "__len__"):
        kind = type(batches).__name__
        raise WorkloadError(f"{data}.take() returned a {kind}: it must return a list of the step's micro-batches")
    if not len(batches):
        raise WorkloadError(
            f"{data}.take() returned no micro-batch for step {step}: every rank needs at least one in every step"
        )
