"""Lines to stderr that never raise: the log of a rank may be on the disk that is full."""

import contextlib
import sys


def write_stderr(text: str) -> None:
    """Write one line to stderr, if that can be done."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{text.rstrip()}\n")
        sys.stderr.flush()


def flush() -> None:
    """Flush stdout and stderr, if that can be done."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
