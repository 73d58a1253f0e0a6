"""Whether any process opens some files, as the kernel reports it (inotify)."""

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path

_OPEN = 0x20
_EVENT = struct.Struct("iIII")
"""Watch, mask, cookie, and length of a name, which events of files do not have."""
_MOST = 1000
"""Maximum number of watched files."""


class OpenedFiles:
    """Watch on files; it finds reads of every kind, such as those of a library that maps a file into memory."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Begin to watch the first files. Raises OSError."""
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._check(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        self._found = False
        for path, _ in zip(files, range(_MOST), strict=False):
            self._check(self._libc.inotify_add_watch(self._descriptor, os.fsencode(path), _OPEN))

    def _check(self, result: int) -> int:
        if result < 0:
            raise OSError(number := ctypes.get_errno(), f"cannot watch files (inotify): {os.strerror(number)}")
        return result

    def is_any_opened(self) -> bool:
        """Return whether a process has opened one of the files since the watch began."""
        try:
            events = os.read(self._descriptor, 1000 * _EVENT.size)
        except BlockingIOError:
            events = b""
        self._found = self._found or any(mask & _OPEN for _, mask, _, _ in _EVENT.iter_unpack(events))
        return self._found

    def close(self) -> None:
        os.close(self._descriptor)
