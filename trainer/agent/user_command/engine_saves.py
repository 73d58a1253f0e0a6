"""Checkpoints that a program has committed with `orch.checkpointer`, which keeps them in the run's folder."""

import time
from pathlib import Path

from checkpointing.format.commit import parse_name
from checkpointing.tiers.catalog import Catalog
from trainer.agent.processes.background_tasks import RepeatedRead
from trainer.agent.user_command.progress import LOOK_SECONDS, run_bounded


class EngineSaves:
    """Monitors the run's checkpoints. A failed read leaves the known step unchanged."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._reads = RepeatedRead(self._find, folder)
        self.began_from = self.newest = 0
        """Step of the newest committed checkpoint at the generation's start, and now; 0: none."""

    async def start_generation(self) -> None:
        """Record the checkpoint that the program starts from. No rank may be running."""
        self._reads.discard()
        await self._read_now()
        self.began_from = self.newest

    async def check(self, failed_at: float | None) -> None:
        """Read periodically without waiting, and once after a rank has failed (`failed_at`, monotonic)."""
        if failed_at is not None and self._reads.began_at < failed_at:
            await self._read_now()
        elif (read := self._reads.poll(LOOK_SECONDS)) is not None and read.exception() is None:
            self.newest = read.result()

    async def check_settled(self) -> None:
        """Read after all writers have exited."""
        self._reads.discard()
        await self._read_now()

    def has_saved(self) -> bool:
        """Return whether the program has committed a higher step in this generation."""
        return self.newest > self.began_from

    async def _read_now(self) -> None:
        self._reads.began_at = time.monotonic()
        found = await run_bounded(self._find)
        self.newest = self.newest if found is None else found

    def _find(self) -> int:
        """Return the highest committed step, or 0. Raises OSError."""
        catalog = Catalog(self._folder)
        newest = next((parse_name(name) for name in catalog.names() if catalog.is_committed(name)), None)
        return 0 if newest is None else newest.step
