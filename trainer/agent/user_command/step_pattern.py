"""The step of a user's own program, by what it writes: the newest line that its `progress.pattern` matches."""

import asyncio
import math
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.agent.attempt_state.attempt_progress import AttemptProgress
from trainer.agent.processes.detached_thread import start_detached
from trainer.agent.user_command.progress import run_bounded
from trainer.contract.logs.log_rotation import read_tail
from trainer.contract.ranks.rank_messages import generation_mark
from trainer.contract.user_command.command_progress import CommandProgressConfig

LOOK_SECONDS = 2.0
"""How often the log or the file is looked at while the program runs."""
_TAIL = 64 * 1024
_LINES, _WIDTH = 500, 1000
"""So many lines, and so much of each, are matched: a pattern may be slow, and nobody else runs meanwhile."""


@dataclass(frozen=True, kw_only=True)
class CommandStep:
    """What the newest matching line says."""

    step: int
    total: int = 0  # 0: not said
    loss: float | None = None


def newest_step(text: str, pattern: re.Pattern[str]) -> CommandStep | None:
    """The step in the newest line that matches, progress bars included; None when none does."""
    for line in list(_newest_lines(text))[:_LINES]:
        found = pattern.search(line[:_WIDTH])
        if found is not None and (step := _whole(found, "step")) is not None:
            return CommandStep(step=step, total=_whole(found, "total") or 0, loss=_loss(found))
    return None


def _newest_lines(text: str) -> Iterator[str]:
    """A bar is drawn over in place: each of its states is a line."""
    return reversed(re.split(r"[\r\n]+", text))


def _group(found: re.Match[str], name: str) -> str:
    return (found.groupdict().get(name) or "").replace(",", "")


def _whole(found: re.Match[str], name: str) -> int | None:
    text = _group(found, name)
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def _loss(found: re.Match[str]) -> float | None:
    try:
        loss = float(_group(found, "loss"))
    except ValueError:
        return None
    return loss if math.isfinite(loss) else None


class StepWatch:
    """Looks now and then, without waiting; what cannot be read, or does not match, changes nothing that is known."""

    def __init__(
        self, config: CommandProgressConfig, log: Path, folder: Callable[[], Path], progress: AttemptProgress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`log` is that of rank 0; `folder` is where the program runs."""
        self._config, self._log, self._folder, self._progress = config, log, folder, progress
        self._pattern, self._clock = re.compile(config.pattern), clock
        self._generation, self._looked_at = 0, float("-inf")
        self._looking: asyncio.Future[CommandStep | None] | None = None

    def start_generation(self, generation: int) -> None:
        """From here on only what this generation writes counts."""
        self._generation, self._looking = generation, None

    def check(self) -> None:
        """Take what the last look has found, and begin another one when it is time."""
        if self._looking is not None and self._looking.done():
            looked, self._looking = self._looking, None
            self._take(looked)
        if self._looking is None and self._clock() - self._looked_at >= LOOK_SECONDS:
            self._looking, self._looked_at = start_detached(self._read), self._clock()

    async def check_settled(self) -> None:
        """Nobody writes any more: what is there is the last word."""
        self._looking = None
        self._show(await run_bounded(self._read))

    def _take(self, looked: "asyncio.Future[CommandStep | None]") -> None:
        if (error := looked.exception()) is not None:
            sys.stderr.write(f"orch-agent: cannot look at the program's progress: {ascii(error)}\n")
        else:
            self._show(looked.result())

    def _show(self, found: CommandStep | None) -> None:
        if found is not None:
            self._progress.step, self._progress.total = found.step, found.total
            self._progress.loss = self._progress.loss if found.loss is None else found.loss

    def _read(self) -> CommandStep | None:
        try:
            return newest_step(self._text(), self._pattern)
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
