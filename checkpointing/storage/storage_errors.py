"""Errors from full disks and unreachable object stores, and a probe that checks for free space."""

import contextlib
import errno
import secrets
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
"""Errors that go away once space is freed."""

_WORDS = {
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "disk quota exceeded",
    errno.EROFS: "read-only file system",
    errno.EIO: "I/O error",
    errno.EFBIG: "file size limit reached (ulimit -f)",
}


def is_disk_error(error: BaseException) -> bool:
    """Return whether the storage itself failed, as opposed to a path or permission problem."""
    return isinstance(error, OSError) and error.errno in _WORDS


def disk_words(number: int | None) -> str:
    """Return a phrase such as `disk full` for ENOSPC; empty for an error that does not come from the storage."""
    return _WORDS.get(number or 0, "")


def error_words(error: OSError) -> str:
    """Return the error without its number, such as `Permission denied: /a/file`."""
    named = f": {error.filename}" if error.filename else ""
    return f"{error.strerror}{named}" if error.strerror else str(error)


def explain_disk_error(error: BaseException, folder: Path) -> str:
    """Return `disk full (FOLDER)`; empty if the error does not come from the storage.

    `folder` is used if the error has no file name. An object store's error keeps its library's message.
    """
    if not isinstance(error, OSError) or not (words := disk_words(error.errno)):
        return ""
    named = error.filename if isinstance(error.filename, str) else ""
    if "://" in named:
        return f"{named}: {error.strerror or words}"
    if named:
        folder = Path(named) if named.endswith("/") else Path(named).parent
    return f"{words} ({folder})"


SMALL = 4096
_BLOCK = 1 << 20


def write_probe(folder: Path, size: int = SMALL) -> str:
    """Return why the disk rejects a file of `size` bytes, such as `disk full (FOLDER)`; empty if accepted or unknown.

    Nothing is flushed, so a file server that only rejects the data later goes undetected.
    """
    probe = folder / f".probe-{secrets.token_hex(6)}"
    try:
        with probe.open("xb") as stream:
            for start in range(0, size, _BLOCK):
                stream.write(bytes(min(_BLOCK, size - start)))
        return ""
    except OSError as error:
        return explain_disk_error(error, folder)
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)


_FOREIGN = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("aiohttp.client_exceptions", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("azure.core.exceptions", "AzureError"),
)
"""Module and class of storage libraries' exceptions that are not OSErrors.

Only loaded libraries can have raised them.
"""

_NUMBERS = {
    PermissionError: errno.EACCES,
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    TimeoutError: errno.ETIMEDOUT,
}


@contextlib.contextmanager
def as_oserror(place: str) -> Iterator[None]:
    """Convert a library's own network errors to OSError (EIO), and add the path or URL to every error.

    Library errors name no file, so they would otherwise be attributed to the folder that the caller is using.
    """
    loaded = [(sys.modules.get(module), name) for module, name in _FOREIGN]
    kinds = tuple(getattr(module, name) for module, name in loaded if module is not None)
    try:
        yield
    except (OSError, *kinds) as error:
        if not isinstance(error, OSError):
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", place) from error
        if error.errno is None:  # created from a message alone; with a file name, it would print as "[Errno None] None"
            number = next((number for kind, number in _NUMBERS.items() if isinstance(error, kind)), errno.EIO)
            raise OSError(number, str(error) or type(error).__name__, error.filename or place) from error
        error.filename = error.filename or place
        raise
