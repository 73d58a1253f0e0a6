"""Direct writes onto real file systems: supported, refused, full, read-only."""

import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage import direct_io
from checkpointing.storage.direct_io import write_direct
from checkpointing.writer.arena import Arena
from tests.checkpointing.proofs.mounts import loop_ext4, ramfs, remount, small_tmpfs

BLOCK = 1 << 20
SIZE = 5 * BLOCK + 8192


@pytest.fixture(scope="module")
def memory() -> Iterator[memoryview]:
    """Page-aligned memory full of bytes that differ from block to block."""
    arena = Arena.create()
    arena.shape(SIZE + 4096, 1, "p")
    arena.buffer(0)[:] = os.urandom(SIZE + 4096)
    yield arena.buffer(0)
    arena.close()


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with loop_ext4(tmp_path_factory.mktemp("direct") / "disk", 32) as folder:
        yield folder


@pytest.fixture
def refuses(tmp_path: Path) -> Iterator[Path]:
    with ramfs(tmp_path / "ramfs") as folder:
        yield folder


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("start", "size", "direct"),
    [
        (0, SIZE, True),
        (0, BLOCK, True),
        (0, 4096, True),
        (0, 0, True),
        (0, 1, False),  # a length that is no multiple of anything
        (0, 2 * BLOCK + 4095, False),
        (1, 3 * BLOCK, False),  # memory that begins anywhere
        (4097, SIZE - 4097, False),
    ],
)
def test_written_bytes_equal_the_buffer(disk, memory, start, size, direct, threads):
    path = disk / "f"
    went = write_direct(path, memory[start : start + size], block=BLOCK, threads=threads)
    assert path.read_bytes() == bytes(memory[start : start + size])
    path.unlink()
    assert went == direct


def test_a_file_system_that_refuses_direct_writes_gets_others(refuses, memory):
    assert not write_direct(refuses / "f", memory[:SIZE], block=BLOCK)
    assert (refuses / "f").read_bytes() == bytes(memory[:SIZE])


def test_a_direct_write_does_not_fill_the_page_cache(disk, memory):
    assert write_direct(disk / "f", memory[:SIZE], block=BLOCK)
    reported = subprocess.run(["fincore", "--noheadings", "--output", "PAGES", str(disk / "f")], capture_output=True)
    (disk / "f").unlink()
    if reported.returncode:
        pytest.skip("fincore is not here")
    assert int(reported.stdout) == 0


def test_a_name_that_is_taken_is_not_written_to(disk, memory):
    (disk / "taken").write_bytes(b"mine")
    with pytest.raises(FileExistsError) as caught:
        write_direct(disk / "taken", memory[:4096])
    assert caught.value.filename == str(disk / "taken")
    assert (disk / "taken").read_bytes() == b"mine"


