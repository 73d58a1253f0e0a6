"""Save schedule and stop requests, on which all ranks agree."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from enum import IntEnum

from checkpointing.config import AUTO, CheckpointConfig
from checkpointing.save_interval import SaveCosts, differs_enough, interval, quantile, retry_after, skip_before_stop
from trainer.protocol.rank_progress.progress import ProgressCell, StopReason


class StopFlag:
    """Stop requests from a rank's agent. A request stays in the cell, so a served request must be remembered."""

    def __init__(self, cell: ProgressCell) -> None:
        self._cell = cell
        self._served: tuple[StopReason, float] | None = None

    def stop_vote(self) -> StopReason:
        """Return this rank's stop vote for the step's reduction."""
        request = self._cell.read_stop_request()
        if request != self._served:
            self._served = None
        return StopReason.NONE if self._served else request[0]

    def mark_served(self) -> None:
        """Mark the current request as answered by the save on which all ranks have agreed."""
        request = self._cell.read_stop_request()
        self._served = request if request[0] == StopReason.SAVE_AND_GO_ON else None


_SAMPLES = 64
_HUNG = 8.0
"""Multiple of the usual save time above which a save is not counted, because it waited for a hung disk."""
_ENOUGH = 8


class SaveVote(IntEnum):
    """Rank 0's save vote in a step's reduction. Every rank reads it one step later."""

    NONE = 0
    SAVE = 1
    HOLD_BACK = 2  # skip ordinary saves: a stop, which also saves, will come soon


class SaveSchedule:
    """Schedule that counts the steps between saves.

    Every rank calls `should_save` and `record_save`. Only rank 0 calls `save_vote`, which depends on its clock, commits
    and failures.
    """

    def __init__(
        self, config: CheckpointConfig, *, saved: int, mtbf: float,
        on_change: Callable[[int, float, str], None], clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """Create a schedule. `saved` is the newest step on disk, which may be older than a step restored from memory.

        `mtbf` is the mean seconds between failures of the whole job. `on_change` receives the steps, seconds and reason
        of a new interval.
        """
        self._config, self._mtbf, self._on_change, self._clock = config, mtbf, on_change, clock
        self._auto = config.every == AUTO
        self._fixed = config.every if isinstance(config.every, int) else 0
        self.steps = config.auto.least if self._auto else self._fixed
        """Current number of steps between two saves."""
        self._tried, self._open, self._failures, self._committed = saved, False, 0, saved
        self._quiet: deque[float] = deque(maxlen=_SAMPLES)
        self._busy: deque[float] = deque(maxlen=_SAMPLES)
        self._stalls: deque[float] = deque(maxlen=_SAMPLES)
        self.save_seconds = 0.0
        """99th percentile of the seconds from a save to its commit, without hung saves."""

    @property
    def tried_step(self) -> int:
        """Step of the newest save that was started or attempted."""
        return self._tried

    # -- all ranks

    def should_save(self, step: int, save_vote: SaveVote) -> bool:
        """Return whether to save after `step`. It is the same on every rank, because `save_vote` is."""
        if save_vote is SaveVote.SAVE:
            return True
        return bool(self._fixed and step % self._fixed == 0 and save_vote is not SaveVote.HOLD_BACK)

    def record_save(self, step: int, accepted: bool) -> None:
        """Record a save of `step`, or its refusal because both copies are still being written."""
        self._tried, self._open = step, accepted
        self._failures += not accepted
        self._stalls.append(0.0)

    def record_stall(self, seconds: float) -> None:
        """Add seconds for which the newest save has blocked training."""
        if self._stalls:
            self._stalls[-1] += seconds

    # -- rank 0

    def record_step(self, seconds: float) -> None:
        """Record the duration of a step, excluding the save before it."""
        (self._busy if self._open else self._quiet).append(seconds)

    def read_saver(self, committed: int, failure: str | None, save_seconds: Sequence[float]) -> None:
        """Record the saver's newest committed step, newest failure, and the durations of its last saves in seconds."""
        self.save_seconds = quantile(_usual(save_seconds), 0.99)
        if committed > self._committed:
            self._committed = committed
            if self._auto:
                self._plan()
        if self._open and committed >= self._tried:
            self._open, self._failures = False, 0
        elif self._open and failure is not None:
            self._open = False
            self._failures += 1

    def save_vote(self, step: int, stop_due: float) -> SaveVote:
        """Return rank 0's vote for the step after `step`. `stop_due` is a time on this clock, or 0 if unknown."""
        since = step + 1 - self._tried
        if self._failures and not self._open:
            return SaveVote.SAVE if since >= retry_after(self.steps, self._failures) else SaveVote.NONE
        length = self.steps * quantile(self._quiet, 0.5) if self._auto else 0.0
        if stop_due and skip_before_stop(stop_due - self._clock(), interval=length, save=self.save_seconds):
            return SaveVote.HOLD_BACK
        # Never save more often than saves finish. The saver eventually abandons a hung save and reports why.
        pause = self._longest() if self._open else self.steps
        return SaveVote.SAVE if self._auto and since >= pause else SaveVote.NONE

    def _plan(self) -> None:
        step = quantile(self._quiet, 0.5) or quantile(self._busy, 0.5)
        if step <= 0:
            return
        measured = SaveCosts(
            step=step, stall=quantile(self._stalls, 0.5), slowdown=self._slowdown(step), save=self.save_seconds
        )
        found = interval(measured, self._mtbf, least=self._config.auto.least, most=self._longest())
        if differs_enough(self.steps, found.steps):
            self.steps = found.steps
            self._on_change(found.steps, found.steps * step, found.reason)

    def _longest(self) -> int:
        limit = self._config.max_unsaved_steps
        return min(self._config.auto.most, limit // 2) if limit else self._config.auto.most

    def _slowdown(self, step: float) -> float:
        """Return the total slowdown of the steps during one save; 0 until there are enough samples."""
        if len(self._busy) < _ENOUGH or len(self._quiet) < _ENOUGH:
            return 0.0
        beside = quantile(self._busy, 0.5)
        return max(0.0, self.save_seconds * (1 - step / beside))


def _usual(seconds: Sequence[float]) -> Sequence[float]:
    if len(seconds) < _ENOUGH:
        return seconds
    limit = _HUNG * quantile(seconds, 0.5)
    return [each for each in seconds if each <= limit]
