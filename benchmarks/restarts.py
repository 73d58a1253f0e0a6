"""Cost of a restart after a SIGKILL with each strategy, compared with FSDP.

    python -m benchmarks.restarts [--rows ddp,zero1,...] [--rounds 7] [--folder DIR] [--json] [--list]

Four ranks on two nodes of this machine; a rank is killed after the first saves. The measured time runs from the agent's
detection to the first new step. A round runs every strategy once, in varying order; ratios are taken within a round,
with an interval as in benchmarks.training. The exit code is 1 if a row's whole interval is above FSDP's.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.recovery import kill_rank
from benchmarks.runner import Result, Row, run_table

BASE = "fsdp"
"""All other rows are compared with this one."""


def _row(name: str, settings: str) -> Row:
    keys = tuple(f"parallel.{setting}" for setting in settings.split())
    return Row(name=name, text=f"{name} / {BASE}", must=1.0, source=keys, by_interval=True)


ROWS = (
    _row(BASE, "strategy=fsdp dp_shard=4 tp=1"),
    _row("ddp", "strategy=ddp dp_shard=0 tp=1"),
    _row("zero1", "strategy=zero1 dp_shard=4 tp=1"),
    _row("zero2", "strategy=zero2 dp_shard=4 tp=1"),
    _row("hsdp", "strategy=hsdp dp_replicate=2 dp_shard=2 tp=1"),
    _row("fsdp x tp", "strategy=fsdp dp_shard=2 tp=2"),
    _row("offload", "strategy=fsdp dp_shard=4 tp=1 fsdp.offload=optimizer"),
)


def measure(rows: Sequence[Row], options: argparse.Namespace) -> Iterator[tuple[Row, Result]]:
    selected = [ROWS[0], *(row for row in rows if row.name != BASE)]
    seconds: dict[str, list[float]] = {row.name: [] for row in selected}
    for number in range(options.rounds):
        for row in selected if number % 2 else reversed(selected):
            with tempfile.TemporaryDirectory(
                dir=options.folder, prefix="bench-restarts-", ignore_cleanup_errors=True
            ) as folder:
                seconds[row.name].append(kill_rank(Path(folder), "local", *row.source)["back"])
    for row in selected:
        ratios = [ours / base for ours, base in zip(seconds[row.name], seconds[BASE], strict=True)]
        yield row, Result(values=ratios, measured={"seconds": statistics.median(seconds[row.name])})


if __name__ == "__main__":
    sys.exit(run_table("restarts", __doc__, ROWS, measure))
