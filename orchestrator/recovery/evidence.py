"""Evidence about one attempt, and known failure messages in its logs. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.scheduler.interface import ENDED_STATES, LEAVING_STATES, JobStatus
from trainer.protocol.cut_text import cut
from trainer.protocol.failures.failure_patterns import Meaning, log_line_meaning
from trainer.protocol.failures.outcome import AgentReport, AttemptOutcome, FailureKind


@dataclass(frozen=True, kw_only=True)
class LogTail:
    """End of one agent's log, with its file name."""

    source: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """State of an attempt at one moment; durations are seconds by the controller's monotonic clock."""

    attempt: int
    answered: bool
    """Whether the scheduler answered; without an answer there is no verdict."""
    job: JobStatus | None
    """Adopted job as the scheduler knows it; None if the answered look-ups do not include it."""
    unrecorded: bool = False
    """Whether the job has left the queue while accounting, which knows its end, does not answer."""
    absent_for: float = 0.0
    """Seconds of answered look-ups without the job."""
    ended_for: float = 0.0
    """Seconds since the job was first seen ended, or gone with an outcome left behind."""
    leaving_for: float = 0.0
    """Seconds since the job was first seen leaving (COMPLETING)."""
    started: bool = False
    """Whether agents have left a heartbeat or an event."""
    silent_for: float = 0.0
    """Seconds for which the heartbeat was seen unchanged or missing."""
    gone: tuple[str, ...] = ()
    """Nodes that the scheduler has removed from a running job with spare nodes."""
    leader_gone: str = ""
    """Leading node, if the scheduler has removed it from the job and the others keep running."""
    outcome: AttemptOutcome | None = None
    cancel_asked: bool = False
    saved_step: int | None = None
    """Newest step that this attempt saved, according to its own events; None if unknown."""
    tails: tuple[LogTail, ...] = ()
    """Ends of the agents' logs, read only if the attempt left no outcome or one without the sender of its stop."""
    near_limit: bool = False
    """Whether the attempt stopped when Slurm's signal was due, by the job's final time limit."""
    leader: str = ""
    """Node of the attempt's coordinator; empty if unknown."""
    reports: tuple[AgentReport, ...] = ()
    """Reports of agents that ended without the coordinator, read only if the attempt left no outcome."""
    still_for: float = 0.0
    """Seconds for which the silent job was watched without growth of any file; 0 unless it must be running."""
    overstayed: float = 0.0
    """Seconds for which the job was watched to keep running after its attempt left its outcome."""
    saves_failing: str = ""
    """Since when and why saves fail, from the newest heartbeat; empty while they succeed."""
    disk: str = ""
    """Why the run's folder is not writable; probed only if the job is silent."""
    lost_interpreter: str = ""
    """Interpreter named in the job's script, if it is gone; checked only if no agent has started."""
    silenced: str = ""
    """Reason of orch's own stop request because of a silent heartbeat; empty if there was no request."""
    requeued: str = ""
    """Reason of orch's own cancel because Slurm had restarted the job; empty without a cancel."""
    gave_up: str = ""
    """Reason of orch's own cancel after too long a wait for nodes, before a smaller job; empty without a cancel."""
    odd: str = ""
    """Paths of the run directory with a foreign or damaged entry, and the remedy."""

    @property
    def job_ended(self) -> bool:
        return self.job is not None and self.job.state in ENDED_STATES

    @property
    def job_leaving(self) -> bool:
        return self.job is not None and self.job.state in LEAVING_STATES


class Role(StrEnum):
    """Contribution of a log message to the cause."""

    ROOT = "root"  # a cause in its own right
    CASCADE = "cascade"  # the visible effect of another process's end: names no cause and never replaces a root
    TEARDOWN = "teardown"  # printed during shutdown: ignored


STANDS_FOR: dict[Meaning, tuple[FailureKind, Role]] = {
    Meaning.NO_SECRETS: (FailureKind.SUBMIT_REJECTED, Role.ROOT),
    Meaning.TIME_LIMIT: (FailureKind.TIME_LIMIT, Role.ROOT),
    Meaning.PREEMPTED: (FailureKind.PREEMPTED, Role.ROOT),
    Meaning.NODE_LOST: (FailureKind.NODE_LOST, Role.ROOT),
    Meaning.STORAGE: (FailureKind.STORAGE, Role.ROOT),
    Meaning.NOT_LAUNCHED: (FailureKind.LAUNCH_FAILED, Role.ROOT),
    Meaning.MEMORY: (FailureKind.OUT_OF_MEMORY, Role.ROOT),
    Meaning.TASK_KILLED: (FailureKind.AGENT_LOST, Role.ROOT),
    Meaning.PEER_GONE: (FailureKind.AGENT_LOST, Role.CASCADE),
    Meaning.NO_RENDEZVOUS: (FailureKind.LAUNCH_FAILED, Role.CASCADE),
    Meaning.REQUEUED: (FailureKind.NODE_LOST, Role.CASCADE),
    Meaning.CANCELLED: (FailureKind.CANCELLED, Role.TEARDOWN),
    Meaning.TEARDOWN: (FailureKind.UNKNOWN, Role.TEARDOWN),
}
"""Failure kind and role of every meaning of a job's log line."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """Log line that matches the table of failure patterns."""

    kind: FailureKind
    role: Role
    line: str
    source: str


def scan(tails: Iterable[LogTail]) -> list[Match]:
    """Return every known line, in the order of the logs."""
    known = (
        (tail.source, line, meaning) for tail in tails for line in tail.text.splitlines()
        if (meaning := log_line_meaning(line)) is not None
    )  # fmt: skip
    return [
        Match(kind=STANDS_FOR[meaning][0], role=STANDS_FOR[meaning][1], line=cut(line.strip(), 300), source=source)
        for source, line, meaning in known
    ]


def before_cancel(matches: list[Match]) -> list[Match]:
    """Return the matches that precede Slurm's cancel message in each log."""
    cancelled: set[str] = set()
    found = []
    for match in matches:
        if match.kind is FailureKind.CANCELLED:
            cancelled.add(match.source)
        elif match.source not in cancelled:
            found.append(match)
    return found


def earliest(matches: list[Match]) -> Match | None:
    """Return the first root cause, else the first cascade."""
    for role in (Role.ROOT, Role.CASCADE):
        for match in matches:
            if match.role is role:
                return match
    return None
