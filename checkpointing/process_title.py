"""Titles of orch's processes, as shown by `ps` and `top`."""

import ctypes
import os

_PR_SET_NAME = 15


def set_title(title: str) -> None:
    """Give the calling process a title. Without setproctitle, which images may lack, only its short name changes."""
    # The title must not overwrite the environment, which identifies the processes of a job.
    os.environ.setdefault("SPT_NOENV", "1")
    try:
        from setproctitle import setproctitle  # optional: an image may lack it
    except ImportError:
        ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(title.encode()), 0, 0, 0)
    else:
        setproctitle(title)
