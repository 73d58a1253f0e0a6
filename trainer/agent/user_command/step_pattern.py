"""Step of a user's own program from its output: the newest line that matches `progress.pattern`."""

import asyncio
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from trainer.agent.attempt_state.attempt_state import AttemptProgress
from trainer.agent.processes.background_tasks import start_detached
from trainer.agent.user_command import match_step
from trainer.agent.user_command.progress import run_bounded
from trainer.protocol.command_progress import CommandProgressConfig
from trainer.protocol.logs.log_rotation import read_tail
from trainer.protocol.rank_progress.rank_messages import generation_mark

LOOK_SECONDS = 2.0
"""Interval of checks of the log or file while the program runs."""
MATCH_SECONDS, SLOW_LOOK_SECONDS = 2.0, 60.0
"""Time limit of a check of the newest lines, and the pause after one that exceeds it."""
_TAIL = 64 * 1024


class SlowPattern(Exception):  # noqa: N818  # it names the pattern
    """Raised if the pattern takes too long on the program's output."""


@dataclass(frozen=True, kw_only=True)
class CommandStep:
    """Values in the newest matching line."""

    step: int
    total: int = 0  # 0: unknown
    loss: float | None = None


def newest_step(text: str, pattern: str, seconds: float = MATCH_SECONDS) -> CommandStep | None:
    """Return the step in the newest matching line, progress bars included; None without one. Raises SlowPattern."""
    command = [sys.executable, "-I", "-S", match_step.__file__, pattern]
    try:
        done = subprocess.run(command, input=text.encode(), stdout=subprocess.PIPE, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as late:
        raise SlowPattern(
            f"progress.pattern={pattern} has found no step in the newest lines within {seconds:g} s"
        ) from late
    groups = json.loads(done.stdout) if done.stdout else None  # empty: it was killed
    if groups is None:
        return None
    return CommandStep(step=_whole(groups, "step"), total=_whole(groups, "total"), loss=_loss(groups))


def _whole(groups: dict[str, str], name: str) -> int:
    text = groups.get(name, "")
    return int(text.replace(",", "")) if match_step.is_whole(text) else 0


def _loss(groups: dict[str, str]) -> float | None:
    try:
        loss = float(groups.get("loss", "").replace(",", ""))
    except ValueError:
        return None
    return loss if math.isfinite(loss) else None


class StepWatch:
    """Periodic, non-blocking check of the program's output; unreadable or unmatched output changes nothing."""

    def __init__(
        self, config: CommandProgressConfig, log: Path, folder: Callable[[], Path], progress: AttemptProgress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`log` is rank 0's; `folder` is the program's working directory."""
        self._config, self._log, self._folder, self._progress = config, log, folder, progress
        self._clock = clock
        self._generation, self._looked_at, self._slow = 0, float("-inf"), False
        self._looking: asyncio.Future[CommandStep | None] | None = None

    def start_generation(self, generation: int) -> None:
        """Ignore output of earlier generations from here on."""
        self._generation, self._looking = generation, None

    def check(self) -> None:
        """Take the result of the last check, and start another when due."""
        if self._looking is not None and self._looking.done():
            looked, self._looking = self._looking, None
            self._take(looked)
        pause = SLOW_LOOK_SECONDS if self._slow else LOOK_SECONDS
        if self._looking is None and self._clock() - self._looked_at >= pause:
            self._looking, self._looked_at = start_detached(self._read), self._clock()

    async def check_settled(self) -> None:
        """Check the final output, after all writers have exited."""
        self._looking = None
        if not self._slow:
            self._show(await run_bounded(self._read))

    def _take(self, looked: "asyncio.Future[CommandStep | None]") -> None:
        error = looked.exception()
        if error is None:
            self._show(looked.result())
        elif not (isinstance(error, SlowPattern) and self._slow):
            said = f"{error}: the step is not shown" if isinstance(error, SlowPattern) else ascii(error)
            sys.stderr.write(f"orch-agent: cannot read the program's progress: {said}\n")
        self._slow = isinstance(error, SlowPattern)

    def _show(self, found: CommandStep | None) -> None:
        if found is not None:
            self._progress.step, self._progress.total = found.step, found.total
            self._progress.loss = self._progress.loss if found.loss is None else found.loss

    def _read(self) -> CommandStep | None:
        try:
            return newest_step(self._text(), self._config.pattern)
        except FileNotFoundError:
            return None

    def _text(self) -> str:
        if not self._config.path:
            tail = read_tail(self._log, _TAIL).decode(errors="replace")
            return tail.rpartition(f"{generation_mark(self._generation)}\n")[2]
        with (self._folder() / self._config.path).open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - _TAIL))
            return stream.read(_TAIL).decode(errors="replace")
