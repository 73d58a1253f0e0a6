"""Storage backends: one five-method interface to local or mounted file systems and to every fsspec store."""

import contextlib
import io
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from checkpointing.storage.digests import Bytes, Sink
from checkpointing.storage.durable import fsync_dir, fsync_file, make_folder, naming, write_durably
from checkpointing.storage.storage_errors import as_oserror

_BUFFER_BYTES = 1 << 20
_OBJECT_STORES = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oci", "oss", "r2"})
_SECRET = re.compile(r"(\w+)://[^/@]*:[^/@]*@")
_SECRET_ANYWHERE = re.compile(r"(\w+)://[^\s@]*:[^\s@]*@")


class Storage(Protocol):
    """Files under one root, named by relative paths such as `step-00000500.001-ab12cd34/COMMIT`."""

    def create(self, path: str) -> Sink:
        """Start a new file (FileExistsError if it exists).

        After `close`, the file and its name survive a power loss.
        """

    def publish(self, path: str, data: bytes) -> None:
        """Write a small file atomically and durably."""

    def open(self, path: str) -> BinaryIO:
        """Open a file for reading; the stream is seekable. Raises OSError."""

    def list(self, path: str) -> dict[str, int | None]:
        """Map the names directly in a folder to their sizes (None for folders); empty if the folder does not exist."""

    def delete(self, path: str) -> None:
        """Durably remove one file or one empty folder; do nothing if it does not exist."""


class _DurableFile:
    """A new local file. Small writes are buffered, and `close` fsyncs the file and its folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._held = bytearray()
        self._written = self._begun = 0

    def write(self, data: Bytes) -> int:
        view = memoryview(data).cast("B")
        if len(self._held) + len(view) > _BUFFER_BYTES:
            self._drain()
        if len(view) > _BUFFER_BYTES:
            self._write_all(view)
        else:
            self._held += view
        return len(view)

    def _drain(self) -> None:
        held, self._held = self._held, bytearray()
        self._write_all(memoryview(held))

    def _write_all(self, view: memoryview) -> None:
        while len(view):
            try:
                size = os.write(self._descriptor, view)
            except OSError as error:
                raise naming(error, self._path) from None
            self._written += size
            view = view[size:]
        # Dropping written pages starts their writeback now instead of at the fsync, and keeps checkpoints from evicting
        # the pages that training reads.
        if self._written - self._begun > 2 * _BUFFER_BYTES:
            os.posix_fadvise(self._descriptor, 0, self._written - _BUFFER_BYTES, os.POSIX_FADV_DONTNEED)
            self._begun = self._written

    def close(self) -> None:
        try:
            self._drain()
            os.fsync(self._descriptor)
        except OSError as error:
            raise naming(error, self._path) from None
        finally:
            os.close(self._descriptor)
        fsync_dir(self._path.parent)

    def abort(self) -> None:
        os.close(self._descriptor)


class LocalStorage:
    """A folder on a mounted file system. Files and folders are made durable with fsync."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def create(self, path: str) -> Sink:
        target = self.root / path
        make_folder(target.parent)
        return _DurableFile(target)

    def publish(self, path: str, data: bytes) -> None:
        target = self.root / path
        make_folder(target.parent)
        write_durably(target, data)

    def open(self, path: str) -> BinaryIO:
        return (self.root / path).open("rb")

    def list(self, path: str) -> dict[str, int | None]:
        return dict(self._entries(self.root / path))

    def _entries(self, folder: Path) -> Iterator[tuple[str, int | None]]:
        try:
            names = os.listdir(folder)
        except (FileNotFoundError, NotADirectoryError):
            return
        for name in sorted(names):
            # An entry may disappear in the meantime, for example through another rank's retention.
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(folder / name)
                yield name, None if stat.S_ISDIR(status.st_mode) else status.st_size

    def delete(self, path: str) -> None:
        target = self.root / path
        try:
            status = target.lstat()
            if stat.S_ISDIR(status.st_mode):
                target.rmdir()
            else:
                target.unlink()
        except FileNotFoundError:
            return
        fsync_dir(target.parent)


class _RemoteFile:
    """A new object, which exists once it is closed."""

    def __init__(self, stream: Any, url: str) -> None:
        self._stream, self._url = stream, url

    def write(self, data: Bytes) -> int:
        with as_oserror(self._url):
            self._stream.write(bytes(data))
        return len(data)

    def close(self) -> None:
        with as_oserror(self._url):
            self._stream.close()

    def abort(self) -> None:
        from fsspec.spec import AbstractBufferedFile  # already loaded by the code that opened the stream

        with as_oserror(self._url):
            if isinstance(self._stream, AbstractBufferedFile):
                self._stream.closed = True  # otherwise, garbage collection would close the torn object and so upload it
                self._stream.discard()
            else:
                self._stream.close()  # a torn object without COMMIT is harmless


