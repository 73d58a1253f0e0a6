"""Training loop: steps, agreement at every step boundary, and saves."""

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from checkpointing.errors import SaveFailed
from trainer.parallel.apply.expert_parallel import build_expert_balance
from trainer.parallel.apply.gradient_buckets import GradientFacts
from trainer.protocol.config import JobConfig
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import ExitCode
from trainer.protocol.failures.save_trouble import short_reason
from trainer.protocol.rank_progress.progress import Phase, ProgressCell, StopReason
from trainer.worker.data import LoaderDraws
from trainer.worker.optimizer import clear_gradients, learning_rate, set_learning_rate
from trainer.worker.reporting.metrics import Journal, StepFigures, expert_loads, held_states, section_seconds
from trainer.worker.reporting.phase_tracker import PhaseTracker, ProgressLog
from trainer.worker.reporting.retrained_steps import RetrainedSteps
from trainer.worker.saved_state.checkpoint_contents import weights_digest
from trainer.worker.saved_state.train_state import RankCheckpointer, TrainObjects, TrainState
from trainer.worker.train_loop import reduction
from trainer.worker.train_loop.drill import Drill
from trainer.worker.train_loop.passes import build_passes
from trainer.worker.train_loop.reduction import MetricReducer, OwnNumbers, RankZeroMessage, Reduced, StepResult
from trainer.worker.train_loop.save_schedule import SaveSchedule, SaveVote, StopFlag
from trainer.worker.train_loop.spikes import SpikeDetector
from trainer.worker.train_loop.validation import Validation, refuse_unknown_metric, steps_on_plateau
from trainer.worker.workload import WorkloadError, hook


@dataclass(frozen=True, kw_only=True)
class LoopServices:
    """Services for the loop: reporting, saving and control."""

    cell: ProgressCell
    journal: Journal
    saver: RankCheckpointer
    drill: Drill
    save_schedule: SaveSchedule
    phases: PhaseTracker
    spike_detector: SpikeDetector
    started: float  # time.monotonic() when the rank started
    progress_log: ProgressLog
    figures: StepFigures
    retrained: RetrainedSteps
    record_code: Callable[[], None]  # called on rank 0 after its first step has imported everything it needs
    skip: Collection[int] = ()  # positions in the data
    test_until: int = 0  # a restore test trains to this step and saves nothing


@dataclass(frozen=True)
class PendingStep:
    """Step whose sums are still on the device, with its batch's position in the data and its learning rate."""

    reduced: Reduced
    position: int
    replaced: int  # skipped batches that this step would otherwise have trained on
    rate: float
    loss_scale: float
    work: Sequence[int]  # nanoseconds per section
    overflowed: bool  # in float16: the optimizer skipped the step
    exposed: Mapping[str, float]  # seconds of exposed communication in the previous step


