"""Files that must be written on a full disk, on one that is really full."""

import errno
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage.durable import replace_or_overwrite, reserve, write_atomically, write_reserved
from checkpointing.storage.storage_errors import disk_words, explain_disk_error, is_disk_error
from tests.checkpointing.proofs.mounts import fill, small_tmpfs


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "disk", "256k") as folder:
        yield folder


def test_what_was_reserved_is_written_when_nothing_else_is(disk: Path) -> None:
    path = disk / "outcome.json"
    reserve(path, 8192)
    fill(disk)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(disk / "other", b"x" * 100)
    write_reserved(path, b'{"kind":"storage"}')
    assert json.loads(path.read_bytes()) == {"kind": "storage"}
    assert sorted(os.listdir(disk)) == ["filler", "outcome.json"]


def test_where_there_is_room_the_reserve_is_given_back(disk: Path) -> None:
    path = disk / "outcome.json"
    reserve(path)
    write_reserved(path, b"{}")
    assert os.listdir(disk) == ["outcome.json"]


def test_nothing_need_have_been_reserved_where_there_is_room(tmp_path: Path) -> None:
    write_reserved(tmp_path / "outcome.json", b"{}")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"outcome.json": b"{}"}


def test_a_reserve_is_as_large_as_asked_for_and_no_compressor_shrinks_it(tmp_path: Path) -> None:
    reserve(tmp_path / "a")
    reserve(tmp_path / "b", 4096)
    sizes = {path.name: len(zlib.compress(path.read_bytes())) for path in tmp_path.iterdir()}
    assert sizes.keys() == {".a.reserve", ".b.reserve"}
    assert sizes[".a.reserve"] >= 32 << 10
    assert 4096 <= sizes[".b.reserve"] < 5000


@pytest.mark.parametrize("call", [write_reserved, replace_or_overwrite])
def test_another_failure_than_a_full_disk_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[Path, bytes], None]
) -> None:
    reserve(tmp_path / "x")
    (tmp_path / "x").write_bytes(b"old")

    def broken(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(OSError, match="Input/output error"):
        call(tmp_path / "x", b"new")
    assert (tmp_path / "x").read_bytes() == b"old"


@pytest.mark.parametrize("reserved", [None, 100])
def test_what_does_not_fit_is_told(disk: Path, reserved: int | None) -> None:
    path = disk / "outcome.json"
    if reserved is not None:
        reserve(path, reserved)
    fill(disk)
    with pytest.raises(OSError) as full:  # noqa: PT011  # the errno is the point
        write_reserved(path, bytes(200))
    assert full.value.errno == errno.ENOSPC
    assert not path.exists()


def test_a_full_disk_has_a_file_overwritten_and_no_end_of_the_old_one_is_left(disk: Path) -> None:
    path = disk / "heartbeat.json"
    replace_or_overwrite(path, b'{"seq": 1, "phase": "checkpoint"}')
    fill(disk)
    for content in (b'{"seq": 2}', b'{"seq": 3, "phase": "forward", "saves_failing": "since step 30"}'):
        replace_or_overwrite(path, content)
        assert json.loads(path.read_bytes()) == json.loads(content)
    with pytest.raises(OSError, match="No space left"):
        replace_or_overwrite(disk / "new.json", b"{}")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "disk full"), (errno.EDQUOT, "disk quota exceeded"), (errno.EROFS, "read-only file system"),
        (errno.EIO, "I/O error"), (errno.EACCES, ""), (None, ""),
    ],
)  # fmt: skip
def test_what_a_disk_says(number: int | None, words: str) -> None:
    error = OSError() if number is None else OSError(number, "said")
    assert (disk_words(number), is_disk_error(error)) == (words, bool(words))
    assert explain_disk_error(error, Path("/runs/a")) == (f"{words} (/runs/a)" if words else "")


def test_the_folder_that_an_error_names_counts() -> None:
    error = OSError(errno.ENOSPC, "No space left on device", "/home/me/jobs/a.json")
    assert explain_disk_error(error, Path("/runs/a")) == "disk full (/home/me/jobs)"
    assert explain_disk_error(ValueError(), Path("/runs/a")) == ""


def test_a_reserve_that_takes_only_a_part_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve(tmp_path / "x")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: len(data) - 1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            write_reserved(tmp_path / "x", b"{}")
    assert not (tmp_path / "x").exists()
