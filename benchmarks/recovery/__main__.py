"""Time to notice, name and repair faults, compared with torchrun on the same faults, and the cost of monitoring.

    python -m benchmarks.recovery [--rows PATTERN,...] [--rounds 7] [--slurm] [--folder DIR] [--json] [--list]

Runs are submitted as a user submits them, faulted from outside, and timed by the records of agents and ranks. In every
round each side is faulted once, in turn; a SIGSTOP that others cannot detect only once, because they wait forever.
torchrun is two processes on this machine, with an ordinary DDP script; orch also runs the same script. "never" means
not within a minute. For a stopped rank of a script both are expected to give "never": torchrun has no watch for it, and
orch watches the ranks of a command only for their end.

n counts rounds; "4 of 7" means that four of seven gave the figure, and such a row of ours is FAILED, whatever its
median. Run it on an otherwise idle machine; other numbers are meaningless. Exit code 1 if a row misses its must or
fails.
"""

import argparse
import fnmatch
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from benchmarks.recovery.faults import FAULTS, ONCE, OURS
from benchmarks.recovery.polling import NotInTimeError
from benchmarks.recovery.rows import FAILED, MISSED, ROWS, RecoveryRow, head, line, notes

Rounds = dict[str, list[dict[str, float]]]
Problems = dict[str, str]
FAILURES = (NotInTimeError, RuntimeError, OSError, LookupError, ValueError, subprocess.SubprocessError, psutil.Error)
"""Errors that end a round, not the program: from runs, processes and files in unexpected states."""
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
    # An early SIGTERM leaves all blocks, which ends everything that they started.
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
    print(head(report), file=said, flush=True)
    for fault in dict.fromkeys(row.fault for row in rows):
        rounds, problems = measure_fault(fault, options.rounds, options.folder, cluster)
        for row in rows:
            if row.fault == fault:
                report["rows"].append(judge_row(row, rounds, problems))
                print(line(report["rows"][-1]), file=said, flush=True)
    print(notes(report), file=said)
    if options.json:
        print(json.dumps(report))
    return int(any(row["verdict"] in (FAILED, MISSED) for row in report["rows"]))


def measure_fault(fault: str, rounds: int, at: Path, cluster: str) -> tuple[Rounds, Problems]:
    """Return the figures of each side by round, empty for failed rounds, and each side's first failure."""
    found: Rounds = {name: [] for name in FAULTS[fault]}
    problems: Problems = {}
    for number in range(rounds):
        for name, side in FAULTS[fault].items():
            if number and (fault, name) in ONCE:
                continue
            with tempfile.TemporaryDirectory(dir=at, prefix="bench-recovery-", ignore_cleanup_errors=True) as folder:
                try:
                    found[name].append(dict(side(Path(folder), cluster)))
                except FAILURES as problem:
                    found[name].append({})
                    problems.setdefault(name, f"{type(problem).__name__}: {problem}")
    return found, problems


def judge_row(row: RecoveryRow, rounds: Rounds, problems: Problems) -> dict[str, Any]:
    """Return the row's results: medians of all rounds, the number of good rounds, and our verdict.

    One failed round of ours, or one without the figure or with the wrong culprit, makes the whole row FAILED.
    """
    fixed = {"row": row.name, "text": row.text, "unit": row.unit, "must": row.must, "stretch": row.stretch}
    values = {name: [one.get(row.figure, math.inf) for one in told] for name, told in rounds.items()}
    good = {name: sum(map(math.isfinite, found)) for name, found in values.items()}
    ours = statistics.median(values[OURS])
    verdict = FAILED if good[OURS] < len(values[OURS]) else row.verdict(ours)
    others = {
        name: {"value": statistics.median(found), "rounds": len(found), "good": good[name]}
        for name, found in values.items()
        if name != OURS and (name in problems or any(row.figure in one for one in rounds[name]))
    }
    return {
        **fixed, "ours": ours, "verdict": verdict, "rounds": len(values[OURS]), "good": good[OURS],
        "values": values[OURS], "others": others, "problems": problems,
        **{what: sum(one.get(what, 0.0) > 0 for one in rounds[OURS]) for what in ("wrong", "unkept")},
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
