"""Restore tests of one checkpoint on several layouts, in turn with raw reads of the same files, and their table."""

import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoint_sides import BLOCK, CORES, drop, raw_read, room, warm
from benchmarks.submitted_run import BenchmarkRun
from checkpointing.tiers.catalog import Catalog
from trainer.protocol.logs.line_file import work_lines
from trainer.protocol.restore_test import Outcome
from trainer.protocol.run_dir import RunDir

RANKS = 2
LAYOUTS = ("same", "1", "4")
DAY = 86400.0
ON_TWO_RANKS = (
    "cluster.nodes=1", f"cluster.ranks_per_node={RANKS}", "parallel.tp=1", f"parallel.dp_shard={RANKS}",
    "restore_tests.every=off",
)  # fmt: skip
_STEPS, _SAVED = 6, 3
_TRAIN_SECONDS, _TEST_SECONDS = 600.0, 300.0


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model to train and save; its checkpoint holds parameters and two moments."""

    name: str
    settings: tuple[str, ...]
    rounds: int


def _llama(dim: int, layers: int, ffn_dim: int) -> tuple[str, ...]:
    shape = (f"model.dim={dim}", f"model.layers={layers}", "model.heads=8", "model.kv_heads=4")
    return (*shape, f"model.ffn_dim={ffn_dim}", "train.batch_size=4", "train.seq_len=64", "optimizer.warmup_steps=2")


SIZES = (
    Size(name="tiny", settings=(), rounds=5),
    Size(name="small", settings=_llama(512, 3, 1408), rounds=5),
    Size(name="large", settings=_llama(1024, 7, 2816), rounds=3),
)


def measure(size: Size, folder: Path, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield one row for each layout; raises RuntimeError for a test that does not restore the checkpoint.

    The files are dropped from the page cache before every test. Verification reads them first, and the restore uses
    what that leaves in the cache.
    """
    settings = (*ON_TWO_RANKS, f"train.steps={_STEPS}", f"checkpoint.every={_SAVED}", *size.settings)
    with BenchmarkRun(folder, "local", "tiny-gpt", *settings) as job:
        job.orch("wait", job.name, seconds=_TRAIN_SECONDS)
        files = saved_files(job)
        nbytes = sum(file.stat().st_size for file in files)
        target = room(min(nbytes, 8 * BLOCK) // BLOCK * BLOCK or BLOCK)
        raw: dict[bool, list[float]] = {True: [], False: []}
        tests: dict[str, list[dict[str, Any]]] = {layout: [] for layout in LAYOUTS}
        for number in range(rounds):
            for layout in LAYOUTS if number % 2 == 0 else reversed(LAYOUTS):
                raw[True].append(raw_read(files, target, threads=CORES, cold=True))
                warm(files)
                raw[False].append(raw_read(files, target, threads=CORES, cold=False))
                drop(files)
                tests[layout].append(run_test(job, layout, _SAVED)["evidence"])
        step = statistics.median(step_seconds(job))
    for layout, found in tests.items():
        yield row(size, layout, found, raw, nbytes, step)


def saved_files(job: BenchmarkRun) -> list[Path]:
    """Return the files of the tested checkpoint."""
    catalog = Catalog(RunDir(job.path("")).checkpoints)
    entry = next(entry for entry in catalog.committed_entries() if entry.step == _SAVED)
    return [file for file in entry.path.iterdir() if file.is_file()]


def run_test(job: BenchmarkRun, layout: str, step: int) -> dict[str, Any]:
    """Run one test and return it with its evidence; raises RuntimeError unless the checkpoint was restored."""
    words = ("ckpt", "restore-test", f"{job.name}@{step}", "--layout", layout, "--wait", "--json")
    (test,) = json.loads(job.orch(*words, seconds=_TEST_SECONDS))["data"]
    if test["verdict"] != Outcome.RESTORED:
        raise RuntimeError(f"{test['test']} on {layout}: {test['verdict']}, {test['reason']}")
    return dict(test)


def step_seconds(job: BenchmarkRun) -> list[float]:
    """Return the seconds between steps of rank 0."""
    lines = [line for line in work_lines(RunDir(job.path("")).all_attempts()[-1]) if line["rank"] == 0]
    times = [float(line["time"]) for line in lines]
    return [after - before for before, after in zip(times, times[1:], strict=False)]


def row(
    size: Size, layout: str, tests: list[dict[str, Any]], raw: dict[bool, list[float]], nbytes: int, step: float
) -> dict[str, Any]:
    """Return medians of one layout; `share` is of a one-day run on RANKS ranks, computed instead of run."""

    def median(key: str) -> float:
        return statistics.median(float(test[key]) for test in tests)

    restore, cold = median("restore_seconds"), statistics.median(raw[True])
    ranks = int(tests[0]["ranks"])
    return {
        "size": size.name, "layout": layout, "ranks": ranks, "bytes": nbytes, "rounds": len(tests),
        "rto_s": median("rto_seconds"), "restore_s": restore, "restore_bytes_per_s": median("bytes_per_second"),
        "read_cold_s": cold, "read_warm_s": statistics.median(raw[False]), "reads": len(raw[True]),
        "restore_of_cold_read": restore / cold, "verify_s": median("verify_seconds"), "job_s": median("seconds"),
        "step_s": step, "share": ranks * median("seconds") / (RANKS * DAY),
        "rto_all": [test["rto_seconds"] for test in tests],
    }  # fmt: skip


_HEAD = (
    "state", "layout", "RTO", "restore", "rate", "raw cold", "raw warm", "/ cold", "verify", "job", "of a day", "n",
)  # fmt: skip
_WIDTHS = (17, 14, 8, 8, 11, 8, 8, 6, 8, 7, 8, 2)


def head(report: dict[str, Any]) -> str:
    """Return the machine and the column names."""
    machine = (
        f"{report['cores']} cores ({report['cpu']}), torch {report['torch']}, Python {report['python']}, load before "
        f"{report['load']:.2f}; runs of 2 ranks on CPUs\n"
        "medians of n tests, layouts in turn; files out of the page cache before each test; raw: the same files, read "
        "by one thread per core\n"
        "RTO: start of the job to the first step, without verifying; of a day: rank-seconds of one test as a share of "
        "those of a run of a day on 2 ranks, computed"
    )
    return "\n".join([machine, "", align_cells(_HEAD), align_cells(tuple("-" * width for width in _WIDTHS))])


def line(row: dict[str, Any]) -> str:
    """Return one size on one layout."""
    if "error" in row:
        return f"{row['size']}: FAILED: {row['error']}"
    ranks = f"{row['ranks']} rank{'s' if row['ranks'] > 1 else ''}"
    return align_cells(
        (
            f"{row['size']}, {_size(row['bytes'])}", f"{row['layout']} ({ranks})", _seconds(row["rto_s"]),
            _seconds(row["restore_s"]), f"{_size(row['restore_bytes_per_s'])}/s", _seconds(row["read_cold_s"]),
            _seconds(row["read_warm_s"]), f"{row['restore_of_cold_read']:.1f}", _seconds(row["verify_s"]),
            _seconds(row["job_s"]), f"{row['share']:.3%}", str(row["rounds"]),
        )
    )  # fmt: skip


def format_beside(row: dict[str, Any]) -> str:
    """Return the step times of a run alone and beside others."""
    if "error" in row:
        return f"step times beside a test: FAILED: {row['error']}"
    return (
        f"\nstep of a run of 2 ranks: alone {_seconds(row['alone_s'])}, beside a restore test on 2 ranks "
        f"{_seconds(row['test_s'])} ({row['test_of_alone']:.2f} x), beside 2 busy processes of the same nice value "
        f"{_seconds(row['load_s'])}; test / load {row['test_of_load']:.2f}; {row['windows']} windows each, in turn"
    )


def align_cells(cells: tuple[str, ...]) -> str:
    padded = [cell.rjust(width) for cell, width in zip(cells[2:], _WIDTHS[2:], strict=True)]
    return "  ".join([cells[0].ljust(_WIDTHS[0]), cells[1].ljust(_WIDTHS[1]), *padded]).rstrip()


def _size(nbytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
