"""What `cluster.kind` may be, and in what the schedulers differ for what runs under them."""

from dataclasses import dataclass

SLURM, LOCAL = "slurm", "local"
AUTO = "auto"
"""The best one that can be used where the run is submitted."""


@dataclass(frozen=True, kw_only=True)
class SchedulerKind:
    """The traits of one scheduler; the login node's side of it is in orchestrator/scheduler/available_schedulers.py."""

    simulated_nodes: bool  # its nodes are processes of the host where the run was submitted
    go_seconds: float  # for which an agent waits for GO, which file systems may show late
    preempts: bool = False  # a signal that nobody asked for takes the job away
    signal_early: float = 0.0  # seconds by which the signal before the time limit may come too soon


KINDS = {
    SLURM: SchedulerKind(simulated_nodes=False, go_seconds=60.0, preempts=True, signal_early=60.0),
    # On one machine, being held means waiting for GO.
    LOCAL: SchedulerKind(simulated_nodes=True, go_seconds=600.0),
}


def traits(kind: str) -> SchedulerKind:
    """Those of this kind; of one that only a newer release knows, those of Slurm."""
    return KINDS.get(kind, KINDS[SLURM])


def choices() -> tuple[str, ...]:
    """What `cluster.kind` may be."""
    return (AUTO, *sorted(KINDS))


def choice_words() -> str:
    """The same for people: `auto, local or slurm`."""
    *most, last = choices()
    return f"{', '.join(most)} or {last}"
