"""Where the values of a saved tensor lie within its torch.save archive: by its headers, nothing is unpickled.

Checksums in the archive are not looked at: torch may write none, and a manifest has better ones.
"""

import errno
import io
import struct
import zipfile
from collections.abc import Callable

ReadAt = Callable[[int, int], bytes]
"""Bytes of a file, given a place and a length."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_MARK = b"PK\x03\x04"
_MALFORMED = (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, IndexError, EOFError, UnicodeError)


def locate_values(read: ReadAt, start: int, length: int) -> tuple[int, int]:
    """Place in the file, and number, of the bytes of an archive's only tensor; raises ValueError when it has none."""
    try:
        with zipfile.ZipFile(_Window(read, start, length)) as archive:
            records = [info for info in archive.infolist() if info.filename.partition("/")[2].startswith("data/")]
        if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED:
            raise ValueError(f"it has {len(records)} plain records of values instead of one")
        (record,) = records
        mark, name, extra = _LOCAL_HEADER.unpack(read(start + record.header_offset, _LOCAL_HEADER.size))
    except _MALFORMED as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
    place = record.header_offset + _LOCAL_HEADER.size + name + extra
    if mark != _MARK or place + record.file_size > length:
        raise ValueError("its values are not where it says")
    return start + place, record.file_size


class _Window(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, read: ReadAt, start: int, length: int) -> None:
        self._read, self._start, self._length, self._at = read, start, length, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if self._at < 0:
            raise OSError(errno.EINVAL, "a place before the beginning")  # as a file would, which zipfile expects
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        wanted = left if size < 0 else min(size, left)
        data = self._read(self._start + self._at, wanted)
        self._at += len(data)
        return data
