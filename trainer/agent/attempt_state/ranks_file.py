"""ranks.json: what every rank is doing, for readers on a login node."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, write_atomically
from trainer.agent.watch.rank_sample import RankSample
from trainer.contract.heartbeat import Heartbeat
from trainer.contract.run_dir import AttemptDir

MOST = 64
"""Ranks that are listed; of a larger job, the slow ones and those that have stood still longest."""


def rank_rows(
    seen: Sequence[RankSample], *, world: int, time: float, generation: int, p99: Mapping[str, float],
    ratios: Mapping[int, float], command: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """One reading of some of `world` ranks; `ratios` has those whose own work takes longer than that of their peers.

    `command`: they are a user's own program, of which neither step nor phase nor a sign of life is known.
    """
    rows = [
        {
            "rank": one.rank, "node": one.node, "step": one.step, "phase": one.phase, "age": round(one.age, 1),
            "state": one.state, "ratio": ratios.get(one.rank), "ended": one.ended,
        }
        for one in sorted(seen, key=lambda one: one.rank)
    ]  # fmt: skip
    if command:
        rows = [{**row, "step": None, "phase": "command", "age": None} for row in rows]
    return {
        "schema": "orch.ranks/1", "time": time, "generation": generation, "world": world, "ranks": rows,
        "p99": dict(p99),
    }  # fmt: skip


def write_readings(attempt: AttemptDir, beat: Heartbeat, ranks: Mapping[str, Any] | None) -> None:
    """Replace the last heartbeat, and the last reading of the ranks when there is a new one; raises OSError."""
    beat.write(attempt.heartbeat)
    if ranks is not None:
        write(attempt.ranks, ranks)


def write(path: Path, fields: Mapping[str, Any]) -> None:
    """Replace the last reading; raises OSError."""
    write_atomically(path, (dump_line(dict(fields)) + "\n").encode(errors="backslashreplace"))
