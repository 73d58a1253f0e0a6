"""Rates of `orch doctor --nodes` beside independent measurements: dd for storage, a bare gloo loop for collectives.

    python -m benchmarks.probe [--folder FOLDER] [--rounds N]

Both sides take turns, on the same file system and in the same two ranks. A figure is the larger rate divided by the
smaller one, of the medians of all rounds: 1.1 means that the two agree within 10 %.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.runner import Result, Row, run_table
from trainer.worker.probe.storage_rates import metadata_rate, read_rate, scratch_folder, write_rate

FILE_BYTES = 64 << 20
MESSAGES = (1 << 10, 1 << 22)
ROWS = (
    Row(name="write", text="sequential write with fsync: dd conv=fsync", must=1.1, stretch=1.05, source="write"),
    Row(name="read", text="sequential read past the page cache: dd", must=1.1, stretch=1.05, source="read"),
    Row(name="metadata", text="small files: plain open, rename, read, unlink", must=1.1, stretch=1.05),
    *(
        Row(name=f"{operation}-{size}", text=f"{operation} of {size} bytes, 2 ranks: bare gloo loop", must=1.1,
            stretch=1.05, source=(operation, size))
        for operation in ("all-reduce", "point-to-point") for size in MESSAGES
    ),
)  # fmt: skip
_RANK, _SLICE = "--rank", 0.1


def measure(rows: Sequence[Row], chosen: argparse.Namespace) -> Iterator[tuple[Row, Result]]:
    """Yield the results of the selected rows."""
    collectives: dict[str, list[tuple[float, float]]] = {}
    if any(isinstance(row.source, tuple) for row in rows):
        collectives = _measure_collectives(chosen.rounds)
    for row in rows:
        if isinstance(row.source, tuple):
            pairs = collectives[json.dumps(row.source)]
        else:
            with scratch_folder(chosen.folder) as folder:
                pairs = [_turn(row.name, folder, index) for index in range(chosen.rounds)]
        ours, theirs = (median(pair[side] for pair in pairs) for side in (0, 1))
        ratio = max(ours, theirs) / min(ours, theirs)
        yield row, Result(
            values=[ratio] * len(pairs),
            measured={"probe": ours, "independent": theirs}, measured_unit="/s",
        )  # fmt: skip


def _turn(name: str, folder: Path, index: int) -> tuple[float, float]:
    """Return our rate and the independent one; every second round in the opposite order."""
    file = folder / "data"
    if name != "metadata" and not file.exists():
        write_rate(folder, FILE_BYTES)
    sides: dict[str, tuple[Callable[[], float], Callable[[], float]]] = {
        "write": (lambda: write_rate(folder, FILE_BYTES), lambda: _median_of_three(lambda: _dd_write(folder))),
        "read": (lambda: read_rate([file], FILE_BYTES)[0], lambda: _median_of_three(lambda: _dd_read(file))),
        "metadata": (lambda: metadata_rate(folder, 200), lambda: _median_of_three(lambda: _plain_files(folder, 200))),
    }
    first, second = sides[name] if index % 2 == 0 else sides[name][::-1]
    found = (first(), second())
    return found if index % 2 == 0 else found[::-1]


def _median_of_three(rate: Callable[[], float]) -> float:
    return sorted(rate() for _ in range(3))[1]


def _dd(*words: str) -> float:
    """Return dd's own bytes per second."""
    done = subprocess.run(["dd", "bs=4M", *words], capture_output=True, text=True, check=True, env={"LC_ALL": "C"})
    line = done.stderr.splitlines()[-1]  # "268435456 bytes (268 MB, 256 MiB) copied, 0.2 s, 1.3 GB/s"
    return float(line.split()[0]) / float(line.partition("copied, ")[2].split()[0])


def _dd_write(folder: Path) -> float:
    """Return dd's bytes per second without the time that it takes to read its source, random bytes in memory."""
    (folder / "dd").unlink(missing_ok=True)
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as source:
        source.write(os.urandom(FILE_BYTES))
        source.flush()
        reading = _dd(f"if={source.name}", "of=/dev/null")
        both = _dd(f"if={source.name}", f"of={folder / 'dd'}", "conv=fsync")
    return 1 / (1 / both - 1 / reading)


def _dd_read(file: Path) -> float:
    _dd(f"if={file}", "of=/dev/null", "iflag=nocache", "count=0")  # drops the file's pages
    return _dd(f"if={file}", "of=/dev/null")


def _plain_files(folder: Path, count: int) -> float:
    began = time.perf_counter()
    for index in range(count):
        path = os.path.join(folder, f"c{index}")
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY)
        os.write(descriptor, b"probe")
        os.close(descriptor)
        os.rename(path, path + "x")
        descriptor = os.open(path + "x", os.O_RDONLY)
        os.read(descriptor, 16)
        os.close(descriptor)
    for index in range(count):
        os.unlink(os.path.join(folder, f"c{index}x"))
    return count / (time.perf_counter() - began)


def _measure_collectives(rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Run two ranks, and return pairs of operations per second, ours first, keyed by operation and size."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen([sys.executable, "-m", "benchmarks.probe", _RANK, str(rank), folder, str(rounds)])
            for rank in range(2)
        ]
        assert [rank.wait() for rank in ranks] == [0, 0]
        found: dict[str, list[tuple[float, float]]] = json.loads((Path(folder) / "pairs.json").read_text())
        return found


def _rank(rank: int, folder: Path, rounds: int) -> None:
    import torch
    import torch.distributed as dist

    from trainer.worker.probe.collectives import measure_collectives

    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        rates = measure_collectives("world", dist.group.WORLD, MESSAGES, _SLICE, torch.device("cpu"))
        for rate in (one for one in rates if one.operation in ("all-reduce", "point-to-point")):
            bare = _bare_loop(rate.operation, torch.ones(rate.bytes // 4), rank)
            key = json.dumps((rate.operation, rate.bytes))
            found.setdefault(key, []).append((1 / rate.seconds, 1 / bare))
    if rank == 0:
        (folder / "pairs.json").write_text(json.dumps(found))
    dist.barrier()


def _bare_loop(operation: str, message: "torch.Tensor", rank: int) -> float:  # type: ignore[name-defined]  # noqa: F821
    """Return the seconds of one operation, as the time of a whole loop divided by its length."""
    import torch.distributed as dist

    count = max(5, int(_SLICE / (2e-4 + message.numel() * 4 / 4e8)))
    dist.barrier()
    began = time.perf_counter()
    for _ in range(count):
        if operation == "all-reduce":
            dist.all_reduce(message)
        elif rank == 0:
            dist.send(message, 1)
            dist.recv(message, 1)
        else:
            dist.recv(message, 0)
            dist.send(message, 0)
    return (time.perf_counter() - began) / count / (1 if operation == "all-reduce" else 2)


if __name__ == "__main__":
    if sys.argv[1:2] == [_RANK]:
        _rank(int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]))
    else:
        sys.exit(run_table("probe", __doc__, ROWS, measure))
