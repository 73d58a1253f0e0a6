"""Cost of a restart after a SIGKILL with each strategy, compared with FSDP.

    python -m benchmarks.training.restarts [--rows ddp,zero1,...] [--rounds 7] [--folder DIR] [--json]

Four ranks on two nodes of this machine; a rank is killed after the first saves. The measured time is from the agent's
detection to the first new step. A round runs every strategy once, in changing order; the ratio is within a round, with
an interval as in benchmarks.training. Exit code 1 if a row's whole interval is above FSDP.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.recovery import ours
from benchmarks.turns import interval

_LEAST_ROUNDS = 7
_BESIDE = "fsdp"
STRATEGIES: dict[str, tuple[str, ...]] = {
    _BESIDE: ("parallel.strategy=fsdp", "parallel.dp_shard=4", "parallel.tp=1"),
    "ddp": ("parallel.strategy=ddp", "parallel.dp_shard=0", "parallel.tp=1"),
    "zero1": ("parallel.strategy=zero1", "parallel.dp_shard=4", "parallel.tp=1"),
    "zero2": ("parallel.strategy=zero2", "parallel.dp_shard=4", "parallel.tp=1"),
    "hsdp": ("parallel.strategy=hsdp", "parallel.dp_replicate=2", "parallel.dp_shard=2", "parallel.tp=1"),
    "fsdp x tp": ("parallel.strategy=fsdp", "parallel.dp_shard=2", "parallel.tp=2"),
    "offload": ("parallel.strategy=fsdp", "parallel.dp_shard=4", "parallel.tp=1", "parallel.fsdp.offload=optimizer"),
}
"""Settings by name; all other rows are compared with the first."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(STRATEGIES), help=f"of {', '.join(STRATEGIES)}")
    parser.add_argument("--rounds", type=int, default=_LEAST_ROUNDS, help="at least 7 for figures worth keeping")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the runs go")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = [_BESIDE, *(name for name in options.rows.split(",") if name != _BESIDE)]
    if unknown := set(chosen) - set(STRATEGIES):
        parser.error(f"no row {sorted(unknown)[0]}, only {', '.join(STRATEGIES)}")
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    for number in range(options.rounds):
        for name in chosen if number % 2 else reversed(chosen):
            seconds[name].append(_restart(options.folder, name))
    rows = [_row(name, found, seconds[_BESIDE]) for name, found in seconds.items()]
    if options.json:
        print(json.dumps({"benchmark": "restarts", "rows": rows}))
    else:
        print(f"{'row':10} {'seconds':>8} {'ratio':>6} {'95 % interval':>16} {'rounds':>6}  verdict")
        for row in rows:
            bounds = f"{row['low']:.3f} to {row['high']:.3f}"
            print(
                f"{row['row']:10} {row['seconds']:8.3f} {row['ratio']:6.3f} {bounds:>16} {row['rounds']:6}  "
                f"{row['verdict']}"
            )
    return int(any(row["verdict"] == "MISSED" for row in rows))


def _restart(folder: Path, name: str) -> float:
    """Return the seconds of one restart."""
    with tempfile.TemporaryDirectory(dir=folder, prefix="bench-restarts-", ignore_cleanup_errors=True) as place:
        return ours.kill(Path(place), "local", *STRATEGIES[name])["back"]


def _row(name: str, found: list[float], beside: list[float]) -> dict[str, Any]:
    ratios = sorted(one / other for one, other in zip(found, beside, strict=True))
    low, high = interval(ratios)
    verdict = "too few rounds" if len(found) < _LEAST_ROUNDS else "MISSED" if low > 1.0 else "met"
    return {
        "row": name, "seconds": statistics.median(found), "ratio": statistics.median(ratios), "low": low, "high": high,
        "rounds": len(found), "verdict": verdict,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
