"""The program's standard streams: closed ones, a full disk behind one, a reader that went away, a poor encoding."""

import codecs
import io
import os
import sys
from typing import TextIO

from orchestrator.errors import Precondition

READER_GONE = 141
"""Exit code when nobody reads the answer any more (`| head`): that of a program that SIGPIPE ends."""
_PLAIN = {"·": "-", "…": "...", "×": "x", "→": "->", "−": "-", "–": "-", "—": "-", "\u202f": " ", "\xa0": " "}
_ERRORS = "orch.plain"


class ReaderGone(Exception):
    """Whoever read stdout has gone; no OSError, so that nobody else reports it."""


class OutputLost(Precondition):
    """The answer cannot be written to stdout."""


class _Stream(io.TextIOWrapper):
    """Writes as any text stream does; once it cannot, the rest goes nowhere, so that nothing fails at exit."""

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
    """stdout: what is lost here is what the command was for."""

    def _give_up(self, error: OSError) -> None:
        super()._give_up(error)
        if isinstance(error, BrokenPipeError):
            raise ReaderGone from error
        raise OutputLost(
            f"the answer cannot be written: {error.strerror or error}", where="stdout",
            hint="see that where stdout goes has room, then type the same command again",
        ) from error  # fmt: skip


def prepare() -> None:
    """Before anything is opened: nothing else may get the number of a closed stream, and be written to as one."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    os.umask(os.umask(0o077) & 0o077)  # what nobody can read is of no use to this program either
    codecs.register_error(_ERRORS, _in_plain_signs)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115  # for as long as the program lives
    # The width of the terminal is asked of the originals, which have given their files away.
    sys.stdout = sys.__stdout__ = _wrapped(_Answers, sys.stdout, 1)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _wrapped(_Stream, sys.stderr, 2)  # type: ignore[misc]


def _wrapped(kind: type[_Stream], stream: TextIO | None, number: int) -> _Stream:
    if not isinstance(stream, io.TextIOWrapper):  # it was closed when the program started
        return kind(open(number, "wb", closefd=False), encoding="utf-8", errors=_ERRORS)
    encoding = stream.encoding
    # Somebody follows what a program says, in a pipe, too. PYTHONUNBUFFERED writes through instead.
    by_line = number == 2 or stream.line_buffering or stream.write_through
    return kind(stream.detach(), encoding=encoding, errors=_ERRORS, line_buffering=by_line)


def _in_plain_signs(error: UnicodeError) -> tuple[str | bytes, int]:
    """What the encoding has no sign for in signs that every one has."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    signs = error.object[error.start : error.end]
    plain = "".join(_PLAIN.get(sign) or sign.encode("ascii", "backslashreplace").decode() for sign in signs)
    return plain, error.end
