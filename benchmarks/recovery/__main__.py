"""How soon faults are noticed, named and mended, with torchrun on the same faults, and what watching costs.

    python -m benchmarks.recovery [--rows PATTERN,...] [--rounds 7] [--slurm] [--folder DIR] [--json] [--list]

Runs are submitted as a user submits them, hit from outside, and timed by what agents and ranks wrote down. In every
round each side is hit once, in turn. torchrun is two processes on this machine, its script ordinary DDP; the same
script is run by us as well. "never" is a fault that was not mended within a minute. Numbers from a machine on which
something else runs are worth nothing. Exit code 1 when a row misses its must or fails.
"""

import argparse
import fnmatch
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.recovery import table
from benchmarks.recovery.faults import FAULTS, ONCE, OURS
from benchmarks.recovery.reasons import REASONS, UNKNOWN
from benchmarks.recovery.rows import MISSED, ROWS, Row
from benchmarks.recovery.watching import NotInTimeError

Rounds = dict[str, list[dict[str, float]]]
_LEAST_ROUNDS = 7


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="*", help="names or patterns of rows, with commas between them")
    parser.add_argument("--rounds", type=int, default=_LEAST_ROUNDS, help="at least 7 for figures worth keeping")
    parser.add_argument("--slurm", action="store_true", help="runs on the Slurm that this machine reaches")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the runs go")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--list", action="store_true", help="the names of the rows")
    options = parser.parse_args()
    # So that blocks are left, and with them all that was started, when somebody ends this early.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    rows = [row for row in ROWS if any(fnmatch.fnmatch(row.name, part) for part in options.rows.split(","))]
    if options.list or not rows:
        print("\n".join(row.name for row in ROWS))
        return 0 if options.list else 2
    cluster = "slurm" if options.slurm else "local"
    report = {
        "benchmark": "recovery", "cluster": cluster, "cores": len(os.sched_getaffinity(0)),
        "torch": version("torch"), "python": platform.python_version(), "load": os.getloadavg()[0],
        "rounds": options.rounds, "rows": [],
    }  # fmt: skip
    said = sys.stderr if options.json else sys.stdout
    print(table.head(report), file=said, flush=True)
    for fault in dict.fromkeys(row.fault for row in rows):
        rounds, error = measured(fault, options.rounds, options.folder, cluster)
        for row in rows:
            if row.fault == fault:
                report["rows"].append(judged(row, rounds, error))
                print(table.line(report["rows"][-1]), file=said, flush=True)
    print(table.notes(report), file=said)
    if options.json:
        print(json.dumps(report))
    return int(any("error" in row or row["verdict"] == MISSED for row in report["rows"]))


def measured(fault: str, rounds: int, at: Path, cluster: str) -> tuple[Rounds, str]:
    """What each side showed in every round; a round of ours that fails is told, and counts as never."""
    found: Rounds = {name: [] for name in FAULTS[fault]}
    error = ""
    for number in range(rounds):
        for name, side in FAULTS[fault].items():
            if number and (fault, name) in ONCE:
                continue
            with tempfile.TemporaryDirectory(dir=at, prefix="bench-recovery-", ignore_cleanup_errors=True) as folder:
                try:
                    found[name].append(dict(side(Path(folder), cluster)))
                except (NotInTimeError, RuntimeError) as problem:
                    found[name].append({})
                    error = error or f"{name}: {problem}"
    return found, error


def judged(row: Row, rounds: Rounds, error: str) -> dict[str, Any]:
    """The row as it is told: medians, our verdict, and the reason when it is missed."""
    fixed = {"row": row.name, "text": row.text, "unit": row.unit, "must": row.must, "stretch": row.stretch}
    values = {name: _figures(told, row.figure) for name, told in rounds.items()}
    if not any(row.figure in one for one in rounds[OURS]):
        return {**fixed, "error": error or "nothing was measured"}
    ours = statistics.median(values[OURS])
    verdict = row.verdict(ours)
    others = {name: statistics.median(found) for name, found in values.items() if name != OURS and found}
    return {
        **fixed, "ours": ours, "verdict": verdict, "rounds": len(values[OURS]), "values": values[OURS],
        "others": others, "reason": REASONS.get(row.name, error or UNKNOWN) if verdict == MISSED else "",
    }  # fmt: skip


def _figures(rounds: list[dict[str, float]], figure: str) -> list[float]:
    """A round in which it was not reached counts as infinite; a side that never has this figure has none."""
    return [one.get(figure, float("inf")) for one in rounds] if any(figure in one for one in rounds) else []


if __name__ == "__main__":
    sys.exit(main())
