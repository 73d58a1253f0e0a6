"""The agent's end of its watchdog: starts it and sends heartbeats from the event loop."""

import asyncio
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from trainer.agent.processes import watchdog
from trainer.agent.processes.background_tasks import SupervisedTasks
from trainer.protocol.rank_progress.progress import block_step_signals

BEAT_SECONDS = 0.5


class WatchdogClient:
    """Watchdog process and its heartbeat. Must be created in the event loop; the watchdog ends with this process."""

    def __init__(self, *, seconds: float, report: Path, node: int, name: str) -> None:
        theirs, self._ours = os.pipe()
        os.set_blocking(self._ours, False)
        words = [str(theirs), str(os.getpid()), str(seconds), str(report), str(node), name]
        command = [sys.executable, "-I", "-S", watchdog.__file__, *words]
        with block_step_signals():  # Slurm signals every process of a step
            self._process = subprocess.Popen(command, pass_fds=[theirs], stdin=subprocess.DEVNULL)
        os.close(theirs)
        self._tasks = SupervisedTasks()
        self._tasks.spawn(self._beat())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def _beat(self) -> None:
        while True:
            # A watchdog that does not read is suspended or gone; neither may end this agent.
            with suppress(BlockingIOError, BrokenPipeError):
                os.write(self._ours, b".")
            await asyncio.sleep(BEAT_SECONDS)

    def close(self) -> None:
        """Stop the watchdog when the agent ends normally."""
        self._tasks.cancel()
        os.close(self._ours)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(2.0)
