"""What a watched run costs: the product with all that is on by default and a bare loop of the same, turn by turn."""

from pathlib import Path

from benchmarks.recovery.job import Job
from benchmarks.turns import bare_side, side_of, take_turns

_TURNS = 15
_RANKS = 4
# No save and no end fall into what is measured: what saves cost is measured by benchmarks.checkpoint.
_SETTINGS = ("train.steps=100000", "checkpoint.every=100000", "cluster.nodes=2", "cluster.ranks_per_node=2")


def cost(folder: Path, kind: str) -> dict[str, float]:
    """`ratio` of the median step times, and `cpu`: seconds per step and rank that the product takes more.

    The product's side is all of it but saves: ranks, agents, and whatever agents start on their nodes; the controller,
    of which there is one for all runs, is left out. Both sides train on the same machine, in turns of two seconds.
    What is compared is the whole product, not its watching alone: metrics, work logs and agreement are in it as well.
    The ranks of both are bound to cores alike: where four ranks on two cores are put makes a tenth of a step's time.
    """
    with Job(folder, kind, "tiny-gpt", *_SETTINGS) as job:
        ours = side_of(job, _RANKS)
        logs = folder / "bare"
        words = ["-m", "benchmarks.recovery.bare_loop", str(job.path("")), str(logs), "100000"]
        with bare_side(logs, words, _RANKS) as bare:
            take_turns(ours, bare, _TURNS)
    cpu, bare_cpu = ours.cpu_seconds(_RANKS), bare.cpu_seconds(_RANKS)
    return {
        "ratio": ours.step_seconds / bare.step_seconds, "cpu": cpu - bare_cpu,
        "bare": bare.step_seconds, "bare_cpu": bare_cpu,
    }  # fmt: skip
