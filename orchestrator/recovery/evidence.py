"""Evidence about one attempt, and known failure sentences in its logs. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.scheduler.interface import ENDED_STATES, LEAVING_STATES, JobStatus
from trainer.contract.cut_text import cut
from trainer.contract.failures.failure_patterns import Meaning, log_line_says
from trainer.contract.failures.outcome import AgentReport, AttemptOutcome, FailureKind


@dataclass(frozen=True, kw_only=True)
class LogTail:
    """The end of one agent's log, by the name of its file."""

    source: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One look at an attempt; durations are seconds by the controller's own monotonic clock."""

    attempt: int
    answered: bool
    """The scheduler answered in this look; without an answer there is no verdict."""
    job: JobStatus | None
    """The adopted job as the scheduler knows it; None when the answered look-ups do not know it."""
    unrecorded: bool = False
    """The job has left the queue, and accounting, which knows its end, does not answer."""
    absent_for: float = 0.0
    """How long answered look-ups have not known the job."""
    ended_for: float = 0.0
    """How long the job has been seen ended, or gone with an outcome left behind."""
    leaving_for: float = 0.0
    """How long the job has been seen leaving (COMPLETING)."""
    started: bool = False
    """Agents have left a sign: a heartbeat or an event."""
    silent_for: float = 0.0
    """How long the heartbeat has been seen unchanged (or missing)."""
    gone: tuple[str, ...] = ()
    """Nodes that the scheduler has taken out of the job, which has spare ones, while it runs on."""
    leader_gone: str = ""
    """The node that led the job, when the scheduler has taken it out of the job and lets the rest run on."""
    outcome: AttemptOutcome | None = None
    cancel_asked: bool = False
    saved_step: int | None = None
    """The newest step that this attempt saved, by its own events; None: none is known."""
    tails: tuple[LogTail, ...] = ()
    """Ends of the agents' logs, read only when the attempt left no outcome, or one that does not say who stopped it."""
    near_limit: bool = False
    """The attempt stopped when Slurm's signal was due, by the time limit that the job had in the end."""
    leader: str = ""
    """The node on which the attempt's coordinator runs, when it is known."""
    reports: tuple[AgentReport, ...] = ()
    """What agents left that ended without the coordinator's word, read only when the attempt left no outcome."""
    still_for: float = 0.0
    """How long the silent job was watched without growth of any of its files; 0 while it need not be running."""
    overstayed: float = 0.0
    """How long the job was watched to run on although its attempt has left its outcome."""
    saves_failing: str = ""
    """Since when its saves fail, and why, by its newest heartbeat; empty while they work."""
    disk: str = ""
    """Why nothing can be written into the run's folder; only looked at when the job says nothing (any more)."""
    lost_interpreter: str = ""
    """The interpreter that the job's script names, where it is gone; only looked at when no agent has started."""
    silenced: str = ""
    """Why orch itself asked the attempt to stop: its heartbeat was silent."""
    requeued: str = ""
    """Why orch itself ended the job: Slurm had started it again."""
    gave_up: str = ""
    """Why orch itself ended the job: it had waited too long for its nodes, and a smaller one follows."""
    odd: str = ""
    """Names of the run directory at which something else stands than a file of ours, and what to do."""

    @property
    def job_ended(self) -> bool:
        return self.job is not None and self.job.state in ENDED_STATES

    @property
    def job_leaving(self) -> bool:
        return self.job is not None and self.job.state in LEAVING_STATES


class Role(StrEnum):
    """What a sentence contributes to the cause."""

    ROOT = "root"  # it is one by itself
    CASCADE = "cascade"  # somebody else's end seen from here: it names no cause, and never replaces a root
    TEARDOWN = "teardown"  # printed while everything is taken down: ignored


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
"""Of every meaning that a line of a job's log can have."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """One line of a log that the table of failure patterns knows."""

    kind: FailureKind
    role: Role
    line: str
    source: str


def scan(tails: Iterable[LogTail]) -> list[Match]:
    """Every known line, in the order of the logs."""
    known = (
        (tail.source, line, meaning) for tail in tails for line in tail.text.splitlines()
        if (meaning := log_line_says(line)) is not None
    )  # fmt: skip
    return [
        Match(kind=STANDS_FOR[meaning][0], role=STANDS_FOR[meaning][1], line=cut(line.strip(), 300), source=source)
        for source, line, meaning in known
    ]


def before_cancel(matches: list[Match]) -> list[Match]:
    """What each log says before Slurm writes there that it cancels the job."""
    cancelled: set[str] = set()
    found = []
    for match in matches:
        if match.kind is FailureKind.CANCELLED:
            cancelled.add(match.source)
        elif match.source not in cancelled:
            found.append(match)
    return found


def earliest(matches: list[Match]) -> Match | None:
    """The first root cause; a cascade only when nothing better was said."""
    for role in (Role.ROOT, Role.CASCADE):
        for match in matches:
            if match.role is role:
                return match
    return None
