"""The checkpoint engine compared with the hardware's limit and with torch's checkpoints.

    python -m benchmarks.checkpoint [--rows PATTERN,...] [--quick] [--rounds 7] [--folder DIR] [--json] [--list]

Every row runs in its own process, with its sides interleaved, and is compared with a limit measured in the same
process: memcpy, raw reads, raw writes. Other programs compared are torch's distributed checkpoints in their best
configuration and torch.save. State sets: BIG (64 x 4 MiB) and SMALL (4000 x 64 KiB). Run it on an otherwise idle
machine; other numbers are meaningless. Exit code 1 if a row misses its must or fails.
"""

import argparse
import fnmatch
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.checkpoint import table
from benchmarks.checkpoint.reasons import REASONS, UNKNOWN
from benchmarks.checkpoint.rows import MISSED, ROWS, Measured, Row

_ROW_S = 1800
_QUICK_ROUNDS, _QUICK_SCALE = 3, 0.125


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="*", help="names or patterns of rows, with commas between them")
    parser.add_argument("--quick", action="store_true", help="an eighth of the state, 3 rounds: whether it runs at all")
    parser.add_argument("--rounds", type=int, default=9, help="at least 7")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the checkpoints go")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--list", action="store_true", help="the names of the rows")
    options = parser.parse_args()
    rows = [row for row in ROWS if any(fnmatch.fnmatch(row.name, part) for part in options.rows.split(","))]
    if options.list or not rows:
        print("\n".join(row.name for row in ROWS))
        return 0 if options.list else 2
    rounds, scale = (_QUICK_ROUNDS, _QUICK_SCALE) if options.quick else (max(7, options.rounds), 1.0)
    report = _machine(options.folder) | {"rounds": rounds, "scale": scale, "rows": []}
    said = sys.stderr if options.json else sys.stdout
    print(table.head(report), file=said, flush=True)
    for row in rows:
        report["rows"].append(_measure_row(row, options.folder, rounds, scale))
        print(table.line(report["rows"][-1]), file=said, flush=True)
    print(table.notes(report), file=said)
    if options.json:
        print(json.dumps(report))
    return int(any("error" in row or row["verdict"] == MISSED for row in report["rows"]))


def _measure_row(row: Row, at: Path, rounds: int, scale: float) -> dict[str, Any]:
    """Run one row in a new process; return its result, or the reason for its failure."""
    bounds = {"must": row.must, "stretch": row.stretch, "at_most": row.at_most}
    fixed = {"row": row.name, "text": row.text, "limit_is": row.limit, **bounds}
    with tempfile.TemporaryDirectory(dir=at, prefix="bench-checkpoint-") as folder:
        words = [
            sys.executable,
            "-m",
            "benchmarks.checkpoint.row_process",
            "--row",
            row.name,
            folder,
            str(rounds),
            str(scale),
        ]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_ROW_S)
        except subprocess.TimeoutExpired:
            return {**fixed, "error": f"took longer than {_ROW_S} s"}
    if done.returncode:
        return {**fixed, "error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    told = json.loads(done.stdout.splitlines()[-1])
    return {**fixed, **told, **_judge_row(row, Measured(**told))}


def _judge_row(row: Row, measured: Measured) -> dict[str, Any]:
    ratios = {name: row.ratio(value, measured.limit) for name, value in measured.peers.items()}
    best = (min if row.at_most else max)(ratios, key=ratios.__getitem__, default=None)
    verdict = row.verdict(measured)
    return {
        "ratio": row.ratio(measured.ours, measured.limit),
        "verdict": verdict,
        "reason": REASONS.get(row.name, UNKNOWN) if verdict == MISSED else "",
        "other_ratios": ratios,
        "best_other": None if best is None else {"name": best, "ratio": ratios[best]},
    }


def _machine(folder: Path) -> dict[str, Any]:
    return {
        "benchmark": "checkpoint", "cores": len(os.sched_getaffinity(0)), "cpu": _cpu(),
        "file_system": _file_system(folder), "torch": version("torch"), "python": platform.python_version(),
        "load": os.getloadavg()[0],
    }  # fmt: skip


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def _file_system(folder: Path) -> str:
    """Return the type of the file system that contains `folder`."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    inside = [mount for mount in mounts if folder.resolve().is_relative_to(mount[1])]
    return max(inside, key=lambda mount: len(mount[1]))[2]


if __name__ == "__main__":
    sys.exit(main())