def test_a_full_disk_is_reported_before_a_byte_is_written(tmp_path, memory):
    with small_tmpfs(tmp_path / "tiny", "1m") as tiny:
        with pytest.raises(OSError, match="No space left on device") as caught:
            write_direct(tiny / "f", memory[:SIZE], block=BLOCK)
        assert caught.value.errno == errno.ENOSPC
        assert (tiny / "f").stat().st_size == 0
        (tiny / "f").unlink()
        write_direct(tiny / "g", memory[: BLOCK // 2])
        assert (tiny / "g").read_bytes() == bytes(memory[: BLOCK // 2])


def test_a_read_only_disk_is_reported(tmp_path, memory):
    with small_tmpfs(tmp_path / "tiny", "1m") as tiny:
        remount(tiny, "ro")
        with pytest.raises(OSError, match="Read-only") as caught:
            write_direct(tiny / "f", memory[:4096])
        assert caught.value.errno == errno.EROFS


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_cancelled_write_ends_between_blocks(disk, memory, after):
    asked: list[bool] = []

    def cancelled() -> bool:
        asked.append(len(asked) >= after)
        return asked[-1]

    with pytest.raises(OSError, match="[Cc]anceled") as caught:
        write_direct(disk / "f", memory[:SIZE], block=BLOCK, cancelled=cancelled)
    assert caught.value.errno == errno.ECANCELED
    assert asked == [False] * after + [True]
    written = (disk / "f").read_bytes()
    (disk / "f").unlink()
    assert written[: after * BLOCK] == bytes(memory[: after * BLOCK])
    assert not any(written[after * BLOCK :])


_SHORT = """
import resource, sys
from pathlib import Path
from checkpointing.storage.direct_io import write_direct
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    write_direct(Path(sys.argv[1]), memoryview(b"x" * 3_000_000), block=1 << 20)
except OSError as error:
    sys.exit(error.errno)
"""


def test_a_write_that_is_cut_short_goes_on_until_the_kernel_says_why(refuses):
    # The limit lies within a block: the kernel takes the part of it that fits, and refuses the rest.
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    done = subprocess.run([sys.executable, "-c", _SHORT, str(refuses / "f"), "1500001"], check=False)
    assert done.returncode == errno.EFBIG
    assert (refuses / "f").read_bytes() == b"x" * 1_500_001


def test_bytes_are_durable_before_the_call_returns(tmp_path, memory, monkeypatch):
    acts: list[str] = []

    def noted(name: str) -> Callable[..., int]:
        real = getattr(os, name)
        return lambda *arguments: (acts.append(name), real(*arguments))[1]

    for name in ("pwrite", "fsync", "close"):
        monkeypatch.setattr(os, name, noted(name))
    write_direct(tmp_path / "f", memory[: 2 * BLOCK], block=BLOCK)
    assert acts == ["pwrite", "pwrite", "fsync", "close"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_block_left_out_by_a_dead_thread_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, names = direct_io._DirectFile._write, []

    def short_of_memory(outlet: Any, at: int, end: int) -> None:
        name = threading.current_thread().name
        if name.startswith("lane-"):
            names.append(name)
            raise MemoryError
        write(outlet, at, end)
        lane_came.wait(10)

    lane_came = threading.Event()
    monkeypatch.setattr(direct_io._DirectFile, "_write", short_of_memory)
    threading.Timer(0.05, lane_came.set).start()
    with pytest.raises(OSError, match="Input/output error"):
        direct_io.write_direct(tmp_path / "f", memoryview(bytearray(64 * 4096)), block=4096, threads=2)
    assert names


def failing(number: int) -> Callable[..., int]:
    def fail(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    return fail


def test_other_errors_of_the_kernel_are_raised(tmp_path, memory, monkeypatch):
    """A flag that cannot be set for another reason than the file system's, and writes that write nothing."""
    with monkeypatch.context() as patch:
        real = direct_io.fcntl.fcntl
        patch.setattr(
            direct_io.fcntl, "fcntl",
            lambda *call: failing(errno.EPERM)() if call[1] == direct_io.fcntl.F_SETFL else real(*call),
        )  # fmt: skip
        with pytest.raises(PermissionError) as caught:
            write_direct(tmp_path / "f", memory[:4096])
    assert caught.value.filename == str(tmp_path / "f")
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(OSError, match="Input/output error"):
        write_direct(tmp_path / "g", memory[:4096])
    monkeypatch.setattr(os, "pwrite", failing(errno.ENXIO))
    with pytest.raises(OSError, match="No such device"):
        write_direct(tmp_path / "h", memory[:4096])
    monkeypatch.setattr(os, "pwrite", failing(errno.EINVAL))  # not only of direct writes
    with pytest.raises(OSError, match="Invalid argument"):
        write_direct(tmp_path / "i", memory[:4096])


def test_large_files_are_written_by_four_threads_in_blocks_of_16_mib(tmp_path, monkeypatch):
    mib, threads, blocks = 1 << 20, list[int](), list[int]()
    real = direct_io._DirectFile.write_all
    monkeypatch.setattr(
        direct_io._DirectFile, "write_all", lambda file, number: threads.append(number) or real(file, 1)
    )
    monkeypatch.setattr(direct_io.shared_memory, "allocate", lambda *_: None)
    monkeypatch.setattr(os, "pwrite", lambda descriptor, data, at: blocks.append(len(data)) or len(data))
    memory = memoryview(bytearray(65 * mib))
    for name, size in (("one", 64 * mib), ("four", 65 * mib)):
        write_direct(tmp_path / name, memory[:size])
    assert threads == [1, 4]
    assert blocks == [16 * mib] * 8 + [mib]
