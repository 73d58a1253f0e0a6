"""Cost of a restore test for a run on the same cores: step times beside it, and beside busy processes."""

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.restore_tests.sizes import ON_TWO_RANKS, run_test
from benchmarks.submitted_run import BenchmarkRun
from trainer.protocol.events import read_events
from trainer.protocol.logs.line_file import work_lines
from trainer.protocol.run_dir import RunDir

_SAVED, _PATIENCE = 10, 300.0
# One early save; the run outlasts the measurement.
_SETTINGS = (*ON_TWO_RANKS, "train.steps=100000", f"checkpoint.every={_SAVED}", "checkpoint.keep=100000")
_BUSY = "while True: pass"
_RANKS = 2
Window = tuple[float, float]


def measure(folder: Path, windows: int) -> dict[str, Any]:
    """Return medians of step times in `windows` windows of each kind, in turn: alone, beside a test, beside the load.

    A test's window is its job, from the first event to the last. The load has as many processes as the test has ranks,
    at the same nice value, for as long as the previous test. The ratio is the median over pairs.
    """
    with BenchmarkRun(folder, "local", "tiny-gpt", *_SETTINGS) as job:
        job.wait_for_step(_SAVED + 3, _PATIENCE)
        seconds = _length(_test_window(job))  # warm-up for the file system's caches; not counted
        found: dict[str, list[float]] = {"alone": [], "test": [], "load": []}
        for number in range(windows):
            for kind in ("alone", "test", "load") if number % 2 == 0 else ("load", "test", "alone"):
                window = _test_window(job) if kind == "test" else _window(_RANKS if kind == "load" else 0, seconds)
                seconds = _length(window)
                found[kind].append(_step_seconds(job, window))
    return {
        "windows": windows, "seconds": seconds, "processes": _RANKS,
        **{f"{kind}_s": statistics.median(values) for kind, values in found.items()},
        "test_of_load": _ratio(found["test"], found["load"]), "test_of_alone": _ratio(found["test"], found["alone"]),
        "all": found,
    }  # fmt: skip


def _ratio(these: list[float], those: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(these, those, strict=True))


def _length(window: Window) -> float:
    return window[1] - window[0]


def _test_window(job: BenchmarkRun) -> Window:
    test = run_test(job, "same", _SAVED)
    attempt = RunDir(job.path("").parent / str(test["test"])).all_attempts()[-1]
    times = [event.time for path in attempt.events.glob("*.jsonl") for event in read_events(path)[0]]
    return min(times), max(times)


def _window(processes: int, seconds: float) -> Window:
    """Wait with this many busy processes; return the window."""
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(processes)]
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
    lines = [line for line in work_lines(RunDir(job.path("")).all_attempts()[-1]) if line["rank"] == 0]
    times = [float(line["time"]) for line in lines if window[0] <= line["time"] <= window[1]]
    return (times[-1] - times[0]) / (len(times) - 1)
