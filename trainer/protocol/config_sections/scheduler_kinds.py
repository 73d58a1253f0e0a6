"""Values of `cluster.kind`, and scheduler traits that matter inside a job."""

from dataclasses import dataclass

SLURM, LOCAL = "slurm", "local"
AUTO = "auto"
"""The best available scheduler on the submitting machine."""


@dataclass(frozen=True, kw_only=True)
class SchedulerKind:
    """Traits of one scheduler. See orchestrator/scheduler/available_schedulers.py for its login-node side."""

    simulated_nodes: bool  # its nodes are processes on the submitting host
    go_seconds: float  # time an agent waits for GO, because file systems may show it late
    preempts: bool = False  # the scheduler may end the job with an unrequested signal
    signal_early: float = 0.0  # seconds by which the signal before the time limit may be early


KINDS = {
    SLURM: SchedulerKind(simulated_nodes=False, go_seconds=60.0, preempts=True, signal_early=60.0),
    # On one machine, a held job waits for GO.
    LOCAL: SchedulerKind(simulated_nodes=True, go_seconds=600.0),
}


def traits(kind: str) -> SchedulerKind:
    """Return the traits of this kind. An unknown kind, for example from a newer release, gets Slurm's traits."""
    return KINDS.get(kind, KINDS[SLURM])


def choices() -> tuple[str, ...]:
    """Return the valid values of `cluster.kind`."""
    return (AUTO, *sorted(KINDS))


def choice_words() -> str:
    """Return the valid values for a message: `auto, local or slurm`."""
    *most, last = choices()
    return f"{', '.join(most)} or {last}"
