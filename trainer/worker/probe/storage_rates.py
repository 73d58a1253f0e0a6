"""Rates of one folder: sequential writes with fsync, sequential reads past the page cache, small files."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from statistics import median

BLOCK = 4 << 20
_REPEATS = 3


@contextmanager
def scratch_folder(place: Path) -> Iterator[Path]:
    """Yield a new folder in `place`, which is created if it is missing, and remove it with its files afterwards."""
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = place / f".orch-probe-{token_hex(6)}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


def write_rate(folder: Path, nbytes: int) -> float:
    """Return the bytes per second of a sequential write that ends with fsync; the file stays for `read_rate`."""
    block = os.urandom(min(BLOCK, nbytes))

    def write() -> None:
        with (folder / "data").open("wb", buffering=0) as stream:
            for _ in range(nbytes // len(block)):
                stream.write(block)
            os.fsync(stream.fileno())

    # Truncating the previous file would count as writing.
    return nbytes // len(block) * len(block) / _middle(write, lambda: (folder / "data").unlink(missing_ok=True))


def read_rate(files: list[Path], most: int) -> tuple[float, int]:
    """Return the bytes per second of sequential reads of these files, and the bytes read, at most `most`.

    Their pages leave this node's cache first. A server or a device may still hold them in its own cache.
    """
    total = 0

    def read() -> None:
        nonlocal total
        total, buffer = 0, bytearray(BLOCK)
        for path in files:
            with path.open("rb", buffering=0) as stream:
                while total < most and (count := stream.readinto(buffer)):
                    total += count

    return_after = _middle(read, before=lambda: _drop_pages(files))
    return total / return_after, total


def _drop_pages(files: list[Path]) -> None:
    for path in files:
        with path.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def metadata_rate(folder: Path, count: int) -> float:
    """Return how many small files per second can be created, renamed, read and removed."""

    def work() -> None:
        for index in range(count):
            first, second = f"{folder}/a{index}", f"{folder}/b{index}"
            descriptor = os.open(first, os.O_CREAT | os.O_WRONLY, 0o600)
            os.write(descriptor, b"probe")
            os.close(descriptor)
            os.rename(first, second)
            descriptor = os.open(second, os.O_RDONLY)
            os.read(descriptor, 16)
            os.close(descriptor)
        for index in range(count):
            os.unlink(f"{folder}/b{index}")

    return count / _middle(work)


def stat_rate(folder: Path, count: int) -> float:
    """Return how many of a read-only folder's entries per second can be looked up."""
    names = [entry.path for entry in os.scandir(folder)][:count] or [str(folder)]

    def work() -> None:
        for index in range(count):
            os.stat(names[index % len(names)])

    return count / _middle(work)


def largest_files(folder: Path, most: int) -> list[Path]:
    """Return the largest files of a folder, as many as `most` bytes need."""
    found: list[tuple[int, Path]] = []
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file():
                found.append((path.stat().st_size, path))
    chosen, total = [], 0
    for nbytes, path in sorted(found, key=lambda pair: (-pair[0], str(pair[1]))):
        if total >= most:
            break
        chosen.append(path)
        total += nbytes
    return chosen


def _middle(work: Callable[[], None], before: Callable[[], None] = lambda: None) -> float:
    """Return the median seconds of a few repetitions."""
    times = []
    for _ in range(_REPEATS):
        before()
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return max(median(times), 1e-9)
