"""Times of a restore test (to the first step, to restore, to verify), and its cost for a concurrent run.

    python -m benchmarks.restore_tests [--rows tiny-*,beside,...] [--rounds 5] [--folder DIR] [--json] [--list]

Each size is trained on two ranks of this machine and saved. Its checkpoint is tested on the same two ranks, on one and
on four, alternating with raw reads of the same files, cold and warm. The figure is the RTO: from the start of the job
to the first step, without verifying. The files are dropped from the page cache before each test; verification reads
them first, and the restore uses what that leaves in the cache.

The row `beside` compares a run's step time during a test with its step time next to equally many busy processes of the
same nice value. All rows take about ten minutes. Run it on an otherwise idle machine; elsewhere, ratios are
more reliable than times. The exit code is 1 if a row fails.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.checkpoint_sides import BLOCK, CORES, drop, raw_read, room, warm
from benchmarks.runner import Result, Row, run_table
from benchmarks.submitted_run import FAILURES, BenchmarkRun
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
STEPS, SAVED, SAVED_BESIDE = 6, 3, 10
TRAIN_SECONDS, TEST_SECONDS = 600.0, 300.0
BESIDE = "beside"
Window = tuple[float, float]


def _llama(dim: int, layers: int, ffn_dim: int) -> tuple[str, ...]:
    shape = (f"model.dim={dim}", f"model.layers={layers}", "model.heads=8", "model.kv_heads=4")
    return (*shape, f"model.ffn_dim={ffn_dim}", "train.batch_size=4", "train.seq_len=64", "optimizer.warmup_steps=2")


SIZES: dict[str, tuple[str, ...]] = {"tiny": (), "small": _llama(512, 3, 1408), "large": _llama(1024, 7, 2816)}
"""Settings of each model; its checkpoint holds parameters and two moments."""
ROWS = (
    *(
        Row(name=f"{size}-{layout}", text=f"RTO of {size}, layout {layout}", unit="s", source=(size, layout))
        for size in SIZES
        for layout in LAYOUTS
    ),
    Row(name=BESIDE, text="step beside a restore test / beside busy processes", source=(BESIDE, "")),
)


def measure(rows: Sequence[Row], options: argparse.Namespace) -> Iterator[tuple[Row, Result]]:
    """Measure each size once for all of its rows."""
    for size in dict.fromkeys(row.source[0] for row in rows):
        chosen = {row.source[1]: row for row in rows if row.source[0] == size}
        with tempfile.TemporaryDirectory(
            dir=options.folder, prefix="bench-restore-", ignore_cleanup_errors=True
        ) as folder:
            try:
                if size == BESIDE:
                    found = {"": _measure_beside(options.rounds, Path(folder))}
                else:
                    found = _measure_size(SIZES[size], list(chosen), options.rounds, Path(folder))
            except FAILURES as error:
                found = dict.fromkeys(chosen, Result(values=(), problems=[f"{type(error).__name__}: {error}"]))
        for layout, row in chosen.items():
            yield row, found[layout]


def _measure_size(settings: tuple[str, ...], layouts: Sequence[str], rounds: int, folder: Path) -> dict[str, Result]:
    """Return the result of each layout. Raises RuntimeError for a test that does not restore the checkpoint."""
    settings = (*ON_TWO_RANKS, f"train.steps={STEPS}", f"checkpoint.every={SAVED}", *settings)
    with BenchmarkRun(folder, "local", "tiny-gpt", *settings) as job:
        job.orch("wait", job.name, seconds=TRAIN_SECONDS)
        committed = Catalog(RunDir(job.path("")).checkpoints).committed_entries()
        place = next(entry.path for entry in committed if entry.step == SAVED)
        files = [file for file in place.iterdir() if file.is_file()]
        nbytes = sum(file.stat().st_size for file in files)
        target = room(min(nbytes, 8 * BLOCK) // BLOCK * BLOCK or BLOCK)
        cold, warmed = [], []
        tests: dict[str, list[dict[str, Any]]] = {layout: [] for layout in layouts}
        for number in range(rounds):
            for layout in layouts if number % 2 == 0 else reversed(layouts):
                cold.append(raw_read(files, target, threads=CORES, cold=True))
                warm(files)
                warmed.append(raw_read(files, target, threads=CORES, cold=False))
                drop(files)
                tests[layout].append(_run_test(job, layout, SAVED)["evidence"])
        step = statistics.median(after - before for before, after in itertools.pairwise(_step_times(job)))
    reads = {"raw cold": statistics.median(cold), "raw warm": statistics.median(warmed), "step": step}
    return {layout: _summarize(found, reads, nbytes) for layout, found in tests.items()}


def _summarize(tests: list[dict[str, Any]], reads: dict[str, float], nbytes: int) -> Result:
    keys = {"restore": "restore_seconds", "verify": "verify_seconds", "job": "seconds"}
    medians = {name: statistics.median(float(test[key]) for test in tests) for name, key in keys.items()}
    ranks = int(tests[0]["ranks"])
    share = ranks * medians["job"] / (RANKS * DAY)
    rate = size_words(statistics.median(float(test["bytes_per_second"]) for test in tests))
    note = (
        f"{size_words(nbytes)} restored at {rate}/s; restore / raw cold {medians['restore'] / reads['raw cold']:.1f}; "
        f"one test uses {share:.3%} of the rank-seconds of a day on {RANKS} ranks"
    )
    return Result(values=[test["rto_seconds"] for test in tests], measured=medians | reads, notes=[note])


def _run_test(job: BenchmarkRun, layout: str, step: int) -> dict[str, Any]:
    """Run one test and return it with its evidence. Raises RuntimeError unless the checkpoint was restored."""
    words = ("ckpt", "restore-test", f"{job.name}@{step}", "--layout", layout, "--wait", "--json")
    (test,) = json.loads(job.orch(*words, seconds=TEST_SECONDS))["data"]
    if test["verdict"] != Outcome.RESTORED:
        raise RuntimeError(f"{test['test']} on {layout}: {test['verdict']}, {test['reason']}")
    return dict(test)


def _step_times(job: BenchmarkRun) -> list[float]:
    """Return the times at which rank 0 finished its steps."""
    lines = work_lines(RunDir(job.path("")).all_attempts()[-1])
    return [float(line["time"]) for line in lines if line["rank"] == 0]


def _measure_beside(windows: int, folder: Path) -> Result:
    """Measure step times in `windows` windows of each kind, in turn: alone, during a test, and under load.

    A test's window is its job, from the first event to the last. The load has as many processes as the test has ranks,
    and lasts as long as the previous test.
    """
    # One early save; the run outlasts the measurement.
    settings = (*ON_TWO_RANKS, "train.steps=100000", f"checkpoint.every={SAVED_BESIDE}", "checkpoint.keep=100000")
    with BenchmarkRun(folder, "local", "tiny-gpt", *settings) as job:
        job.wait_for_step(SAVED_BESIDE + 3, TEST_SECONDS)
        first = _test_window(job)  # warm-up for the file system's caches; not counted
        seconds = first[1] - first[0]
        found: dict[str, list[float]] = {"alone": [], "test": [], "load": []}
        for number in range(windows):
            for kind in found if number % 2 == 0 else reversed(found):
                window = _test_window(job) if kind == "test" else _window(RANKS if kind == "load" else 0, seconds)
                seconds = window[1] - window[0]
                times = [time for time in _step_times(job) if window[0] <= time <= window[1]]
                found[kind].append((times[-1] - times[0]) / (len(times) - 1))
    ratios = [test / load for test, load in zip(found["test"], found["load"], strict=True)]
    return Result(values=ratios, measured={kind: statistics.median(values) for kind, values in found.items()})


def _test_window(job: BenchmarkRun) -> Window:
    test = _run_test(job, "same", SAVED_BESIDE)
    attempt = RunDir(job.path("").parent / str(test["test"])).all_attempts()[-1]
    times = [event.time for path in attempt.events.glob("*.jsonl") for event in read_events(path)[0]]
    return min(times), max(times)


def _window(processes: int, seconds: float) -> Window:
    """Keep this many processes busy for this many seconds, and return the window."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    began = time.time()
    try:
        time.sleep(seconds)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return began, began + seconds


if __name__ == "__main__":
    sys.exit(run_table("restore_tests", __doc__, ROWS, measure, rounds=5))
