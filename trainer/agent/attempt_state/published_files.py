"""Files that the coordinator publishes: its address, the heartbeat, the ranks' readings and the outcome."""

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from checkpointing.storage.durable import dump_line, number, write_durably
from trainer.agent.processes.background_tasks import run_detached, start_detached
from trainer.agent.watch.hang_limits import RankSample
from trainer.protocol.failures.outcome import AttemptOutcome
from trainer.protocol.heartbeat import LONGEST_TROUBLE, Heartbeat
from trainer.protocol.messages.agents import ProgressReport
from trainer.protocol.rank_readings import RankReading, RankReadings
from trainer.protocol.run_dir import AttemptDir

MOST = 64
"""Maximum number of ranks listed. A larger job lists its slow ranks and those that have not moved for longest."""


def rank_readings(
    seen: Sequence[RankSample], *, world: int, time: float, generation: int, p99: Mapping[str, float],
    ratios: Mapping[int, float],
) -> RankReadings:  # fmt: skip
    """Return one reading of the sampled ranks. `ratios` has an entry for each rank whose own work takes longer than its
    peers'. The step, phase and last sign of life of a user's program are known only if it is instrumented.
    """
    ranks = tuple(
        RankReading(
            rank=one.rank, node=one.node, step=one.step if one.reports_steps else None,
            phase=one.phase if one.reports_steps else "command", age=round(one.age, 1) if one.reports_steps else None,
            state=one.state, ratio=ratios.get(one.rank), ended=one.ended,
            moment="" if one.moment is None else str(one.moment),
        )
        for one in sorted(seen, key=lambda one: one.rank)
    )  # fmt: skip
    return RankReadings(generation=generation, world=world, ranks=ranks, time=time, p99=p99)


class AttemptProgress:
    """Merged progress of all nodes; keeps the last known values between generations."""

    def __init__(self, attempt: int, job_id: str, clock: Callable[[], float]) -> None:
        self._attempt, self._job_id, self._clock, self._seq = attempt, job_id, clock, 0
        self.step = self.total = self.saved = 0
        self.loss: float | str | None = None
        self.phase = "init"
        self.from_ranks = False  # the step comes from the ranks themselves
        self._saves: dict[int, str] = {}
        self.separate = ""  # how a user's program trains a separate model on each node
        self.unsaved = ""  # what a failure would repeat, while a user's program has saved nothing for long
        self.unsaved_bytes = 0  # size of the checkpoint that last failed to save

    @property
    def saves_failing(self) -> str:
        """Return when saves began to fail, and why, or "" while they succeed."""
        return next((self._saves[rank] for rank in sorted(self._saves)), "")

    def note_saves(self, rank: int, trouble: str, size: int) -> None:
        """Record a rank's report that saves of `size` bytes fail.
        Rank 0 commits for all ranks, so if it succeeds, all reports are cleared.
        """
        self.unsaved_bytes = size or self.unsaved_bytes
        if rank == 0:
            self._saves.clear()
        if trouble:
            self._saves[rank] = trouble[:LONGEST_TROUBLE]

    def merge(self, reports: Sequence[ProgressReport], *, steps: bool = True) -> None:
        """Merge every node's newest report, starting with node rank 0; nodes without a step are ignored.
        Without `steps`, the step and loss have another source.
        """
        if not reports:
            return
        slowest = min(reports, key=lambda report: report.step)
        self.phase = slowest.phase or self.phase
        self.saved = max(self.saved, *(report.saved for report in reports))
        self.total = max(self.total, *(report.total for report in reports))
        if slowest.step > 0 and steps:
            self.step, self.from_ranks = slowest.step, True
            self.loss = self.loss if reports[0].loss is None else reports[0].loss

    def beat(self, *, generation: int, nodes: list[str], state: str, waits: str = "") -> Heartbeat:
        self._seq += 1
        return Heartbeat(
            seq=self._seq,
            time=self._clock(),
            attempt=self._attempt,
            job_id=self._job_id,
            generation=generation,
            step=self.step,
            total_steps=self.total,
            loss=None if self.loss is None else number(self.loss),
            phase=self.phase,
            saved_step=self.saved,
            nodes=nodes,
            state=state,
            saves_failing=self.saves_failing,
            waits=waits[:LONGEST_TROUBLE],
            unsaved=self.unsaved[:LONGEST_TROUBLE],
        )


ADDRESS_SECONDS = 60.0
"""Limit for writing the coordinator's address; agents stop looking for it after this time."""


Reading = tuple[Heartbeat, RankReadings | None]
"""Content of heartbeat.json, and of ranks.json if it has changed."""


class Outbox:
    """Time-limited file access for the coordinator, in threads that do not delay its exit."""

    def __init__(self, attempt: AttemptDir, *, heartbeat: float, outcome: float) -> None:
        """`heartbeat` and `outcome` are the time limits, in seconds, for writing those files."""
        self._attempt, self._heartbeat_seconds, self._outcome_seconds = attempt, heartbeat, outcome
        self._publishing: asyncio.Future[None] | None = None

    async def publish_address(self, fields: Mapping[str, Any]) -> None:
        """Reserve space for the outcome and publish the listening address. Raises OSError if no agent can join."""

        def write() -> None:
            AttemptOutcome.reserve(self._attempt.outcome)
            write_durably(self._attempt.coordinator, dump_line(dict(fields)).encode())

        await run_detached(write, ADDRESS_SECONDS)

    async def publish_status(self, reading: Callable[[], Reading]) -> None:
        """Replace heartbeat.json and ranks.json, unless an earlier write is still in progress.
        Two writes never overlap: if the older write finished last, its stale content would remain.
        """
        give_up = time.monotonic() + self._heartbeat_seconds
        while self._publishing is not None and not self._publishing.done():
            if (left := give_up - time.monotonic()) <= 0:
                return
            await asyncio.wait([self._publishing], timeout=left)
        self._raise_bugs()
        beat, ranks = reading()

        def write() -> None:
            beat.write(self._attempt.heartbeat)
            if ranks is not None:
                ranks.write(self._attempt.ranks)

        self._publishing = start_detached(write)
        await asyncio.wait([self._publishing], timeout=max(0.0, give_up - time.monotonic()))
        self._raise_bugs()

    def _raise_bugs(self) -> None:
        """Re-raise errors other than OSError.
        A full disk must not end a healthy run; the stale heartbeat will reveal the problem.
        """
        if self._publishing is not None and self._publishing.done():
            error = self._publishing.exception()
            if error is not None and not isinstance(error, OSError):
                raise error

    async def write_outcome(self, outcome: AttemptOutcome) -> None:
        """Write the outcome; if that fails, the agents' exit code still reports how the attempt ended."""
        path = self._attempt.outcome
        try:
            await run_detached(lambda: outcome.write(path), self._outcome_seconds)
        except OSError as error:
            late = f"timed out after {self._outcome_seconds:.0f} s"
            why = late if isinstance(error, TimeoutError) else str(error)
            sys.stderr.write(f"orch-agent: cannot write {path}: {why}; outcome: {outcome.reason}\n")
