"""Warning about a program that has saved nothing for a while: what a failure would cost now."""

import time
from collections.abc import Callable
from functools import partial

from trainer.agent.attempt_state.published_files import AttemptProgress
from trainer.agent.attempt_state.stopping import parse_time
from trainer.agent.user_command.program_saves import read_saves
from trainer.agent.user_command.progress import run_bounded
from trainer.protocol.config import JobConfig
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.run_dir import AttemptDir

LEAST_SECONDS, LEAST_STEPS = 1800.0, 200
"""A program is late with its first checkpoint once it has trained for this long and this many steps."""
_WITHOUT_STEPS = 7200.0
"""The same time if it has shown no step: it may still prepare its data."""
_LOOK_SECONDS = 60.0


def is_late(seconds: float, steps: int, limit: float | None) -> bool:
    """Return whether a program that started `seconds` ago should have saved. `steps` is 0 if no step is known, and
    `limit` is the job's time limit in seconds (None: unlimited).
    """
    if limit is not None and seconds >= limit / 2:
        return True
    if not steps:
        return seconds >= _WITHOUT_STEPS
    return seconds >= LEAST_SECONDS and steps >= LEAST_STEPS


def describe_loss(seconds: float, steps: int) -> str:
    """Return what a failure would cost now."""
    trained = f"{steps:,} steps, " if steps else ""
    return f"no checkpoint after {trained}{_span(seconds)}: a failure repeats {'them' if steps else 'it'} all"


def _span(seconds: float) -> str:
    minutes = int(seconds // 60)
    if not minutes:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{seconds / 3600:.1f} h"


class UnsavedWork:
    """Watches for a program's first checkpoint. It writes one event, and the heartbeat's note until a save is seen."""

    def __init__(
        self, attempt: AttemptDir, config: JobConfig, events: EventLog, progress: AttemptProgress,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._attempt, self._config, self._events, self._progress = attempt, config, events, progress
        self._limit, self._clock = parse_time(config.cluster.time), clock
        self._looked = float("-inf")
        self._reported = False  # a rank has reported a save, which need not be in a known folder

    async def check(self, started: float, folder: str, *, saved: bool, warned: bool) -> bool:
        """Return whether the program has been warned about. It `started` on the monotonic clock, and `folder` is where
        orch looks for its checkpoints ("": unknown). `saved` means that a checkpoint is known.
        """
        now, progress = self._clock(), self._progress
        if saved or self._reported:
            progress.unsaved = ""
            return warned
        if not is_late(now - started, progress.step, self._limit) or now - self._looked < _LOOK_SECONDS:
            return warned
        self._looked = now
        saves = await run_bounded(partial(read_saves, [self._attempt]))
        if saves is None or saves or progress.saved:  # a file system that does not answer shows nothing
            self._reported = bool(saves) or bool(progress.saved)
            return warned
        cost, looked = describe_loss(now - started, progress.step), self._describe_search(folder)
        progress.unsaved = f"{cost} ({looked})"
        if not warned:
            self._events.write(
                EventKind.CHECKPOINT_MISSING, step=progress.step, seconds=round(now - started), reason=cost,
                looked=looked,
            )  # fmt: skip
        return True

    def _describe_search(self, folder: str) -> str:
        """Return where orch looked, and how to show it the program's checkpoints."""
        places = [f"for {self._config.checkpoints.pattern} in {folder}"] if folder else []
        if self._progress.phase not in ("init", "command"):  # it is instrumented
            places.append("at what its ranks save with torch or a framework")
        if not places:
            return "orch sees no saves of this program: set checkpoints.path, or see docs/own-loops.md"
        hint = f"if it saves elsewhere, {'change' if folder else 'set'} checkpoints.path, or see docs/own-loops.md"
        return f"looked {' and '.join(places)}: {hint}"
