"""How long the coordinator waits for agents and for files."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds; tests pass shorter ones."""

    join: float = 300.0
    """For all agents to join: srun starts them within seconds, but file systems show new files late."""
    preflight: float = 120.0
    """For all agents to report their preflight."""
    ready: float = 1800.0
    """For all fork servers to start: importing torch on a busy parallel file system takes minutes at worst."""
    more_nodes: float = 10.0
    """For more nodes to join, or to pass preflight, when as many as the job needs are there."""
    kill: float = 60.0
    """For the ranks of a failed generation to be gone."""
    rejoin: float = 5.0
    """For an agent to join again that disconnected before its first message: its connection may have timed out."""
    verdict: float = 5.0
    """For a verdict to be written, or records of dead ranks to be read: a hung file system delays the kill so long."""
    heartbeat: float = 5.0
    """For a heartbeat to be written; the next one is due after a second."""
    outcome: float = 10.0
    """For the outcome to be written: the agents have to hear of the end after it, and Slurm's KillWait is 30."""
