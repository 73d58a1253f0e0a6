"""What each level of verification finds and reports."""

import errno
import os
import random
import shutil
from pathlib import Path
from typing import BinaryIO

import pytest

from checkpointing.format.manifest import Index, Piece, TensorInfo
from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.digests import CHUNK
from checkpointing.verification.verify import (
    _resident,
    all_chunks,
    check_chunks,
    read_sealed,
    reader_threads,
    verify,
    verify_checkpoint,
)
from tests.checkpointing.made_checkpoint import make

BIG = {".metadata": b"metadata", "__0_0.distcp": random.Random(3).randbytes(2 * CHUNK + 77)}


class Streaming(LocalStorage):
    """A storage that opens files differently, as storages do that are no plain folder."""

    def open(self, path: str) -> BinaryIO:
        return super().open(path)


def drop_cache(path: Path) -> None:
    """Drop this file from the page cache."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / make(LocalStorage(tmp_path), 5)


def faults(path: Path, level: int) -> list[str]:
    report = verify(path, level)
    assert report.ok == (not report.faults)
    return [str(fault) for fault in report.faults]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_healthy_checkpoint_has_no_faults(checkpoint: Path, level: int) -> None:
    assert faults(checkpoint, level) == []


def test_progress_counts_every_byte(tmp_path: Path) -> None:
    path = tmp_path / make(LocalStorage(tmp_path), 5, files=BIG)
    reported: list[tuple[int, int]] = []
    report = verify(path, 2, lambda done, total: reported.append((done, total)))
    size = sum(map(len, BIG.values()))
    assert reported[-1] == (size, size)
    assert [done for done, _ in reported] == sorted(done for done, _ in reported)
    assert len(reported) == 4
    assert report.bytes == size


def test_a_fault_names_its_file_and_chunk(tmp_path: Path) -> None:
    path = tmp_path / make(LocalStorage(tmp_path), 5, files=BIG)
    with (path / "__0_0.distcp").open("r+b") as stream:
        stream.seek(CHUNK + 5)
        stream.write(b"?")
    assert faults(path, 0) == []
    (fault,) = verify(path, 2).faults
    assert (fault.file, fault.chunk, fault.reason) == ("__0_0.distcp", 1, "digest differs")
    assert str(fault) == "__0_0.distcp chunk 1: digest differs"


def test_level_one_reads_both_ends_of_every_file(tmp_path: Path) -> None:
    path = tmp_path / make(LocalStorage(tmp_path), 5, files=BIG)
    with (path / "__0_0.distcp").open("r+b") as stream:
        stream.seek(-1, 2)
        stream.write(b"?")
    assert faults(path, 1) == ["__0_0.distcp chunk 2: digest differs"]


def test_missing_and_resized_files_show_at_every_level(checkpoint: Path) -> None:
    (checkpoint / "__0_0.distcp").unlink()
    with (checkpoint / "__1_0.distcp").open("ab") as stream:
        stream.write(b"tail")
    for level in (0, 1, 2):
        assert faults(checkpoint, level) == ["__0_0.distcp: missing", "__1_0.distcp: has 504 bytes instead of 500"]


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    (found,) = faults(tmp_path / "step-00000005.001-ab12cd34", 0)
    assert found.startswith("COMMIT: unreadable: No such file")


def test_a_manifest_with_another_digest_than_in_commit(checkpoint: Path) -> None:
    path = checkpoint / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b"2.13.0", b"2.13.1"))
    assert faults(checkpoint, 0) == ["manifest.json: does not match the digest in COMMIT"]


def test_a_folder_instead_of_a_file_is_reported_as_one(checkpoint: Path) -> None:
    shard = next(checkpoint.glob("*.distcp"))
    shard.unlink()
    shard.mkdir()
    [fault] = verify(checkpoint, 0).faults
    assert (fault.file, fault.reason) == (shard.name, "is a folder, not a file")


def test_a_missing_manifest(checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()
    (found,) = faults(checkpoint, 0)
    assert found.startswith("manifest.json: unreadable")


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_checkpoint_being_deleted_is_not_verified(checkpoint: Path, level: int) -> None:
    (checkpoint / "DELETED").write_bytes(b"{}")
    assert faults(checkpoint, level) == ["DELETED: its deletion has begun"]


def test_a_copied_folder_is_not_another_checkpoint(checkpoint: Path) -> None:
    copy = checkpoint.with_name("step-00000009.001-ab12cd34")
    shutil.copytree(checkpoint, copy)
    (found,) = faults(copy, 0)
    assert "renamed or copied" in found


def test_an_unknown_level_is_rejected(checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="level 7"):
        verify(checkpoint, 7)


def test_a_chunk_is_read_the_same_way_from_the_cache_past_it_and_through_streams(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    path = tmp_path / make(storage, 5, files=BIG)
    drop_cache(path / "__0_0.distcp")
    assert faults(path, 2) == []
    assert (path / "__0_0.distcp").read_bytes() == BIG["__0_0.distcp"]
    assert faults(path, 2) == []
    assert verify_checkpoint(Streaming(tmp_path), path.name, 2).faults == ()


@pytest.mark.parametrize("cached", [True, False])
def test_a_file_that_ends_early_is_a_fault_of_its_last_chunk(tmp_path: Path, cached: bool) -> None:
    storage = LocalStorage(tmp_path)
    path = tmp_path / make(storage, 5, files=BIG)
    manifest, _ = read_sealed(storage, path.name)
    assert manifest is not None
    os.truncate(path / "__0_0.distcp", 2 * CHUNK + 70)
    if not cached:
        drop_cache(path / "__0_0.distcp")
    (fault,) = check_chunks(storage, path.name, all_chunks(manifest))
    assert (fault.chunk, fault.reason) == (2, "digest differs")


@pytest.mark.parametrize("cached", [True, False])
def test_the_page_cache_is_as_it_was_before(disk: Path, cached: bool) -> None:
    chunks = 8
    content = random.Random(3).randbytes(CHUNK) * chunks
    path = disk / make(LocalStorage(disk), 5, files={".metadata": b"metadata", "__0_0.distcp": content})
    shard = path / "__0_0.distcp"
    drop_cache(shard)
    if cached:
        shard.read_bytes()
    places = range(0, chunks * CHUNK, 1 << 20)
    with shard.open("rb") as stream:
        before = [_resident(stream.fileno(), place) for place in places]
        assert faults(path, 2) == []
        after = [_resident(stream.fileno(), place) for place in places]
    assert set(before) == {cached}
    if cached:
        assert all(after)
    else:
        # The kernel lets go of no page that it reads ahead at that moment; one window for each thread.
        assert sum(after) <= reader_threads() * _read_ahead_mib(shard)


def _read_ahead_mib(path: Path) -> int:
    """An upper bound of the kernel's read-ahead in this file, in whole MiB."""
    device = path.stat().st_dev
    window = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb")
    return (int(window.read_text()) >> 10) + 1 if window.is_file() else 8


