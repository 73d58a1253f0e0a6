"""Last output of a program: the end of its log and the exception in it."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.protocol.logs.log_rotation import read_tail
from trainer.protocol.rank_progress.rank_messages import generation_mark
from trainer.protocol.secrets.secret_redaction import in_use

_TAIL = 16384
_WHAT = re.compile(r"^[ \t]*what\(\):[ \t]*(\S.*)$", re.MULTILINE)
"""Uncaught exception as the C++ runtime prints it; `\\s` would scan all following blank lines for each match."""


def last_cpp_exception(log: Path, generation: int) -> str | None:
    """Return the newest uncaught C++ exception of this generation in a rank's log, or None."""
    try:
        text = read_tail(log, _TAIL).decode(errors="replace")
    except OSError:
        return None
    return uncaught(text.rpartition(generation_mark(generation))[2])


def uncaught(text: str) -> str | None:
    """Return the newest uncaught C++ exception in a text."""
    found = _WHAT.findall(text)
    return found[-1].strip() if found else None


LINES, WIDTH = 20, 200
"""Limits of the log lines sent and displayed."""
_MOST = 1 << 20
"""Maximum bytes read from a log."""
_ESCAPES = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(\x07|\x1b\\)|\x1b.")
_CONTROLS = {number: None for number in (*range(9), *range(11, 32), *range(127, 160))} | {9: " "}
RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")
"""Prefix that torch puts on every line of a traceback."""
TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*([A-Za-z_]\w*)(?:: (.*))?$")
_NOT_COMPILED = re.compile(r"^(SyntaxError|IndentationError|TabError): (.*)$")
"""Errors that Python prints without a traceback for a main script."""


@dataclass(frozen=True, kw_only=True)
class LastOutput:
    """Last lines without escape sequences, bytes written in this generation, and class and message of the exception."""

    lines: tuple[str, ...] = ()
    written: int = 0
    exception: str | None = None
    message: str | None = None
    uncaught: str | None = None  # C++ exception


def last_output(log: Path, generation: int, error_file: Path) -> LastOutput:
    """Return the output in this generation's part of a rank's log, and the error file of torch's `@record`."""
    try:
        raw = read_tail(log, _MOST).rpartition(f"{generation_mark(generation)}\n".encode())[2]
    except OSError:
        raw = b""
    text = raw.decode(errors="replace")
    lines = [_plain(line) for line in text.split("\n")]
    exception, message = _read_error_file(error_file) or _parse_traceback(lines) or (None, None)
    shown = [line[:WIDTH] for line in lines if line.strip()][-LINES:]
    return LastOutput(
        lines=tuple(shown), written=len(raw), exception=exception, message=message, uncaught=uncaught(text)
    )


def _plain(line: str) -> str:
    """Return a line as finally displayed in a terminal: without escapes, and with a progress bar's last state."""
    return _ESCAPES.sub("", line.rstrip("\r").rpartition("\r")[2]).translate(_CONTROLS).rstrip()


def _parse_traceback(lines: list[str]) -> tuple[str, str | None] | None:
    """Return the exception in the final line of the last traceback, or None."""
    lines = [RANK_PREFIX.sub("", line) for line in lines]
    starts = [at for at, line in enumerate(lines) if line.startswith(TRACEBACK)]
    for line in lines[starts[-1] + 1 :] if starts else ():
        if line and not line[0].isspace():
            found = _RAISED.match(line)
            return (found[1], found[2]) if found else None
    late = [found for line in lines if (found := _NOT_COMPILED.match(line))]
    return (late[-1][1], late[-1][2]) if late and not starts else None


def _read_error_file(path: Path) -> tuple[str, str | None] | None:
    """Return the exception recorded by `torch.distributed.elastic.multiprocessing.errors.record`, or None."""
    try:
        found: Any = json.loads(path.read_bytes()[:_MOST])["message"]
        text = in_use().text(str(found["message"] if isinstance(found, dict) else found))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    match = _RAISED.match(_plain(text.strip().split("\n")[0]))
    return (match[1], match[2]) if match else None
