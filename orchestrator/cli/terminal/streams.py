"""Standard streams, and remedies for errors of the operating system."""

import codecs
import errno
import io
import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from orchestrator.errors import Precondition

_STATE = re.compile(r"(ORCH_HOME|XDG_STATE_HOME)=")


def find_remedy(error: OSError) -> str:
    """Return a remedy for the error: a command or a variable, with the path."""
    name = str(error.filename or "")
    folder = shlex.quote(os.path.dirname(name))
    if named := _STATE.match(name):
        remedy = f"export {named[1]}=FOLDER, a folder that you may write to"
    elif not name and error.errno == errno.ENOENT:
        remedy = "if the current folder was deleted, cd to another one"
    elif error.errno in (errno.EACCES, errno.EPERM) and "://" in name:
        remedy = f"{name} is in an object store: give this shell credentials that may read and write there"
    elif error.errno in (errno.EACCES, errno.EPERM):
        remedy = f"`ls -ld {folder}` shows its owner and mode; get access, or use another path"
    elif error.errno == errno.ENOENT and not os.path.isdir(os.path.dirname(name)):
        remedy = f"`mkdir -p {folder}`"
    elif error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = f"free some space in {os.path.dirname(name) or 'the folder that it writes to'}"
    else:
        remedy = "correct that, or use another path"
    return f"{remedy}; then type the same command again"


@contextmanager
def writing_to(folder: Path) -> Iterator[None]:
    """Name the folder in errors of the system that have no path, such as those of a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(folder)
        raise


READER_GONE = 141
"""Exit code if the reader of stdout is gone (`| head`), as after SIGPIPE."""
_PLAIN = {"·": "-", "…": "...", "×": "x", "→": "->", "−": "-", "–": "-", "—": "-", "\u202f": " ", "\xa0": " "}
_PLAIN |= dict(zip("▁▂▃▄▅▆▇█", "_.-=*#%@", strict=True))
_ERRORS = "orch.plain"


class ReaderGone(Exception):
    """The reader of stdout is gone. Not an OSError, so that it is not reported as one."""


class OutputLost(Precondition):
    """The answer cannot be written to stdout."""


class _Stream(io.TextIOWrapper):
    """A text stream that discards all output after a write error, so that nothing fails at exit."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self._give_up(error)
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)


class _Answers(_Stream):
    """Stream for stdout. A write error loses the command's answer, so it is raised."""

    def _give_up(self, error: OSError) -> None:
        super()._give_up(error)
        if isinstance(error, BrokenPipeError):
            raise ReaderGone from error
        raise OutputLost(
            f"the answer cannot be written: {error.strerror or error}", where="stdout",
            hint="make space where stdout goes, then run the same command again",
        ) from error  # fmt: skip


def prepare() -> None:
    """Prepare the standard streams, before any file is opened that could take a closed stream's number."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this stream's
    os.umask(os.umask(0o077) & 0o077)  # never mask owner permissions, which orch itself needs
    codecs.register_error(_ERRORS, _in_plain_signs)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115  # for as long as the program lives
    # shutil takes the terminal's width from `sys.__stdout__`, and the originals are detached.
    sys.stdout = sys.__stdout__ = _wrap_stream(_Answers, sys.stdout, 1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _wrap_stream(_Stream, sys.stderr, 2)  # type: ignore[misc]


def _wrap_stream(kind: type[_Stream], stream: TextIO | None, number: int) -> _Stream:
    if not isinstance(stream, io.TextIOWrapper):  # the stream was closed when the program started
        return kind(open(number, "wb", closefd=False), encoding="utf-8", errors=_ERRORS)
    encoding = stream.encoding
    # Written line by line, so that output can also be followed in a pipe. PYTHONUNBUFFERED writes through.
    by_line = number == 2 or stream.line_buffering or stream.write_through
    return kind(stream.detach(), encoding=encoding, errors=_ERRORS, line_buffering=by_line)


def _in_plain_signs(error: UnicodeError) -> tuple[str | bytes, int]:
    """Replace characters that the encoding lacks with ASCII characters."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    plain = "".join(_PLAIN.get(sign) or sign.encode("ascii", "backslashreplace").decode() for sign in signs)
    return plain, error.end
