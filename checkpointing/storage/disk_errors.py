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
    """`disk full (FOLDER)`; empty when the storage is not what refused. `folder` stands for errors that name none."""
    words = disk_words(error.errno) if isinstance(error, OSError) else ""
    named = error.filename if isinstance(error, OSError) else None
    where = Path(named).parent if isinstance(named, str) else folder
    return f"{words} ({where})" if words else ""
