"""Writes to stderr that never raise, because a rank's log may be on a full disk."""

import contextlib
import sys


def write_stderr(text: str) -> None:
    """Write one line to stderr, if possible."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{text.rstrip()}\n")
        sys.stderr.flush()


def flush() -> None:
    """Flush stdout and stderr, if possible."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
