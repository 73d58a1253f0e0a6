"""The coordinator's files besides its events, written so that a file system that hangs holds up nothing else."""

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from checkpointing.storage.durable import dump_line, write_durably
from trainer.agent.attempt_state.heartbeat import Heartbeat
from trainer.agent.attempt_state.ranks_file import write_readings
from trainer.agent.processes.detached_thread import run_detached, start_detached
from trainer.contract.outcome import AttemptOutcome
from trainer.contract.run_dir import AttemptDir

PUBLISH_SECONDS = 5.0
"""How long a heartbeat is waited for; the next one is due after a second."""
OUTCOME_SECONDS = 10.0
"""How long the outcome is waited for: the agents still have to be told, and Slurm's KillWait is 30."""
ADDRESS_SECONDS = 60.0
"""How long the coordinator's address is waited for: agents give up looking for it then."""

Reading = tuple[Heartbeat, Mapping[str, Any] | None]
"""What heartbeat.json says, and ranks.json, when there is something new."""


class Outbox:
    """Every write and look has a bound, in a thread that nobody waits for at the exit; raises no OSError."""

    def __init__(self, attempt: AttemptDir) -> None:
        self._attempt = attempt
        self._showing: asyncio.Future[None] | None = None
        self._looking: asyncio.Future[bool] | None = None

    async def be_found(self, fields: Mapping[str, Any]) -> None:
        """Tell the agents where the coordinator listens; raises OSError: without it nothing can begin."""
        await run_detached(
            lambda: write_durably(self._attempt.coordinator, dump_line(dict(fields)).encode()), ADDRESS_SECONDS
        )

    async def show(self, reading: Callable[[], Reading]) -> None:
        """Replace heartbeat.json and ranks.json; left out while an earlier one is still being written.

        Never two at once: the older one could end last, and stand.
        """
        give_up = time.monotonic() + PUBLISH_SECONDS
        while self._showing is not None and not self._showing.done():
            if (left := give_up - time.monotonic()) <= 0:
                return
            await asyncio.wait([self._showing], timeout=left)
        self._raise_bugs()
        beat, ranks = reading()
        self._showing = start_detached(lambda: write_readings(self._attempt, beat, ranks))
        await asyncio.wait([self._showing], timeout=max(0.0, give_up - time.monotonic()))
        self._raise_bugs()

    def _raise_bugs(self) -> None:
        """A full disk must not end a run that computes; its heartbeat falls silent, which shows."""
        if self._showing is not None and self._showing.done():
            error = self._showing.exception()
            if error is not None and not isinstance(error, OSError):
                raise error

    async def look(self, condition: Callable[[], bool]) -> bool:
        """Whether it holds; a file system that does not answer says no, and is not asked again before it has."""
        if self._looking is None:
            self._looking = start_detached(condition)
        await asyncio.wait([self._looking], timeout=PUBLISH_SECONDS)
        if not self._looking.done():
            return False
        looked, self._looking = self._looking, None
        return looked.result()

    async def leave(self, outcome: AttemptOutcome) -> None:
        """The attempt's last word; the exit code tells as much when it cannot be written."""
        path = self._attempt.outcome
        try:
            await run_detached(lambda: outcome.write(path), OUTCOME_SECONDS)
        except OSError as error:
            why = f"it takes longer than {OUTCOME_SECONDS:.0f} s" if isinstance(error, TimeoutError) else str(error)
            sys.stderr.write(f"orch-agent: cannot write {path}: {why}; it would say: {outcome.reason}\n")
