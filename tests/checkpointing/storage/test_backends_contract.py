"""One suite for every storage: what the rest of checkpointing relies on."""

import copy
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from checkpointing.storage.backends import FsspecStorage, LocalStorage, Storage, open_storage


@pytest.fixture(params=["local", "memory", "fsspec-local", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    if request.param == "local":
        yield LocalStorage(tmp_path / "root")
    elif request.param == "s3":
        yield open_storage(request.getfixturevalue("s3_url"))
    elif request.param == "fsspec-local":
        yield FsspecStorage(fsspec.filesystem("file"), str(tmp_path / "root"))
    else:
        memory = fsspec.filesystem("memory")
        yield FsspecStorage(memory, "/contract")
        memory.rm("/", recursive=True)


def written(storage: Storage, path: str, data: bytes) -> None:
    sink = storage.create(path)
    assert sink.write(data) == len(data)
    sink.close()


def read(storage: Storage, path: str) -> bytes:
    with storage.open(path) as stream:
        return stream.read()


def test_a_created_file_reads_back(storage: Storage) -> None:
    written(storage, "a/file", b"hello")
    assert read(storage, "a/file") == b"hello"
    assert storage.list("a") == {"file": 5}


def test_small_and_large_pieces_keep_their_order(storage: Storage) -> None:
    pieces = [b"a" * 10, b"b" * (3 << 20), b"c", b"", b"d" * (1 << 20), b"e" * 7]
    sink = storage.create("a/file")
    for piece in pieces:
        sink.write(memoryview(piece))
    sink.close()
    assert read(storage, "a/file") == b"".join(pieces)


def test_nothing_is_created_twice(storage: Storage) -> None:
    written(storage, "a/file", b"old")
    with pytest.raises(FileExistsError):
        storage.create("a/file")
    assert read(storage, "a/file") == b"old"


def test_an_aborted_file_leaves_the_storage_usable(storage: Storage) -> None:
    sink = storage.create("a/file")
    sink.write(b"half")
    sink.abort()
    storage.delete("a/file")
    written(storage, "a/other", b"whole")
    assert storage.list("a") == {"other": 5}


def test_reading_is_seekable(storage: Storage) -> None:
    written(storage, "a/file", b"0123456789")
    with storage.open("a/file") as stream:
        stream.seek(4)
        assert stream.read(3) == b"456"
        stream.seek(0)
        assert stream.read(2) == b"01"


def test_published_files_appear_whole_and_leave_nothing_beside_them(storage: Storage) -> None:
    storage.publish("a/COMMIT", b"seal")
    assert storage.list("a") == {"COMMIT": 4}
    assert read(storage, "a/COMMIT") == b"seal"


def test_missing_files_raise_oserror_or_list_as_nothing(storage: Storage) -> None:
    with pytest.raises(FileNotFoundError):
        storage.open("a/file")
    assert storage.list("nowhere") == {}
    assert storage.list("") == {}
    storage.delete("nowhere/file")


def test_folders_are_listed_without_a_size(storage: Storage) -> None:
    written(storage, "a/file", b"1")
    written(storage, "b/file", b"22")
    assert storage.list("") == {"a": None, "b": None}


def test_files_go_first_then_their_folder(storage: Storage) -> None:
    written(storage, "a/one", b"1")
    written(storage, "b/two", b"2")
    storage.delete("a/one")
    storage.delete("a")
    assert storage.list("") == {"b": None}


def test_publishing_again_replaces(storage: Storage) -> None:
    storage.publish("a/note", b"old and longer")
    assert storage.list("a") == {"note": 14}
    storage.publish("a/note", b"new")
    assert storage.list("a") == {"note": 3}
    assert read(storage, "a/note") == b"new"


def test_changes_by_another_process_are_seen_immediately(storage: Storage) -> None:
    assert storage.list("a") == {}
    with pytest.raises(FileNotFoundError):
        storage.open("a/file")
    other = copy.copy(storage)
    if isinstance(storage, FsspecStorage):
        filesystem = type(storage._fs)(skip_instance_cache=True, **storage._fs.storage_options)
        other = FsspecStorage(filesystem, storage._root)
    written(other, "a/file", b"1")
    assert storage.list("a") == {"file": 1}
    assert read(storage, "a/file") == b"1"
    with pytest.raises(FileExistsError):
        storage.create("a/file")
    other.delete("a/file")
    assert storage.list("a") == {}
    with pytest.raises(FileNotFoundError):
        storage.open("a/file")


def test_reading_into_a_buffer(storage: Storage) -> None:
    written(storage, "a/file", b"0123456789")
    room = bytearray(6)
    with storage.open("a/file") as stream:
        assert stream.readinto(room) == 6
        assert bytes(room) == b"012345"
        assert stream.readinto(room) == 4
        assert stream.readinto(room) == 0


def test_places_choose_their_storage(tmp_path: Path) -> None:
    assert isinstance(open_storage(tmp_path), LocalStorage)
    assert isinstance(open_storage(f"file://{tmp_path}"), LocalStorage)
    remote = open_storage("memory://somewhere")
    assert isinstance(remote, FsspecStorage)
    written(remote, "a/file", b"x")
    assert fsspec.filesystem("memory").cat("/somewhere/a/file") == b"x"
    fsspec.filesystem("memory").rm("/somewhere", recursive=True)


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(ValueError, match="put credentials in the environment") as caught:
        open_storage("s3://key:secret@bucket/prefix")
    assert "secret" not in str(caught.value)
