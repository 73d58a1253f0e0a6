"""The coordinator's files besides its events, written so that a file system that hangs delays nothing else."""

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from checkpointing.storage.durable import dump_line, write_durably
from trainer.agent.processes.detached_thread import run_detached, start_detached
from trainer.contract.failures.outcome import AttemptOutcome
from trainer.contract.heartbeat import Heartbeat
from trainer.contract.rank_readings import RankReadings
from trainer.contract.run_dir import AttemptDir

ADDRESS_SECONDS = 60.0
"""How long writing the coordinator's address may take: after this agents stop looking for it."""

Reading = tuple[Heartbeat, RankReadings | None]
"""What heartbeat.json says, and ranks.json, when there is something new."""


class Outbox:
    """Every read and write has a bound, in a thread that the exit does not wait for; raises no OSError."""

    def __init__(self, attempt: AttemptDir, *, heartbeat: float, outcome: float) -> None:
        """`heartbeat` and `outcome` are the seconds that their writing may take."""
        self._attempt, self._heartbeat_seconds, self._outcome_seconds = attempt, heartbeat, outcome
        self._showing: asyncio.Future[None] | None = None
        self._looking: asyncio.Future[bool] | None = None

    async def be_found(self, fields: Mapping[str, Any]) -> None:
        """Take room for the outcome, and write where the coordinator listens; raises OSError: no agent can join."""

        def write() -> None:
            AttemptOutcome.reserve(self._attempt.outcome)
            write_durably(self._attempt.coordinator, dump_line(dict(fields)).encode())

        await run_detached(write, ADDRESS_SECONDS)

    async def show(self, reading: Callable[[], Reading]) -> None:
        """Replace heartbeat.json and ranks.json; skipped while an earlier write is still under way.

        Never two at once: the older one could finish last, and its content would stay.
        """
        give_up = time.monotonic() + self._heartbeat_seconds
        while self._showing is not None and not self._showing.done():
            if (left := give_up - time.monotonic()) <= 0:
                return
            await asyncio.wait([self._showing], timeout=left)
        self._raise_bugs()
        beat, ranks = reading()
        self._showing = start_detached(lambda: self._write(beat, ranks))
        await asyncio.wait([self._showing], timeout=max(0.0, give_up - time.monotonic()))
        self._raise_bugs()

    def _write(self, beat: Heartbeat, ranks: RankReadings | None) -> None:
        """Replace the last readings; raises OSError."""
        beat.write(self._attempt.heartbeat)
        if ranks is not None:
            ranks.write(self._attempt.ranks)

    def _raise_bugs(self) -> None:
        """A full disk must not end a run that computes; its heartbeat grows old, and that is seen."""
        if self._showing is not None and self._showing.done():
            error = self._showing.exception()
            if error is not None and not isinstance(error, OSError):
                raise error

    async def look(self, condition: Callable[[], bool]) -> bool:
        """Whether `condition` holds; False, and not asked again, while the file system does not answer."""
        if self._looking is None:
            self._looking = start_detached(condition)
        await asyncio.wait([self._looking], timeout=self._heartbeat_seconds)
        if not self._looking.done():
            return False
        looked, self._looking = self._looking, None
        return looked.result()

    async def leave(self, outcome: AttemptOutcome) -> None:
        """Write the outcome; where that fails the agents' exit code still says how the attempt ended."""
        path = self._attempt.outcome
        try:
            await run_detached(lambda: outcome.write(path), self._outcome_seconds)
        except OSError as error:
            late = f"it takes longer than {self._outcome_seconds:.0f} s"
            why = late if isinstance(error, TimeoutError) else str(error)
            sys.stderr.write(f"orch-agent: cannot write {path}: {why}; it would say: {outcome.reason}\n")
