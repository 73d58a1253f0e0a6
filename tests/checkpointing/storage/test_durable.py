"""Durable files: the order of their operations, and JSON that reads back exactly."""

import errno
import fcntl
import json
import math
import os
import stat
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage import durable
from checkpointing.storage.durable import (
    NotAFile,
    replace_or_overwrite,
    reserve,
    temporary_folder,
    write_atomically,
    write_reserved,
)
from checkpointing.storage.storage_errors import disk_words, explain_disk_error, is_disk_error
from tests.checkpointing.proofs.mounts import fill, small_tmpfs

Calls = list[tuple[str, str]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Every fsync, rename and advice, with the name of the file; the bytes of a file have reached it by its fsync."""
    found: Calls = []

    def name(descriptor: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{descriptor}")).name

    true_fsync, true_replace, true_advise = os.fsync, os.replace, os.posix_fadvise

    def fsync(descriptor: int) -> None:
        found.append(("fsync", name(descriptor)))
        found_file = os.fstat(descriptor)
        assert found_file.st_size or stat.S_ISDIR(found_file.st_mode), "nothing is there yet that could become durable"
        true_fsync(descriptor)

    def replace(source: Path, target: Path) -> None:
        found.append(("replace", Path(target).name))
        true_replace(source, target)

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        found.append((f"advise {offset} {length} {advice == os.POSIX_FADV_DONTNEED}", name(descriptor)))
        true_advise(descriptor, offset, length, advice)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(os, "posix_fadvise", advise)
    return found


def test_bytes_are_on_disk_before_the_name_and_the_name_before_it_returns(tmp_path: Path, calls: Calls) -> None:
    durable.write_durably(tmp_path / "x", b"one")
    (first, temporary), *rest = calls
    assert first == "fsync"
    assert temporary.startswith(".x.")
    assert temporary.endswith(".tmp")
    assert rest == [("replace", "x"), ("fsync", tmp_path.name)]
    durable.write_durably(tmp_path / "x", b"two", mode=0o640)
    assert ((tmp_path / "x").read_bytes(), (tmp_path / "x").stat().st_mode & 0o777) == (b"two", 0o640)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_an_atomic_write_waits_for_no_disk(tmp_path: Path, calls: Calls) -> None:
    durable.write_atomically(tmp_path / "x", b"one")
    assert calls == [("replace", "x")]
    assert ((tmp_path / "x").read_bytes(), (tmp_path / "x").stat().st_mode & 0o777) == (b"one", 0o600)


@pytest.mark.parametrize("is_removed", [False, True], ids=["left", "removed"])
@pytest.mark.parametrize("write", [durable.write_durably, durable.write_atomically])
def test_a_write_that_fails_leaves_the_old_file_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Path, bytes], None], is_removed: bool
) -> None:
    """The temporary file may be gone too, when somebody cleans up a full disk."""
    write(tmp_path / "x", b"old")

    def full(source: Path, target: Path) -> None:
        if is_removed:
            source.unlink()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", full)
        with pytest.raises(OSError, match="No space left") as caught:
            write(tmp_path / "x", b"new")
    assert caught.value.filename == str(tmp_path / "x")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("x", b"old")]


def test_folders_are_made_with_what_is_missing_above_them(tmp_path: Path, calls: Calls) -> None:
    durable.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == (tmp_path / "a").stat().st_mode & 0o777 == 0o700
    assert calls == [("fsync", tmp_path.name), ("fsync", "a")]
    durable.make_folder(tmp_path / "a" / "b")
    assert len(calls) == 2, "an existing folder is not created again"
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        durable.make_folder(tmp_path / "file" / "x")


def test_a_file_is_made_durable_and_next_read_from_the_disk(tmp_path: Path, calls: Calls) -> None:
    (tmp_path / "x").write_bytes(b"x")
    before = len(os.listdir("/proc/self/fd"))
    durable.fsync_file(tmp_path / "x")
    durable.fsync_dir(tmp_path)
    assert calls == [("fsync", "x"), ("advise 0 0 True", "x"), ("fsync", tmp_path.name)]
    assert len(os.listdir("/proc/self/fd")) == before


def test_floats_read_back_and_non_finite_ones_are_words() -> None:
    value = {"b": [1.5, math.inf, (-math.inf,)], "a": {"x": math.nan}, "ü": 0.1}
    assert durable.dump_line(value) == '{"b":[1.5,"inf",["-inf"]],"a":{"x":"nan"},"ü":0.1}'
    assert durable.canonical(value) == '{"a":{"x":"nan"},"b":[1.5,"inf",["-inf"]],"ü":0.1}'.encode()
    assert durable.canonical({"b": 1, "a": 2}) == b'{"a":2,"b":1}'
    assert [durable.number(word) for word in ("inf", "-inf")] == [math.inf, -math.inf]
    assert math.isnan(durable.number("nan"))
    assert durable.number(2) == 2.0


def test_numbers_of_unknown_origin() -> None:
    assert [durable.finite(one) for one in (1, 2.5, True, "1", None, math.inf, math.nan, 10**400)] == [
        1.0, 2.5, None, None, None, None, None, None,
    ]  # fmt: skip
    most = 2**63
    assert [durable.whole(one) for one in (0, -most, most - 1)] == [0, -most, most - 1]
    assert [durable.whole(one) for one in (-most - 1, most, True, 1.0, "1")] == [None] * 5


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotAFile, match="is a FIFO, not a regular file"):
        durable.open_regular(tmp_path / "fifo")
    with pytest.raises(NotAFile, match="is a folder, not a regular file"):
        durable.open_regular(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before
    (tmp_path / "x").write_bytes(b"x")
    with durable.open_regular(tmp_path / "x") as stream:
        assert stream.read() == b"x"


def test_within_the_context_only_own_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(b"x")
    monkeypatch.setattr(durable, "is_trusted", lambda user: False)
    with durable.only_own_files():
        with pytest.raises(NotAFile, match="belongs to"):
            durable.open_regular(tmp_path / "x")
        with durable.only_own_files():
            pass
        with pytest.raises(NotAFile, match="belongs to"):
            durable.open_regular(tmp_path / "x")
        others: list[bytes] = []

        def read() -> None:
            with durable.open_regular(tmp_path / "x") as stream:
                others.append(stream.read())

        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        assert others == [b"x"], "it holds for this thread alone"
    durable.open_regular(tmp_path / "x").close()


def test_json_is_bounded_and_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"[1,2]")
    assert durable.read_json(path) == durable.read_json(path, most=5) == [1, 2]
    with pytest.raises(NotAFile, match="is larger than 4 bytes"):
        durable.read_json(path, most=4)
    for text in ("[1,", "[" * 100_000):
        path.write_text(text)
        with pytest.raises(ValueError, match=rf"^{path} is not JSON: "):
            durable.read_json(path)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_tmpfs(tmp_path / "disk", "256k") as folder:
        yield folder


def test_reserved_space_is_used_when_the_disk_is_full(disk: Path) -> None:
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
def test_a_full_disk_without_enough_reserve_is_reported(disk: Path, reserved: int | None) -> None:
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
def test_which_disk_errors_mean_what(number: int | None, words: str) -> None:
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


KILLED = """
import os, sys
from pathlib import Path
from checkpointing.storage.durable import temporary_folder
with temporary_folder(Path(sys.argv[1]), "out") as folder:
    (folder / "half.safetensors").write_bytes(b"half")
    os._exit(9)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_draft_that_is_not_moved_is_deleted_at_the_end(tmp_path: Path) -> None:
    with temporary_folder(tmp_path, "out") as first:
        (first / "file").write_text("x")
        first.rename(tmp_path / "kept")
    full = OSError("full")
    with suppress(OSError), temporary_folder(tmp_path, "out") as second:
        (second / "file").write_text("x")
        raise full
    assert names(tmp_path) == ["kept"]
    assert names(tmp_path / "kept") == ["file"]


def test_drafts_of_a_killed_maker_are_swept_by_the_next(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=Path(__file__).parents[3], timeout=60)
    assert done.returncode == 9
    (left,) = tmp_path.iterdir()
    with temporary_folder(tmp_path, "other"):
        assert left.exists(), "of another export"
    with temporary_folder(tmp_path, "out") as folder:
        assert names(tmp_path) == [folder.name]


def test_a_private_draft_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    with temporary_folder(tmp_path, "import", mode=0o700) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700


def test_drafts_of_a_running_maker_are_left_alone(tmp_path: Path) -> None:
    with temporary_folder(tmp_path, "out") as first, temporary_folder(tmp_path, "out") as second:
        assert names(tmp_path) == sorted([first.name, second.name])


def test_other_machines_drafts_and_other_folders_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node1.cluster")
    left = [".out.node2-cluster.0123abcd.tmp", ".out.node1-cluster.tmp", "out", ".out.node1-cluster.0123abcd"]
    for name in (*left, ".out.node1-cluster.0123abcd.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / ".out.node1-cluster.76543210.tmp").touch()
    with temporary_folder(tmp_path, "out"):
        pass
    assert names(tmp_path) == sorted([*left, ".out.node1-cluster.76543210.tmp"]), "nor is a file"


def test_without_locks_drafts_are_made_and_none_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, how: int) -> None:
        raise OSError(38, os.strerror(38))

    with temporary_folder(tmp_path, "out") as first:
        monkeypatch.setattr(fcntl, "flock", unsupported)
        with temporary_folder(tmp_path, "out"):
            assert first.exists()


def test_a_draft_that_another_maker_sweeps_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is opened, while its lock is held, and after it is opened."""
    swept: list[str] = []
    true_open, true_lock = os.open, fcntl.flock

    def sweep(path: Path) -> None:
        swept.append(path.name)
        path.rmdir()

    def opened(path: Path, flags: int, dir_fd: int | None = None) -> int:
        if not swept:
            sweep(path)
        descriptor = true_open(path, flags, dir_fd=dir_fd)
        if len(swept) == 2:
            sweep(path)
        return descriptor

    def locked(descriptor: int, how: int) -> None:
        if len(swept) == 1:
            sweep(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
            raise BlockingIOError
        true_lock(descriptor, how)

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opened)
        patch.setattr(fcntl, "flock", locked)
        with temporary_folder(tmp_path, "out") as folder:
            assert names(tmp_path) == [folder.name]
    assert len(swept) == 3
    assert len(os.listdir("/proc/self/fd")) == before