def test_a_chunk_that_cannot_be_read_is_named_and_the_others_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / make(LocalStorage(tmp_path), 5, files=BIG)
    read = os.preadv

    def failing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if CHUNK <= offset < 2 * CHUNK:
            raise OSError(errno.EIO, "bad sector")
        return read(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    (fault,) = verify(path, 2).faults
    assert (fault.file, fault.chunk) == ("__0_0.distcp", 1)
    assert "bad sector" in fault.reason


def test_a_bad_chunk_names_the_tensors_that_lie_in_it(tmp_path: Path) -> None:
    half = CHUNK // 2
    keys = ["a", "b", "c", "d"]
    pieces = tuple(Piece(k, "__0_0.distcp", (0,), (half,), i * half, half, i * half, half) for i, k in enumerate(keys))
    index = Index({key: TensorInfo("uint8", (half,)) for key in keys}, pieces)
    path = tmp_path / make(LocalStorage(tmp_path), 5, files={**BIG, "index.json": index.encode()})
    with (path / "__0_0.distcp").open("r+b") as stream:
        stream.seek(CHUNK + 5)
        stream.write(b"?")
    (fault,) = verify(path, 2).faults
    assert fault.tensors == ("c", "d")
    assert str(fault) == "__0_0.distcp chunk 1: digest differs (c, d)"
    with (path / "__0_0.distcp").open("r+b") as stream:
        stream.write(b"?")
    assert [fault.tensors for fault in verify(path, 2).faults] == [("a", "b"), ("c", "d")]
    (path / "__0_0.distcp").unlink()
    (fault,) = verify(path, 0).faults
    assert fault.tensor == "a, b and 2 more"
    (path / "index.json").write_bytes(b"{}")
    assert {fault.tensors for fault in verify(path, 2).faults} == {()}


def test_a_short_read_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / make(LocalStorage(tmp_path), 5, files=BIG)
    read = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:70001]], offset))
    assert faults(path, 2) == []
