"""How many nodes a partition of Slurm has."""

import time

from orchestrator.config.run_config import RunConfig
from orchestrator.errors import SlurmUnreachable
from orchestrator.scheduler.slurm.commands import run_command

KEEP = 600.0
"""Seconds for which the size of a partition is believed."""
ANSWER_WITHIN = 10.0


class PartitionSizes:
    """Answers how many nodes a run's partition has; None where Slurm does not say."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, int | None]] = {}

    def __call__(self, config: RunConfig) -> int | None:
        name, now = config.cluster.partition, time.monotonic()
        if name not in self._known or now - self._known[name][0] > KEEP:
            self._known[name] = (now, _ask(name))
        return self._known[name][1]


def _ask(partition: str) -> int | None:
    try:
        # WARNING: sinfo refuses -a together with -p.
        done = run_command(["sinfo", "-h", "-a", "-o", "%D %P"], ANSWER_WITHIN)
    except SlurmUnreachable:
        return None
    return read_sizes(done.stdout, partition) if done.returncode == 0 else None


def read_sizes(text: str, partition: str) -> int | None:
    """Nodes of `partition` in lines of `count name`; the default one (marked by *) when none is named.

    Of several (`gpu,gpu-long`) the largest counts: they may share nodes, and a job runs in one of them.
    """
    sizes: dict[str, int] = {}
    for line in text.splitlines():
        count, _, name = line.strip().partition(" ")
        if count.isdigit():
            sizes[name] = sizes.get(name, 0) + int(count)
    if partition:
        known = [sizes.get(name, sizes.get(f"{name}*")) for name in partition.split(",")]
        return max((size for size in known if size is not None), default=None)
    return next((size for name, size in sizes.items() if name.endswith("*")), None)
