"""Errors of the libraries that speak to object stores: a store that cannot be reached is an OSError like any other."""

import contextlib
import errno
import sys
from collections.abc import Iterator

_FOREIGN = (
    ("botocore.exceptions", "BotoCoreError"),
    ("botocore.exceptions", "ClientError"),
    ("aiohttp.client_exceptions", "ClientError"),
    ("gcsfs.retry", "HttpError"),
    ("google.auth.exceptions", "GoogleAuthError"),
    ("azure.core.exceptions", "AzureError"),
)
"""Module and class of what such libraries raise besides OSError; only those that are loaded can have been raised."""


@contextlib.contextmanager
def as_oserror(place: str) -> Iterator[None]:
    """Raise OSError (EIO) in the place of a library's own network error; every error names the place that it is about.

    Libraries name no file: without this, the error would be taken for one of whatever folder the caller has in mind.
    """
    loaded = [(sys.modules.get(module), name) for module, name in _FOREIGN]
    kinds = tuple(getattr(module, name) for module, name in loaded if module is not None)
    try:
        yield
    except (OSError, *kinds) as error:
        if not isinstance(error, OSError):
            raise OSError(errno.EIO, f"{type(error).__name__}: {error}", place) from error
        error.filename = error.filename or place
        raise