class Loop:
    """Training loop from the current `train_state` to the last step, or to a step where all ranks agree to stop.

    The sums of step s are read on the host after step s + 1 has been queued, so a GPU's queue never drains. A stop
    requested during step s is therefore served after step s + 1, on every rank.
    """

    def __init__(
        self, config: JobConfig, objects: TrainObjects, train_state: TrainState, services: LoopServices
    ) -> None:
        self._config, self._objects, self._train_state, self._services = config, objects, train_state, services
        self._stop = StopFlag(services.cell)
        self._pending: PendingStep | None = None
        self._first, self._without_loss = True, train_state.step > 0 and not math.isfinite(train_state.loss)
        self._loader_draws, self._software = LoaderDraws(restored=train_state.step), train_state.software_digest
        self._mark = time.perf_counter()
        self._seconds = self._stall = 0.0
        self._save_vote = SaveVote.NONE
        self._committed = services.saver.committed_step or 0
        self._vote_ahead = SaveVote.NONE
        self._parameters = tuple(objects.model.parameters())
        self._passes = build_passes(objects, services.phases, services.drill, config.parallel.reduce)
        self._experts = build_expert_balance(objects.model)
        self._last = services.test_until or config.train.steps
        self._validation = Validation(objects, config.validation, last=config.train.steps)
        self._own_metrics = hook(objects.workload, "metrics")
        self._reducer = MetricReducer("metrics", objects.layout)

    def run(self) -> ExitCode:
        """Train, and return FINISHED or STOPPED_AFTER_SAVE. Raises the error of a failed step or save."""
        total, now = self._last, self._train_state
        self._validate_owed()  # if the previous process stopped before it
        while now.step < total:
            step = now.step + 1
            pending = self._train(step)
            now.step = step
            reason = self._end_step(pending)
            if reason > StopReason.SAVE_AND_GO_ON and step < total:
                return ExitCode.STOPPED_AFTER_SAVE
        self._validate_owed()  # if a stop came in the last step
        self._services.saver.wait()
        self._finish()
        return ExitCode.FINISHED

    def _train(self, step: int) -> PendingStep:
        """Run one optimizer step without waiting for the device."""
        objects = self._objects
        self._services.phases.enter(Phase.DATA)
        self._services.drill.in_data(step)
        before = self._train_state.positions.next
        position, batches = self._loader_draws.take(lambda: self._train_state.positions.take(self._services.skip))
        replaced = sum(before <= skipped < position for skipped in self._services.skip)
        self._services.cell.add_input_bytes(sum(batch.nbytes for batch in batches if isinstance(batch, torch.Tensor)))
        loss = self._passes.run(step, batches, self._train_state.loss_scale.scale)
        self._train_state.report_incomplete(self._loader_draws.restored, self._loader_draws.reason())
        self._services.phases.enter(Phase.OPTIMIZER)
        reduced = self._reduce(step, loss)
        if objects.scheduler is None:
            set_learning_rate(objects.optimizer, self._scheduled_rate(step))
        # A lazy save still reads the tensors that the optimizer is about to change.
        began = time.perf_counter()
        self._services.saver.before_optimizer_step()
        self._add_stall(time.perf_counter() - began)
        rate = self._rate(step)
        scale, overflowed = self._train_state.loss_scale.scale, self._check_overflow(reduced)
        if not overflowed:
            objects.optimizer.step()
        self._services.phases.begin_wait()
        reduced.wait()
        self._services.phases.resume()
        self._experts.step_ended(reduced.loads, moves=not overflowed)
        self._clear_gradients()
        self._passes.gradients.begin_step()
        if not overflowed and objects.scheduler is not None and not steps_on_plateau(objects.scheduler):
            objects.scheduler.step()
        self._services.phases.step_ended(step)
        self._services.figures.step_ended()
        work = self._services.phases.last_step
        return PendingStep(reduced, position, replaced, rate, scale, work, overflowed, self._exposed_seconds())

    def _clear_gradients(self) -> None:
        objects = self._objects
        clear_gradients(objects.optimizer, self._parameters, (objects.workload, objects.model))

    def _exposed_seconds(self) -> dict[str, float]:
        """Return the seconds of each kind of exposed communication in the previous step."""
        exposed = self._passes.exposed
        return {**exposed, "reductions": exposed.get("reductions", 0.0) + self._services.phases.reductions}

    def _check_overflow(self, reduced: Reduced) -> bool:
        """Return whether this step's gradients overflowed. Only float16 can, and checking it waits for the device."""
        scale = self._train_state.loss_scale
        return scale.is_dynamic and scale.update_scale(float(reduced.norm))

    def _rate(self, step: int) -> float:
        """Return the learning rate of this step, which is the first group's if the workload has its own scheduler."""
        if self._objects.scheduler is None:
            return self._scheduled_rate(step)
        return float(self._objects.optimizer.param_groups[0]["lr"])

    def _scheduled_rate(self, step: int) -> float:
        return learning_rate(self._config.optimizer, self._config.train.steps, step)

    def _reduce(self, step: int, loss: torch.Tensor) -> Reduced:
        gradients = self._passes.gradients.end_step()
        reduction.unscale(gradients, self._train_state.loss_scale.scale)
        self._services.drill.before_reduce(step)
        self._services.phases.begin_wait()
        own = None if self._own_metrics is None else self._reducer.pack(self._own_metrics())
        message = self._rank_zero_message(step)
        numbers, facts = OwnNumbers(own, self._experts.loads()), self._passes.gradients.facts()
        reduced = reduction.reduce(step, gradients, loss, self._stop.stop_vote(), message, numbers, facts)
        self._services.phases.resume()
        reduction.clip(gradients, reduced.norm, self._config.optimizer.clip_norm)
        return reduced

    def _end_step(self, pending: PendingStep) -> StopReason:
        """Report, agree on what to do, and save after a step. Every rank makes the same decisions here."""
        step, services = pending.reduced.step, self._services
        services.journal.log_work(step)
        self._train_state.step_ended()
        # On a GPU, this waits for the previous step, so the wait counts as part of this step, not as loading data.
        reason = self._read_pending()
        saved, seconds = services.saver.committed_step or 0, services.save_schedule.save_seconds
        # A rank that is delayed from here on counts as loading its next batch, not as ahead of its peers.
        services.cell.enter(Phase.DATA)
        services.cell.update(step=step, saved_step=saved, save_seconds=seconds, step_seconds=self._seconds)
        self._check_saved(step)
        self._pending, self._seconds = pending, self._lap()
        services.save_schedule.record_step(self._seconds)
        if self._first:
            self._first_step(step)
        saves = step == self._last or services.save_schedule.should_save(step, self._save_vote)
        validates = self._validation.is_due(step)
        if reason or saves or validates:
            # Saves and validations wait for the device anyway, so this step's own votes are read too.
            reason = max(reason, self._read_pending())
            # A stop leaves no time for a validation, so the next process catches up on it.
            if validates and reason <= StopReason.SAVE_AND_GO_ON:
                self._validate(step)
                self._check_best(self._validation.names)
                saves = saves or bool(self._config.checkpoint.best.metric)
            if reason or saves:
                self._save(reason)
            else:
                self._vote_ahead = self._save_vote
            self._lap()
        services.drill.after_step(step)
        return reason

    def _validate_owed(self) -> None:
        """Validate a step that was saved at a stop without validation.

        Save it again if the result selects the best checkpoints.
        """
        state, best = self._train_state, self._config.checkpoint.best.metric
        if state.validated < state.step and self._validation.is_due(state.step):
            if best in self._validate(state.step):
                self._save(StopReason.NONE)
            self._lap()

    def _validate(self, step: int) -> Mapping[str, float]:
        services, state, began = self._services, self._train_state, time.perf_counter()
        services.phases.enter(Phase.EVAL)
        numbers = self._validation.run()
        state.metrics, state.validated = {**state.metrics, **numbers}, step
        seconds = time.perf_counter() - began
        services.journal.record_validation(step, seconds, numbers)
        services.progress_log.record_validation(step, seconds, numbers)
        services.phases.enter(Phase.DATA)
        return numbers

    def _check_best(self, numbers: Collection[str]) -> None:
        refuse_unknown_metric(self._config.checkpoint.best.metric, (*self._reducer.names, *numbers))

    def _first_step(self, step: int) -> None:
        self._first = False
        if not self._validation.exists:
            self._check_best(())
        if self._objects.layout.rank == 0:
            seconds = time.monotonic() - self._services.started
            held = held_states(self._objects.model, self._objects.optimizer, self._config.parallel)
            self._services.journal.event(EventKind.GENERATION_FIRST_STEP, step=step, seconds=seconds, held=held)
            self._services.record_code()

    def _read_pending(self) -> StopReason:
        self._save_vote, self._vote_ahead = self._vote_ahead, SaveVote.NONE
        if self._pending is None:  # already read by the save that they requested
            return StopReason.NONE
        pending, self._pending = self._pending, None
        result = pending.reduced.result()
        if not result.used_alike:
            raise WorkloadError(
                f"step {result.step}: ranks used different parameters, whose gradients cannot be averaged: every rank "
                "must use the same ones in every step (add 0 * parameter.sum() to the loss for each unused one)"
            )
        if not result.gradients_alike:
            raise WorkloadError(f"step {result.step}: {self._passes.gradients.why_different()}")
        self._train_state.loss = result.loss
        own = self._train_state.metrics = self._reducer.unpack(result.own)
        self._save_vote, self._committed = result.message.save_vote, max(self._committed, result.message.committed)
        self._services.cell.update(loss=result.loss, grad_norm=result.grad_norm)
        self._report(result, pending, own)
        if not self._is_excused(pending, result):
            # This precedes any save of the step. Every rank reads the same sums, so a bad step raises on all ranks.
            self._services.spike_detector.judge(result, pending.position, pending.replaced)
        return result.stop

    def _is_excused(self, pending: PendingStep, result: StepResult) -> bool:
        """Return whether float16 overflow excuses a bad step. Two non-finite losses in a row are not an overflow."""
        again, self._without_loss = self._without_loss, not math.isfinite(result.loss)
        return pending.overflowed and not (again and self._without_loss)

    def _lap(self) -> float:
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        return seconds

    def _report(self, result: StepResult, pending: PendingStep, own: Mapping[str, float]) -> None:
        seconds, tokens = self._seconds, getattr(self._objects.data, "tokens_per_step", None)
        values: dict[str, Any] = {
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": pending.rate,
            "seconds": seconds,
        }
        values |= {"position": pending.position, "software": self._software}
        speed = {} if tokens is None else {"tokens_per_s": float(tokens) / seconds}
        more: dict[str, Any] = {"metrics": own} if own else {}
        more |= self._services.figures.build_figures(
            result.step, seconds, self._stall, section_seconds(pending.work), pending.exposed
        )
        more |= expert_loads(result.step, result.loads, self._experts.layers)
        if self._train_state.loss_scale.is_dynamic:
            more |= {"loss_scale": pending.loss_scale, "overflowed": pending.overflowed}
        self._services.journal.step(result.step, **values, **speed, stall=self._stall, **more)
        self._services.retrained.step_ended(result.step, values)
        self._services.progress_log.step(result.step, loss=result.loss, lr=pending.rate, own=own)
        self._stall = 0.0

    def _save(self, reason: StopReason) -> None:
        """Save, and wait for the commit if the run ends with this save."""
        services, step = self._services, self._train_state.step
        services.phases.enter(Phase.CHECKPOINT)
        services.journal.settle()
        if reason:
            self._stop.mark_served()
            if self._objects.layout.rank == 0:
                services.journal.event(EventKind.STOP_AGREED, step=step, reason=reason.name.lower())
        if services.test_until:
            return
        last = reason > StopReason.SAVE_AND_GO_ON or step == self._last
        if not self._try_save(step) and last:
            services.saver.wait()  # this save must not be skipped, even if another is still being written
            self._try_save(step)
        if last:
            services.saver.wait()
            services.cell.update(saved_step=services.saver.committed_step or 0)
            if services.saver.committed_step != step:
                why = short_reason(services.saver.failure or "its save was skipped")
                raise SaveFailed(step, f"the last checkpoint was not saved: {why}")

    def _try_save(self, step: int) -> bool:
        began = time.perf_counter()
        self._services.drill.in_save(step)
        accepted = self._train_state.save(self._services.saver)
        self._services.save_schedule.record_save(step, accepted)
        self._add_stall(time.perf_counter() - began)
        return accepted

    def _add_stall(self, seconds: float) -> None:
        self._stall += seconds
        self._services.save_schedule.record_stall(seconds)
        if self._objects.layout.rank == 0:
            self._services.journal.record_stall(self._services.save_schedule.tried_step, seconds)

    def _rank_zero_message(self, step: int) -> RankZeroMessage:
        """Return rank 0's decisions for all ranks, which read them with the sums of `step`."""
        services = self._services
        if self._objects.layout.rank != 0:
            return RankZeroMessage()
        committed = services.saver.committed_step or 0
        services.save_schedule.read_saver(committed, services.saver.failure, services.saver.save_seconds)
        return RankZeroMessage(
            save_vote=services.save_schedule.save_vote(step, services.cell.read_expected_stop()), committed=committed
        )

    def _check_saved(self, step: int) -> None:
        """Raise SaveFailed on every rank if too many steps are unsaved, or if no save can ever succeed."""
        if self._services.saver.lasting is not None:
            raise self._services.saver.lasting
        limit = self._config.checkpoint.max_unsaved_steps
        if limit and step - self._committed > limit:
            why = short_reason(self._services.saver.failure or "saves have not been committed since")
            raise SaveFailed(
                step,
                f"{step - self._committed} steps are in no committed checkpoint; the newest is of step "
                f"{self._committed} (checkpoint.max_unsaved_steps={limit}): {why}",
            )

    def _finish(self) -> None:
        """Record the probe and the weights' digest, which identifies equal runs, and enter the last phase."""
        digest = weights_digest(self._objects.model, self._objects.layout)
        probes = self._config.trains_built_in_workload and not self._services.test_until
        probe = {"probe": self._probe()} if probes else {}
        if self._objects.layout.rank == 0:
            self._services.journal.final(
                step=self._train_state.step, loss=self._train_state.loss, weights_digest=digest, **probe
            )
        self._services.phases.enter(Phase.DONE)

    def _probe(self) -> dict[str, float]:
        """Return the loss and gradient norm of one more step, for restore tests to compare. No weights are changed."""
        step, objects = self._train_state.step + 1, self._objects
        _, batches = self._train_state.positions.take(self._services.skip)
        loss = self._passes.run(step, batches, self._train_state.loss_scale.scale)
        gradients = [p.grad for p in objects.model.parameters() if p.grad is not None]
        reduction.unscale(gradients, self._train_state.loss_scale.scale)
        about = GradientFacts(stages=objects.layout.sizes["pp"])
        found = reduction.reduce(step, gradients, loss, StopReason.NONE, RankZeroMessage(), about=about).result()
        self._clear_gradients()
        return {
            "step": step, "loss": found.loss, "grad_norm": found.grad_norm,
            "lr": self._scheduled_rate(step),
        }  # fmt: skip
