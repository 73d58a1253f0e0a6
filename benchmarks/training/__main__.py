"""Time of orch's step, compared with torch's own DDP, FSDP2, tensor parallelism and pipelining in a bare loop.

    python -m benchmarks.training [--rows ddp,fsdp,...] [--turns 15] [--folder DIR] [--json]

Both sides train the product's model in float32 on two ranks of this machine, each bound to one core, in turns of two
seconds. Ours is a whole run as a user submits it: agents, progress cells, metrics, agreement; saves are left out, which
benchmarks.checkpoint measures. A pair is one turn of each side; its ratio is the ratio of their median step times. The
interval contains the median of all pairs with a probability of at least 95 % (binomial, order statistics).

Run it on an otherwise idle machine; other numbers are meaningless. Exit code 1 if a row misses its must.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.recovery.job import BenchmarkRun
from benchmarks.turns import bare_side, interval, job_side, take_turns

GOAL, MUST = 1.00, 1.02
_RANKS, _LEAST_TURNS = 2, 15
ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "ddp": ("DistributedDataParallel", ("parallel.strategy=ddp", "parallel.dp_shard=0", "parallel.tp=1")),
    "zero2": (
        "fully_shard, reshard_after_forward=False",
        ("parallel.strategy=zero2", "parallel.dp_shard=2", "parallel.tp=1"),
    ),
    "fsdp": ("fully_shard", ("parallel.strategy=fsdp", "parallel.dp_shard=2", "parallel.tp=1")),
    "tp": ("parallelize_module", ("parallel.strategy=auto", "parallel.dp_shard=1", "parallel.tp=2")),
    "pp": (
        "PipelineStage, Schedule1F1B",
        (
            "parallel.strategy=ddp",
            "parallel.dp_shard=1",
            "parallel.tp=1",
            "parallel.pipeline.stages=2",
            "parallel.pipeline.micro_batches=8",
        ),
    ),
}
"""By name: the tool of the bare loop, and orch's settings. A stage of one rank has nothing to shard: no FSDP."""
_SETTINGS = (
    "train.steps=1000000", "train.dtype=float32", "checkpoint.every=1000000", "cluster.nodes=1",
    f"cluster.ranks_per_node={_RANKS}",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(ROWS), help=f"of {', '.join(ROWS)}")
    parser.add_argument("--turns", type=int, default=_LEAST_TURNS, help="pairs; at least 15 for figures worth keeping")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the runs go")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    chosen = options.rows.split(",")
    if unknown := set(chosen) - set(ROWS):
        parser.error(f"no row {sorted(unknown)[0]}, only {', '.join(ROWS)}")
    said = sys.stderr if options.json else sys.stdout
    print(_head(), file=said, flush=True)
    rows = []
    for name in chosen:
        with tempfile.TemporaryDirectory(
            dir=options.folder, prefix="bench-training-", ignore_cleanup_errors=True
        ) as folder:
            rows.append(measure_row(name, Path(folder), options.turns))
        print(_line(rows[-1]), file=said, flush=True)
    if options.json:
        print(json.dumps({"benchmark": "training", "rows": rows}))
    return int(any(row["verdict"] == "MISSED" for row in rows))


def measure_row(name: str, folder: Path, turns: int) -> dict[str, Any]:
    """Return one row: the median ratio of all pairs with its interval."""
    torchs, settings = ROWS[name]
    with BenchmarkRun(folder, "local", "tiny-gpt", *_SETTINGS, *settings) as job:
        ours = job_side(job, _RANKS)
        logs = folder / "bare"
        words = ["-m", "benchmarks.training.bare_loop", str(job.path("")), str(logs), name]
        with bare_side(logs, words, _RANKS) as bare:
            take_turns(ours, bare, turns)
    ratios = sorted(one.seconds / other.seconds for one, other in zip(ours.turns, bare.turns, strict=True))
    low, high = interval(ratios)
    ratio = statistics.median(ratios)
    verdict = "goal" if ratio <= GOAL else "must" if ratio <= MUST else "MISSED"
    return {
        "row": name, "beside": torchs, "ratio": ratio, "low": low, "high": high, "verdict": verdict,
        "ours": ours.step_seconds, "bare": bare.step_seconds, "pairs": len(ratios),
    }  # fmt: skip


def _head() -> str:
    cores = len(os.sched_getaffinity(0))
    return (
        f"{cores} cores, torch {version('torch')}, Python {platform.python_version()}, load before "
        f"{os.getloadavg()[0]:.2f}; {_RANKS} ranks on gloo, float32, turns of 2 s in changing order\n\n"
        f"{'row':6} {'beside':42} {'ratio':>6} {'95 % interval':>16} {'ours ms':>8} {'bare ms':>8} {'pairs':>5}  "
        f"verdict (goal {GOAL:.2f}, must {MUST:.2f})"
    )


def _line(row: dict[str, Any]) -> str:
    bounds = f"{row['low']:.3f} to {row['high']:.3f}"
    return (
        f"{row['row']:6} {row['beside']:42} {row['ratio']:6.3f} {bounds:>16} {1e3 * row['ours']:8.1f} "
        f"{1e3 * row['bare']:8.1f} {row['pairs']:5}  {row['verdict']}"
    )


if __name__ == "__main__":
    sys.exit(main())
