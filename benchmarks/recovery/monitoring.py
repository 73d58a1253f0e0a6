"""Cost of monitoring: the product with all defaults on and a bare loop of the same work, turn by turn."""

from pathlib import Path

from benchmarks.recovery.job import BenchmarkRun
from benchmarks.turns import bare_side, job_side, take_turns

_TURNS = 15
_RANKS = 4
# No save and no end occurs during the measurement: benchmarks.checkpoint measures the cost of saves.
_SETTINGS = ("train.steps=100000", "checkpoint.every=100000", "cluster.nodes=2", "cluster.ranks_per_node=2")


def cost(folder: Path, kind: str) -> dict[str, float]:
    """Return `ratio` of the median step times, and `cpu`: extra seconds of the product per step and rank.

    The product's side is all of it except saves: ranks, agents, and all processes that agents start on their nodes; the
    controller, shared by all runs, is left out. Both sides train on the same machine, in turns of two seconds. The
    whole product is compared, not its monitoring alone: metrics, work logs and agreement are included. The ranks of
    both sides are bound to cores in the same way: placement of four ranks on two cores makes a tenth of a step's time.
    """
    with BenchmarkRun(folder, kind, "tiny-gpt", *_SETTINGS) as job:
        ours = job_side(job, _RANKS)
        logs = folder / "bare"
        words = ["-m", "benchmarks.recovery.bare_loop", str(job.path("")), str(logs), "100000"]
        with bare_side(logs, words, _RANKS) as bare:
            take_turns(ours, bare, _TURNS)
    cpu, bare_cpu = ours.cpu_seconds(_RANKS), bare.cpu_seconds(_RANKS)
    return {
        "ratio": ours.step_seconds / bare.step_seconds, "cpu": cpu - bare_cpu,
        "bare": bare.step_seconds, "bare_cpu": bare_cpu,
    }  # fmt: skip