class _RemoteReader(io.RawIOBase):
    """An object opened for reading. Every error is raised as OSError."""

    def __init__(self, stream: BinaryIO, url: str) -> None:
        self._stream, self._url = stream, url

    def read(self, size: int = -1) -> bytes:
        with as_oserror(self._url):
            return self._stream.read(size)

    def readinto(self, room: Any) -> int:
        view = memoryview(room).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return self._stream.seek(offset, whence)

    def tell(self) -> int:
        return self._stream.tell()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._stream.close()
        super().close()


class FsspecStorage:
    """Storage on any fsspec file system. A closed object is as durable as the store guarantees, and nothing is renamed.

    Writes by other clients are visible immediately if the file system is created with `use_listings_cache=False`, as in
    `open_storage`.
    """

    def __init__(self, filesystem: Any, root: str) -> None:
        self._fs, self._root = filesystem, root.rstrip("/")
        spoken = filesystem.protocol
        # An object store has no folders; trying to create one costs requests and may need rights on the bucket.
        self._folders = _OBJECT_STORES.isdisjoint((spoken,) if isinstance(spoken, str) else spoken)

    def _full_path(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def _url(self, path: str) -> str:
        return str(self._fs.unstrip_protocol(self._full_path(path)))

    def _make_parent(self, target: str) -> None:
        if self._folders:
            self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)

    def create(self, path: str) -> Sink:
        target = self._full_path(path)
        with as_oserror(self._url(path)):
            self._fs.invalidate_cache(target.rpartition("/")[0])
            if self._fs.exists(target):
                raise FileExistsError(f"{target} already exists")
            self._make_parent(target)
            return _RemoteFile(self._fs.open(target, "wb"), self._url(path))

    def publish(self, path: str, data: bytes) -> None:
        target = self._full_path(path)
        with as_oserror(self._url(path)):
            self._make_parent(target)
            self._fs.pipe_file(target, data)

    def open(self, path: str) -> BinaryIO:
        target = self._full_path(path)
        with as_oserror(self._url(path)):
            self._fs.invalidate_cache(target.rpartition("/")[0])
            # Checkpoints are read in chunks of several MiB, so read-ahead would fetch most bytes twice.
            stream: BinaryIO = self._fs.open(target, "rb", cache_type="none")
        return stream if self._folders else cast(BinaryIO, _RemoteReader(stream, self._url(path)))

    def list(self, path: str) -> dict[str, int | None]:
        target = self._full_path(path)
        with as_oserror(self._url(path)):
            self._fs.invalidate_cache(target)
            try:
                found = self._fs.ls(target, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
        entries = {item["name"].rstrip("/").rpartition("/")[2]: item for item in found}
        return {
            name: None if item["type"] == "directory" else int(item["size"]) for name, item in sorted(entries.items())
        }

    def delete(self, path: str) -> None:
        target = self._full_path(path)
        with as_oserror(self._url(path)), contextlib.suppress(FileNotFoundError):
            if self._folders and self._fs.isdir(target):
                self._fs.rmdir(target)
            else:
                self._fs.rm_file(target)


def make_durable(storage: Storage, path: str) -> None:
    """Make a file written by another process durable, so that the next read returns what is on disk.

    A closed object in a store is already durable. Raises OSError.
    """
    if isinstance(storage, LocalStorage):
        fsync_file(storage.root / path)
        fsync_dir((storage.root / path).parent)


def without_secrets(text: str) -> str:
    """Mask the credentials in a text's URLs, erring on the side of masking too much."""
    return _SECRET_ANYWHERE.sub(r"\1://***@", text)


def open_storage(place: str | Path) -> Storage:
    """Return the storage for a path or URL: local for paths and `file://`, otherwise fsspec (`s3://`, `memory://`).

    Credentials come only from the environment. Raises ValueError for a URL with credentials, ImportError if the
    library for its scheme is not installed (`pip install "orch[s3]"`).
    """
    text = str(place)
    if "://" not in text:
        return LocalStorage(Path(text))
    if text.startswith("file://"):
        return LocalStorage(Path(text.removeprefix("file://")))
    if _SECRET.match(text):
        raise ValueError(f"{without_secrets(text)}: put credentials in the environment, not in a URL")
    import fsspec  # imported only for remote storage; most readers never need it

    filesystem, root = fsspec.core.url_to_fs(text, use_listings_cache=False)
    return FsspecStorage(filesystem, root)
