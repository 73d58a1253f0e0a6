"""What is known about one attempt at one moment: plain values, gathered by the controller, judged by pure functions."""

from dataclasses import dataclass

from orchestrator.scheduler.interface import ENDED_STATES, LEAVING_STATES, JobStatus
from trainer.contract.failures.outcome import AgentReport, AttemptOutcome


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
