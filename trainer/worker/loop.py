"""The training loop: steps, agreement at every step boundary, saves."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.contract.config import JobConfig
from trainer.contract.events import EventKind
from trainer.contract.outcome import ExitCode
from trainer.contract.progress import Phase, ProgressCell, StopReason
from trainer.worker import reduction, state
from trainer.worker.course import Course
from trainer.worker.data import Data, take
from trainer.worker.drill import Drill
from trainer.worker.mesh import Layout
from trainer.worker.metrics import Journal
from trainer.worker.optimizer import set_learning_rate
from trainer.worker.reduction import Reduced, StepResult, Word
from trainer.worker.rhythm import Rhythm, Wish
from trainer.worker.saving import Progressed, SaveFailed, Saver
from trainer.worker.schedule import learning_rate
from trainer.worker.spikes import BadStep, Losses
from trainer.worker.stop import StopFlag
from trainer.worker.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Trained:
    """The workload and what it made, sharded and on its device."""

    workload: Workload
    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: Data
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class Outside:
    """Everything through which a rank speaks with the world."""

    cell: ProgressCell
    journal: Journal
    saver: Saver
    drill: Drill
    rhythm: Rhythm
    course: Course
    losses: Losses
    started: float  # time.monotonic() of the rank's start
    skip: Collection[int] = ()  # positions in the data that are left out


@dataclass(frozen=True)
class Unread:
    """A step whose sums are still on the device, and where its batch stands in the data."""

    reduced: Reduced
    position: int


class Loop:
    """Trains from wherever `progressed` stands to the last step, or to the step boundary where all agree to stop.

    The sums of step s are read on the host when step s + 1 has been queued, so a GPU's queue never drains. A stop
    asked for during step s is therefore served after step s + 1, on every rank alike.
    """

    def __init__(self, config: JobConfig, trained: Trained, progressed: Progressed, outside: Outside) -> None:
        self._config, self._trained, self._progressed, self._outside = config, trained, progressed, outside
        self._stop = StopFlag(outside.cell)
        self._unread: Unread | None = None
        self._first = True
        self._mark = time.perf_counter()
        self._seconds = self._stall = 0.0
        self._wish = Wish.NONE
        self._committed = outside.saver.committed_step or 0

    def run(self) -> ExitCode:
        """Train; returns FINISHED or STOPPED_AFTER_SAVE, raises what went wrong."""
        total, now = self._config.train.steps, self._progressed
        while now.step < total:
            step = now.step + 1
            unread = self._train(step)
            now.step = step
            reason = self._boundary(unread)
            if reason > StopReason.SAVE_AND_GO_ON and step < total:
                return ExitCode.STOPPED_AFTER_SAVE
        self._outside.saver.wait()
        self._finish()
        return ExitCode.FINISHED

    def _train(self, step: int) -> Unread:
        """One optimizer step; nothing in it waits for the device."""
        trained, train = self._trained, self._config.train
        self._outside.course.enter(Phase.DATA)
        self._outside.drill.in_data(step)
        position, batches = take(trained.data, self._outside.skip)
        self._outside.cell.add_input_bytes(sum(batch.nbytes for batch in batches if isinstance(batch, torch.Tensor)))
        loss = self._accumulate(step, batches)
        self._outside.course.enter(Phase.OPTIMIZER)
        reduced = self._reduce(step, loss)
        set_learning_rate(trained.optimizer, learning_rate(train, step))
        # A save in lazy mode still reads what the optimizer is about to change.
        began = time.perf_counter()
        self._outside.saver.before_optimizer_step()
        self._stalled(time.perf_counter() - began)
        trained.optimizer.step()
        trained.optimizer.zero_grad(set_to_none=True)
        self._outside.course.stepped(step)
        return Unread(reduced, position)

    def _reduce(self, step: int, loss: torch.Tensor) -> Reduced:
        """Sum over all ranks what they have to know of each other, and clip the gradients by it."""
        gradients = [p.grad for p in self._trained.model.parameters() if p.grad is not None]
        self._outside.drill.before_reduce(step)
        self._outside.course.pause()
        reduced = reduction.reduce(step, gradients, loss, self._stop.asked(), self._word(step))
        self._outside.course.resume()
        reduction.clip(gradients, reduced.norm, self._config.train.clip_norm)
        return reduced

    def _accumulate(self, step: int, batches: Sequence[Any]) -> torch.Tensor:
        """Gradients of all micro-batches; returns this rank's mean loss."""
        trained, drill = self._trained, self._outside.drill
        total = torch.zeros((), device=trained.layout.device)
        factor = drill.loss_factor(step)
        for number, batch in enumerate(batches):
            self._outside.course.enter(Phase.FORWARD)
            if not number:
                drill.in_forward(step)
            loss = trained.workload.loss(trained.model, batch) / len(batches)
            if factor != 1.0:
                loss = loss * factor
            self._outside.course.enter(Phase.BACKWARD)
            loss.backward()
            total += loss.detach()
        return total

    def _boundary(self, unread: Unread) -> StopReason:
        """After a step: tell, agree, save. What is decided here is decided alike on every rank."""
        step, outside = unread.reduced.step, self._outside
        outside.journal.worked(step)
        # On a GPU this waits for the step before: it belongs to this step's end, not to the next one's data.
        reason = self._settle()
        saved, seconds = outside.saver.committed_step or 0, outside.rhythm.save_seconds
        # A rank that is held up from here on has not gone ahead of its peers: it is on its way to its next batch.
        outside.cell.enter(Phase.DATA)
        outside.cell.update(step=step, saved_step=saved, save_seconds=seconds, step_seconds=self._seconds)
        self._check_saved(step)
        self._unread, self._seconds = unread, self._lap()
        outside.rhythm.stepped(self._seconds)
        if self._first:
            self._first_step(step)
        if reason or step == self._config.train.steps or outside.rhythm.calls(step, self._wish):
            # A save waits for the device anyway, so this step's own votes are read too.
            reason = max(reason, self._settle())
            self._save(reason)
            self._lap()
        outside.drill.after_step(step)
        return reason

    def _first_step(self, step: int) -> None:
        self._first = False
        if self._trained.layout.rank == 0:
            seconds = time.monotonic() - self._outside.started
            self._outside.journal.event(EventKind.GENERATION_FIRST_STEP, step=step, seconds=seconds)

    def _settle(self) -> StopReason:
        """Read the sums that are still on the device, if any, and tell them."""
        self._wish = Wish.NONE
        if self._unread is None:  # a save has read them already, and was what they asked for
            return StopReason.NONE
        unread, self._unread = self._unread, None
        result = unread.reduced.result()
        self._progressed.loss = result.loss
        self._wish, self._committed = result.word.wish, max(self._committed, result.word.committed)
        self._outside.cell.update(loss=result.loss, grad_norm=result.grad_norm)
        self._tell(result)
        bad = self._outside.losses.judge(result.loss, result.grad_norm)
        if bad is not None:
            # Before any save of it: every rank reads the same sums, so all of them end here.
            raise BadStep(result.step, unread.position, bad)
        return result.stop

    def _lap(self) -> float:
        """Seconds since the last call: a step's time, without the save that came before it."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        return seconds

    def _tell(self, result: StepResult) -> None:
        train, seconds = self._config.train, self._seconds
        self._outside.journal.step(
            result.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=learning_rate(train, result.step),
            seconds=seconds,
            tokens_per_s=train.batch_size * train.seq_len / seconds,
            stall=self._stall,
        )
        self._stall = 0.0

    def _save(self, reason: StopReason) -> None:
        """Save; wait for the commit when the run ends with it."""
        outside, step = self._outside, self._progressed.step
        self._outside.course.enter(Phase.CHECKPOINT)
        if reason:
            self._stop.served()
            if self._trained.layout.rank == 0:
                outside.journal.event(EventKind.STOP_AGREED, step=step, reason=reason.name.lower())
        last = reason > StopReason.SAVE_AND_GO_ON or step == self._config.train.steps
        if not self._hand_over(step) and last:
            outside.saver.wait()  # whatever is still being written, this save must not be left out
            self._hand_over(step)
        if last:
            outside.saver.wait()
            outside.cell.update(saved_step=outside.saver.committed_step or 0)
            if outside.saver.committed_step != step:
                raise SaveFailed(f"the last checkpoint, of step {step}, was not saved: {outside.saver.failure}")

    def _hand_over(self, step: int) -> bool:
        """Give the state to the saver, and count what training waits for it."""
        began = time.perf_counter()
        self._outside.drill.in_save(step)
        accepted = self._progressed.save(self._outside.saver)
        self._outside.rhythm.tried(step, accepted)
        self._stalled(time.perf_counter() - began)
        return accepted

    def _stalled(self, seconds: float) -> None:
        self._stall += seconds
        self._outside.rhythm.stalled(seconds)
        if self._trained.layout.rank == 0:
            self._outside.journal.stalled(self._outside.rhythm.tried_step, seconds)

    def _word(self, step: int) -> Word:
        """What rank 0 knows and all must act on alike, read by all of them with the sums of `step`."""
        outside = self._outside
        if self._trained.layout.rank != 0:
            return Word()
        committed = outside.saver.committed_step or 0
        outside.rhythm.heard(committed, outside.saver.failure, outside.saver.save_seconds)
        return Word(wish=outside.rhythm.wish(step, outside.cell.read_expected_stop()), committed=committed)

    def _check_saved(self, step: int) -> None:
        """Raises SaveFailed, on every rank alike, when too much would be lost."""
        limit = self._config.checkpoint.max_unsaved_steps
        if limit and step - self._committed > limit:
            why = self._outside.saver.failure or "its saves have not been committed"
            raise SaveFailed(
                f"{step - self._committed} steps are in no committed checkpoint, the newest is of step "
                f"{self._committed} (checkpoint.max_unsaved_steps={limit}): {why}"
            )

    def _finish(self) -> None:
        """The weights' digest, by which two runs are compared, and the last words."""
        digest = state.weights_digest(self._trained.model)
        if self._trained.layout.rank == 0:
            self._outside.journal.final(step=self._progressed.step, loss=self._progressed.loss, weights_digest=digest)
        self._outside.course.enter(Phase.DONE)
