"""Words for a rank's log that must never be the reason why the rank ends: the log may be on the disk that is full."""

import contextlib
import sys


def lament(text: str) -> None:
    """Write one line to stderr, if that can be done."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{text.rstrip()}\n")
        sys.stderr.flush()


def flush() -> None:
    """Let go of what is still in the buffers, if that can be done."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
