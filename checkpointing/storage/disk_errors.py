"""What a file system says when it takes no more, in words; which errors those are stands here only."""

import errno
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors that go away when somebody makes room."""

_WORDS = {
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "disk quota exceeded",
    errno.EROFS: "read-only file system",
    errno.EIO: "I/O error",
    errno.EFBIG: "limit on file sizes reached (ulimit -f)",
}


def is_disk_error(error: BaseException) -> bool:
    """Whether the storage itself refused, not a path or a permission."""
    return isinstance(error, OSError) and error.errno in _WORDS


def disk_words(number: int | None) -> str:
    """`disk full` for ENOSPC; empty for an error that is not the storage's."""
    return _WORDS.get(number or 0, "")


def error_words(error: OSError) -> str:
    """`Permission denied: /a/file`, without the number."""
    named = f": {error.filename}" if error.filename else ""
    return f"{error.strerror}{named}" if error.strerror else str(error)


def explain_disk_error(error: BaseException, folder: Path) -> str:
    """Return `disk full (FOLDER)`; empty if the error does not come from the storage.

    `folder` is used if the error has no file name. An error of an object store keeps the message of its library.
    """
    if not isinstance(error, OSError) or not (words := disk_words(error.errno)):
        return ""
    named = error.filename if isinstance(error.filename, str) else ""
    if "://" in named:
        return f"{named}: {error.strerror or words}"
    if named:
        folder = Path(named) if named.endswith("/") else Path(named).parent
    return f"{words} ({folder})"
