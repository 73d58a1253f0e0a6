"""Files that survive a crash: the order of what is done for it, and JSON that reads back exactly."""

import errno
import math
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from checkpointing.storage import durable
from checkpointing.storage.durable import NotAFile

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
    """The new one too may be gone: somebody cleans up a disk that is full."""
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
    assert len(calls) == 2, "what exists is made by nobody"


def test_a_file_is_made_durable_and_next_read_from_the_disk(tmp_path: Path, calls: Calls) -> None:
    (tmp_path / "x").write_bytes(b"x")
    before = len(os.listdir("/proc/self/fd"))
    durable.fsync_file(tmp_path / "x")
    durable.fsync_dir(tmp_path)
    assert calls == [("fsync", "x"), ("advise 0 0 True", "x"), ("fsync", tmp_path.name)]
    assert len(os.listdir("/proc/self/fd")) == before


def test_floats_read_back_and_those_that_json_has_not_are_words() -> None:
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


def test_within_the_context_only_ones_own_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    path.write_bytes(b"[1,")
    with pytest.raises(ValueError, match=rf"^{path} is not JSON: "):
        durable.read_json(path)
