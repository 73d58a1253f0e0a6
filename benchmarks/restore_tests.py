"""Times of a restore test: to the first step (RTO), to restore, to verify; and its cost for a concurrent run.

    python -m benchmarks.restore_tests [--sizes tiny,small,large] [--rounds N] [--windows 5] [--folder DIR] [--json]

Each size is trained on two ranks of this machine and saved. Its checkpoint is tested on the same two ranks, on one and
on four, in turn with raw reads of the same files, cold and warm. Then a run's steps are timed alone, beside a test, and
beside busy processes. It takes about ten minutes. Run it on an otherwise idle machine; on others, ratios are more
reliable than times. Exit code 1 if a row fails.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.checkpoint_sides import BLOCK, CORES, drop, raw_read, room, warm
from benchmarks.runner import NotInTimeError
from benchmarks.submitted_run import BenchmarkRun
from checkpointing.tiers.catalog import Catalog
from orchestrator.cli.terminal.render import size as size_words
from trainer.protocol.events import read_events
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
STEPS, SAVED = 6, 3
TRAIN_SECONDS, TEST_SECONDS = 600.0, 300.0


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


def measure_size(size: Size, rounds: int, folder: Path) -> list[dict[str, Any]]:
    """Return one row for each layout; raises RuntimeError for a test that does not restore the checkpoint.

    The files are dropped from the page cache before every test. Verification reads them first, and the restore uses
    what that leaves in the cache.
    """
    settings = (*ON_TWO_RANKS, f"train.steps={STEPS}", f"checkpoint.every={SAVED}", *size.settings)
    with BenchmarkRun(folder, "local", "tiny-gpt", *settings) as job:
        job.orch("wait", job.name, seconds=TRAIN_SECONDS)
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
                tests[layout].append(run_test(job, layout, SAVED)["evidence"])
        times = step_times(job)
        step = statistics.median(after - before for before, after in itertools.pairwise(times))
    return [make_row(size, layout, found, raw, nbytes, step) for layout, found in tests.items()]


def saved_files(job: BenchmarkRun) -> list[Path]:
    """Return the files of the tested checkpoint."""
    catalog = Catalog(RunDir(job.path("")).checkpoints)
    entry = next(entry for entry in catalog.committed_entries() if entry.step == SAVED)
    return [file for file in entry.path.iterdir() if file.is_file()]


def run_test(job: BenchmarkRun, layout: str, step: int) -> dict[str, Any]:
    """Run one test and return it with its evidence; raises RuntimeError unless the checkpoint was restored."""
    words = ("ckpt", "restore-test", f"{job.name}@{step}", "--layout", layout, "--wait", "--json")
    (test,) = json.loads(job.orch(*words, seconds=TEST_SECONDS))["data"]
    if test["verdict"] != Outcome.RESTORED:
        raise RuntimeError(f"{test['test']} on {layout}: {test['verdict']}, {test['reason']}")
    return dict(test)


def step_times(job: BenchmarkRun) -> list[float]:
    """Return the times of steps of rank 0."""
    lines = work_lines(RunDir(job.path("")).all_attempts()[-1])
    return [float(line["time"]) for line in lines if line["rank"] == 0]


def make_row(
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
            f"{row['size']}, {size_words(row['bytes'])}", f"{row['layout']} ({ranks})", _seconds(row["rto_s"]),
            _seconds(row["restore_s"]), f"{size_words(row['restore_bytes_per_s'])}/s", _seconds(row["read_cold_s"]),
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


def _seconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"


SAVED_BESIDE = 10
Window = tuple[float, float]


def length(window: Window) -> float:
    return window[1] - window[0]


def measure_beside(windows: int, folder: Path) -> dict[str, Any]:
    """Return medians of step times in `windows` windows of each kind, in turn: alone, beside a test, beside the load.

    A test's window is its job, from the first event to the last. The load has as many processes as the test has ranks,
    at the same nice value, for as long as the previous test. The ratio is the median over pairs.
    """
    # One early save; the run outlasts the measurement.
    settings = (*ON_TWO_RANKS, "train.steps=100000", f"checkpoint.every={SAVED_BESIDE}", "checkpoint.keep=100000")
    with BenchmarkRun(folder, "local", "tiny-gpt", *settings) as job:
        job.wait_for_step(SAVED_BESIDE + 3, TEST_SECONDS)
        seconds = length(_test_window(job))  # warm-up for the file system's caches; not counted
        found: dict[str, list[float]] = {"alone": [], "test": [], "load": []}
        for number in range(windows):
            for kind in ("alone", "test", "load") if number % 2 == 0 else ("load", "test", "alone"):
                window = _test_window(job) if kind == "test" else _window(RANKS if kind == "load" else 0, seconds)
                seconds = length(window)
                found[kind].append(_step_seconds(job, window))
    return {
        "windows": windows, "seconds": seconds, "processes": RANKS,
        **{f"{kind}_s": statistics.median(values) for kind, values in found.items()},
        "test_of_load": _ratio(found["test"], found["load"]), "test_of_alone": _ratio(found["test"], found["alone"]),
        "all": found,
    }  # fmt: skip


def _ratio(these: list[float], those: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(these, those, strict=True))


def _test_window(job: BenchmarkRun) -> Window:
    test = run_test(job, "same", SAVED_BESIDE)
    attempt = RunDir(job.path("").parent / str(test["test"])).all_attempts()[-1]
    times = [event.time for path in attempt.events.glob("*.jsonl") for event in read_events(path)[0]]
    return min(times), max(times)


def _window(processes: int, seconds: float) -> Window:
    """Wait with this many busy processes; return the window."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    began = time.time()
    try:
        time.sleep(seconds)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return began, began + seconds


