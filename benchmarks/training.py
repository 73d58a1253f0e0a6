"""Time of orch's training step, compared with torch's own DDP, FSDP2, tensor parallelism and pipelining in a bare loop.

    python -m benchmarks.training [--rows ddp,fsdp,...] [--rounds 15] [--folder DIR] [--json] [--list]

Both sides train the product's model in float32 on two ranks of this machine, each bound to one core, in turns of two
seconds. Ours is a whole run as a user submits it, with agents, progress cells, metrics and agreement, but without
saves, which benchmarks.checkpoint measures. A round is one turn of each side; its ratio is the ratio of their median
step times. The interval contains the median of all rounds with a probability of at least 95 % (binomial, order
statistics); at least 15 rounds give figures worth keeping.

Run it on an otherwise idle machine, or the numbers are meaningless. The exit code is 1 if a row misses its must or
fails.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.runner import Result, Row, run_table
from benchmarks.submitted_run import FAILURES, BenchmarkRun
from benchmarks.training_turns import train_in_turns

_RANKS = 2
_SETTINGS = (
    "train.steps=1000000", "train.dtype=float32", "checkpoint.every=1000000", "cluster.nodes=1",
    f"cluster.ranks_per_node={_RANKS}",
)  # fmt: skip


def _row(name: str, peer: str, settings: str) -> Row:
    keys = tuple(f"parallel.{setting}" for setting in settings.split())
    return Row(name=name, text=f"{name} / {peer}", must=1.02, stretch=1.0, source=keys)


ROWS = (
    _row("ddp", "DistributedDataParallel", "strategy=ddp dp_shard=0 tp=1"),
    _row("zero2", "fully_shard, reshard_after_forward=False", "strategy=zero2 dp_shard=2 tp=1"),
    _row("fsdp", "fully_shard", "strategy=fsdp dp_shard=2 tp=1"),
    _row("tp", "parallelize_module", "strategy=auto dp_shard=1 tp=2"),
    # A stage on a single rank has nothing to shard, so there is no FSDP.
    _row(
        "pp",
        "PipelineStage, Schedule1F1B",
        "strategy=ddp dp_shard=1 tp=1 pipeline.stages=2 pipeline.micro_batches=8",
    ),
)


def measure(rows: Sequence[Row], options: argparse.Namespace) -> Iterator[tuple[Row, Result]]:
    for row in rows:
        with tempfile.TemporaryDirectory(
            dir=options.folder, prefix="bench-training-", ignore_cleanup_errors=True
        ) as folder:
            try:
                yield row, _measure_row(row, Path(folder), options.rounds)
            except FAILURES as problem:
                yield row, Result(values=(), problems=[f"{type(problem).__name__}: {problem}"])


def _measure_row(row: Row, folder: Path, rounds: int) -> Result:
    with BenchmarkRun(folder, "local", "tiny-gpt", *_SETTINGS, *row.source) as job:
        words = ["-m", "benchmarks.bare_loop", str(job.path("")), str(folder / "bare"), row.name]
        ours, bare = train_in_turns(job, _RANKS, words, folder / "bare", rounds)
    ratios = [turn.seconds / other.seconds for turn, other in zip(ours.turns, bare.turns, strict=True)]
    return Result(values=ratios, measured={"ours": ours.step_seconds, "bare": bare.step_seconds})


if __name__ == "__main__":
    sys.exit(run_table("training", __doc__, ROWS, measure, rounds=15))
