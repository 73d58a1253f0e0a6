"""The save queue, which runs one save after another in its own thread. All ranks agree on each save."""

import collections
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from checkpointing.engine.collectives.group import (
    FAILURES,
    Failed,
    RankGroup,
    explain,
    result_or_failed,
    start_background_thread,
)
from checkpointing.engine.save.saver import CheckpointSaver, SavedCheckpoint, SaveJob
from checkpointing.errors import FencedOff, SaveFailed, Unsound
from checkpointing.event_sink import EmitEvent


@dataclass(frozen=True, kw_only=True)
class SaveAgreement:
    """The ranks' agreement. `same`: all can use their current plan. `alike`: all have the same `rank_state`."""

    same: bool
    has_room: bool
    idle: bool
    alike: bool = True


def agree_on_save(
    ranks: RankGroup, *, plan: int, step: int, has_room: bool, idle: bool, rank_state: int = 0
) -> SaveAgreement:
    """Exchange 64 bytes per rank. Raises ValueError on every rank if their steps differ.

    `plan` is the number of this rank's plan, or 0 if its state no longer matches it. `rank_state` is a digest of the
    facts that may differ between ranks.
    """
    mine = [plan, -plan, step, -step, has_room, idle, rank_state, -rank_state]
    plan, most_plan, step, most_step, all_have_room, all_idle, state, most_state = ranks.minimum(mine)
    if step != -most_step:
        raise ValueError(f"the ranks save different steps, from {step} to {-most_step}: they must call save together")
    return SaveAgreement(
        same=plan == -most_plan != 0, has_room=bool(all_have_room), idle=bool(all_idle), alike=state == -most_state
    )


RETRY_PAUSES = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0)
"""Seconds before each retry of a failed save."""

_WAITED_TRIES, _WAITED_PAUSE = 2, 1.0

_log = logging.getLogger(__name__)


class SaveQueue:
    """Queue of save jobs. All ranks submit the same jobs in the same order, and rank 0 decides on retries."""

    def __init__(
        self,
        saver: CheckpointSaver,
        ranks: RankGroup,
        emit: EmitEvent,
        ended: Callable[[SaveJob, SavedCheckpoint | SaveFailed], None],
        pauses: Sequence[float] = RETRY_PAUSES,
    ) -> None:
        """Create a queue.

        `ended` is called with each job and its result or failure, once the job's buffers are free.
        """
        self._saver, self._ranks, self._emit, self._ended, self._pauses = saver, ranks, emit, ended, pauses
        self._jobs: collections.deque[SaveJob] = collections.deque()
        self._changed = threading.Condition()
        self._busy = self._waited = self._closed = self._dead = False
        self._thread: threading.Thread | None = None

    @property
    def alive(self) -> bool:
        """False once an unexpected error has ended the thread. This rank then completes no more saves."""
        return not self._dead

    def submit(self, job: SaveJob) -> None:
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()
        if self._thread is None:
            self._thread = start_background_thread(self._serve, "checkpoint-saves")

    def wait(self) -> None:
        """Return once no save is running. During the wait, a failed save is retried only briefly."""
        with self._changed:
            self._waited = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._dead or (not self._jobs and not self._busy))
            self._waited = False

    def close(self) -> None:
        """Wait, then end the thread."""
        self.wait()
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        while (job := self._next()) is not None:
            try:
                self._serve_one(job)
            except Exception as error:  # noqa: BLE001  # outermost edge
                self._die(job, error)
                return
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _serve_one(self, job: SaveJob) -> None:
        result = self._work(job)
        job.staged.drain()
        # By now the save has either been committed or failed. Later errors must not change that or stop the next save.
        ended = result_or_failed(lambda: self._ended(job, result))
        if isinstance(ended, Failed):
            _log.error("after the save of step %d: %s", job.step, ended.reason)

    def _die(self, job: SaveJob, error: Exception) -> None:
        """Report it, then release all that wait: callers of `wait`, training that is filling buckets, other ranks."""
        _log.error("the save thread has ended", exc_info=error)
        result_or_failed(lambda: self._broken(job, error))
        with self._changed:
            self._dead = True
            jobs = [job, *self._jobs]
            self._jobs.clear()
            self._changed.notify_all()
        result_or_failed(self._ranks.close)
        for left in jobs:
            left.staged.drain()

    def _next(self) -> SaveJob | None:
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._closed)
            if not self._jobs:
                return None
            self._busy = True
            return self._jobs.popleft()

    def _work(self, job: SaveJob) -> SavedCheckpoint | SaveFailed:
        """Retry until the job is saved or given up on. Return the result or the last failure."""
        tries = 0
        while True:
            try:
                return self._saver.run(job)
            except SaveFailed as failure:
                try:
                    # If deciding or emitting the event fails, there is no retry.
                    again = self._ranks.from_leader(partial(self._should_retry, job, failure, tries))
                except FAILURES as error:
                    return SaveFailed(job.step, self._broken(job, error))
                if again is not True:
                    if self._ranks.leads:
                        facts = {"step": job.step, "reason": failure.reason, "bytes": job.plan.size}
                        self._emit("checkpoint.failed", facts)
                    return failure
            except FAILURES as error:
                return SaveFailed(job.step, self._broken(job, error))
            tries += 1

    def _broken(self, job: SaveJob, error: BaseException) -> str:
        """Report a broken group. From then on, no rank can act for the others."""
        reason = f"rank {self._ranks.rank}: {explain(error)}"
        self._emit("checkpoint.failed", {"step": job.step, "reason": reason})
        return reason

    def _should_retry(self, job: SaveJob, failure: SaveFailed, tries: int) -> bool:
        """Decide on rank 0, and pause before a retry. A newer save always takes precedence."""
        if isinstance(failure, (FencedOff, Unsound)) or not job.staged.kept or tries >= len(self._pauses):
            return False
        if self._jobs or (self._waited and tries >= _WAITED_TRIES):
            return False
        self._emit("checkpoint.retried", {"step": job.step, "reason": failure.reason, "bytes": job.plan.size})
        return self._pause(self._pauses[tries])

    def _pause(self, seconds: float) -> bool:
        """Pause, but for less time if a caller is waiting. Return False as soon as a newer save is queued."""
        start = time.monotonic()
        with self._changed:
            while not self._jobs:
                left = start + (min(seconds, _WAITED_PAUSE) if self._waited else seconds) - time.monotonic()
                if left <= 0:
                    return True
                self._changed.wait(left)
            return False