def _step_seconds(job: BenchmarkRun, window: Window) -> float:
    """Return the mean step time of rank 0 within the window."""
    times = [time for time in step_times(job) if window[0] <= time <= window[1]]
    return (times[-1] - times[0]) / (len(times) - 1)


FAILURES = (NotInTimeError, RuntimeError, OSError, LookupError, ValueError, subprocess.SubprocessError)
BESIDE = "beside"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join([*(size.name for size in SIZES), BESIDE]))
    parser.add_argument("--rounds", type=int, default=0, help="tests per row; 0: 5, or 3 for the large size")
    parser.add_argument("--windows", type=int, default=5, help="windows of step times of each kind")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder for the runs")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report: dict[str, Any] = machine() | {"rows": []}
    stream = sys.stderr if options.json else sys.stdout
    print(head(report), file=stream, flush=True)
    chosen = options.sizes.split(",")
    for size in (size for size in SIZES if size.name in chosen):
        rounds = options.rounds or size.rounds
        found = in_folder(options.folder, partial(measure_size, size, rounds))
        for row in [found | {"size": size.name}] if isinstance(found, dict) else found:
            report["rows"].append(row)
            print(line(row), file=stream, flush=True)
    if BESIDE in chosen:
        report[BESIDE] = in_folder(options.folder, partial(measure_beside, options.windows))
        print(format_beside(report[BESIDE]), file=stream, flush=True)
    if options.json:
        print(json.dumps(report))
    return int(any("error" in row for row in (*report["rows"], report.get(BESIDE, {}))))


def in_folder(at: Path, measure: Callable[[Path], Any]) -> Any:
    """Measure in a temporary folder; return {"error": reason} if that fails."""
    with tempfile.TemporaryDirectory(dir=at, prefix="bench-restore-", ignore_cleanup_errors=True) as folder:
        try:
            return measure(Path(folder))
        except FAILURES as error:
            return {"error": f"{type(error).__name__}: {error}"}


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    return {
        "benchmark": "restore_tests", "cores": len(os.sched_getaffinity(0)), "cpu": cpu, "torch": version("torch"),
        "python": platform.python_version(), "load": os.getloadavg()[0],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
