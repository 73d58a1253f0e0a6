"""The end of a rank as one type for all processes, and the files that store it."""

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, fsync_dir, open_regular
from trainer.protocol.failures.outcome import ExitCode, legible
from trainer.protocol.logs.line_file import MAX_READ_BYTES, LineFile
from trainer.protocol.run_dir import AttemptDir

GOOD = (ExitCode.FINISHED, ExitCode.STOPPED_AFTER_SAVE)
_MAX_TEXT = 1 << 16
"""Maximum number of characters kept from a text in an error file."""
_STORED = (
    "rank", "generation", "node", "step", "exit_code", "time", "exception", "message", "traceback", "secondary",
    "position",
)  # fmt: skip
"""Keys of a line in an outcome file, which is the rank's own report of its end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnd:
    """The end of a rank. The exception and its details come from the rank's own report, if it could write one."""

    rank: int
    generation: int = 0
    node: str = ""
    exit_code: int | None = None
    signal: int | None = None
    step: int | None = 0  # None: unknown, for a command
    stepped: bool = False  # it has trained a step in this generation
    reported: bool = True  # it reported its end, or is a command, which cannot report
    exception: str | None = None  # class name
    message: str | None = None
    traceback: str | None = None
    secondary: bool = False  # the exception only reports that a peer is gone
    position: int | None = None  # data position of a bad step's batch
    lines: tuple[str, ...] = ()  # last output lines of a command
    written: int = 0  # bytes that a command wrote to its log in this generation
    out_of_memory: str = ""  # description of the kernel's out-of-memory kill
    place: str = ""  # description of its position in the mesh
    time: float = 0.0  # time of its own report, in seconds since the epoch
    at: float = 0.0  # time of its arrival, in seconds on the coordinator's clock

    @property
    def good(self) -> bool:
        # Training code can exit 0 for many reasons; only a rank that reports completion has trained all its steps.
        return self.exit_code in GOOD and self.reported


def signal_name(number: int) -> str:
    """Return a signal's name, such as SIGKILL for 9, or its number for a real-time signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def exit_words(exit_code: int | None, number: int | None, out_of_memory: str = "") -> str:
    """Describe the exit of a process. `out_of_memory` describes the kernel's kill, if any."""
    if out_of_memory:
        return f"out of memory: {out_of_memory}"
    return f"killed by {signal_name(number)}" if number is not None else f"exit code {exit_code}"


def append_outcome(attempt: AttemptDir, end: RankEnd) -> None:
    """Write a rank's own report of its end durably. Raises OSError."""
    stored = {key: getattr(end, key) for key in _STORED}
    line = dump_line({key: legible(value) if isinstance(value, str) else value for key, value in stored.items()})
    _append(attempt.rank_outcomes(end.node), line)


def all_outcomes(attempt: AttemptDir) -> list[tuple[RankEnd, Path]]:
    """Return every outcome with its file. Torn lines are skipped."""
    return [(end, path) for path in attempt.all_rank_outcomes() for end in _read(path)]


def find_outcome(attempt: AttemptDir, node: str, rank: int, generation: int) -> RankEnd | None:
    """Return a rank's last outcome from its node's file, or None if it was killed."""
    found = [end for end in _read(attempt.rank_outcomes(node)) if (end.rank, end.generation) == (rank, generation)]
    return found[-1] if found else None


def pack_error_file(attempt: AttemptDir, node: str, rank: int, generation: int) -> None:
    """Append the error file of a command's rank, if any, to its node's file. Raises OSError."""
    path = attempt.error_file(rank, generation)
    try:
        with open_regular(path) as stream:
            error = json.loads(stream.read(MAX_READ_BYTES))
    except (FileNotFoundError, ValueError, RecursionError):
        return
    line = {"rank": rank, "generation": generation, "error": _shorten_texts(error)}
    _append(attempt.rank_errors(node), dump_line(line))
    path.unlink()


def _shorten_texts(value: Any) -> Any:
    """Truncate each text that torch's `@record` wrote, because a message may contain a whole data set."""
    if isinstance(value, dict):
        return {key: _shorten_texts(item) for key, item in value.items()}
    return value[:_MAX_TEXT] if isinstance(value, str) else value


def _append(path: Path, line: str) -> None:
    file = LineFile(path)
    try:
        file.append(line)
        file.sync()
    finally:
        file.close()
    fsync_dir(path.parent)


def _read(path: Path) -> Iterator[RankEnd]:
    try:
        with open_regular(path) as stream:
            block = stream.read(MAX_READ_BYTES)
    except OSError:
        return
    for line in block.splitlines():
        try:
            end = RankEnd(**json.loads(line))
        except (ValueError, TypeError, RecursionError):  # torn by a kill
            continue
        numbers = (end.rank, end.generation, end.step, end.exit_code)
        if all(isinstance(each, int) for each in numbers) and isinstance(end.time, (int, float)):
            yield end
