"""Times of a restore test: to the first step (RTO), to restore, to verify; and its cost for a concurrent run.

    python -m benchmarks.restore_tests [--sizes tiny,small,large] [--rounds N] [--windows 5] [--folder DIR] [--json]

Each size is trained on two ranks of this machine and saved. Its checkpoint is tested on the same two ranks, on one and
on four, in turn with raw reads of the same files, cold and warm. Then a run's steps are timed alone, beside a test, and
beside busy processes. It takes about ten minutes. Run it on an otherwise idle machine; on others, ratios are more
reliable than times. Exit code 1 if a row fails.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.restore_tests import beside, sizes
from benchmarks.runner import NotInTimeError

_FAILURES = (NotInTimeError, RuntimeError, OSError, LookupError, ValueError, subprocess.SubprocessError)
_BESIDE = "beside"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=",".join([*(size.name for size in sizes.SIZES), _BESIDE]))
    parser.add_argument("--rounds", type=int, default=0, help="tests of each row; 0: 5, of the large size 3")
    parser.add_argument("--windows", type=int, default=5, help="of step times, of each kind")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the runs go")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    report: dict[str, Any] = _machine() | {"rows": []}
    said = sys.stderr if options.json else sys.stdout
    print(sizes.head(report), file=said, flush=True)
    chosen = options.sizes.split(",")
    for size in sizes.SIZES:
        if size.name in chosen:
            for row in _of_a_size(size, options.folder, options.rounds or size.rounds):
                report["rows"].append(row)
                print(sizes.line(row), file=said, flush=True)
    if _BESIDE in chosen:
        report[_BESIDE] = _measure_beside(options.folder, options.windows)
        print(sizes.format_beside(report[_BESIDE]), file=said, flush=True)
    if options.json:
        print(json.dumps(report))
    return int(any("error" in row for row in (*report["rows"], report.get(_BESIDE, {}))))


def _of_a_size(size: sizes.Size, at: Path, rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(dir=at, prefix="bench-restore-", ignore_cleanup_errors=True) as folder:
        try:
            return list(sizes.measure(size, Path(folder), rounds))
        except _FAILURES as error:
            return [{"size": size.name, "error": f"{type(error).__name__}: {error}"}]


def _measure_beside(at: Path, windows: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=at, prefix="bench-restore-", ignore_cleanup_errors=True) as folder:
        try:
            return beside.measure(Path(folder), windows)
        except _FAILURES as error:
            return {"error": f"{type(error).__name__}: {error}"}


def _machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    return {
        "benchmark": "restore_tests", "cores": len(os.sched_getaffinity(0)), "cpu": cpu, "torch": version("torch"),
        "python": platform.python_version(), "load": os.getloadavg()[0],
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
