"""Rows of the registry as plain values, returned by the store."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.states import AttemptState, RunState, Trust


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run. Times are in seconds since the epoch."""

    name: str
    state: RunState
    reason: str
    cluster: str  # slurm or local
    run_dir: str
    config_digest: str  # of its next attempt; `orch resume` may change it
    total_steps: int
    step: int = 0
    loss: float | None = None
    not_before: float = 0.0  # no new attempt before this time
    fresh_from: int = 1  # budgets count from this attempt on (`orch resume` changes it)
    created_at: float = 0.0
    updated_at: float = 0.0
    identity: dict[str, Any] = field(default_factory=dict)  # code, environment, data
    scheduler: str = ""  # instance of its jobs (scheduler/scheduler_instance.py); empty: unknown
    tags: tuple[str, ...] = ()  # user-defined, sorted
    notified: dict[str, Any] = field(default_factory=dict)  # notifications.delivery.NotificationState
    removal: str = ""  # progress of `orch rm` (orchestrator/registry/user_writes.py)
    predecessor: str = ""  # run that must succeed before this one starts (`orch submit --after`)
    predecessor_created_at: float = 0.0  # distinguishes it from later runs of its name; 0: unknown
    sweep: dict[str, Any] = field(default_factory=dict)  # SweepMember as JSON; empty: not part of a sweep

    @property
    def domain(self) -> str:
        """Namespace of its nodes, because two clusters may have nodes with the same name."""
        return self.scheduler or self.cluster


@dataclass(frozen=True, kw_only=True)
class SweepMember:
    """A run's place in a sweep: the values that it varies, as typed, and how many unfinished runs there may be."""

    name: str
    limit: int
    point: dict[str, str]
    base: str  # digest of the configuration without the varied keys and the name

    @classmethod
    def from_run(cls, run: Run) -> "SweepMember | None":
        """Return the run's place in its sweep, or None for a run outside any sweep."""
        return cls(**run.sweep) if run.sweep else None


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """Data for a new run; its name is `slug` with the next free number, and its folder is in `root`."""

    slug: str
    cluster: str  # slurm or local
    root: Path
    config_digest: str
    total_steps: int
    identity: dict[str, Any]
    scheduler: str = ""  # as in Run
    tags: tuple[str, ...] = ()
    predecessor: str = ""  # as in Run
    predecessor_created_at: float = 0.0  # as in Run
    sweep: dict[str, Any] = field(default_factory=dict)  # as in Run


@dataclass(frozen=True, kw_only=True)
class ConfigText:
    """Resolved config, stored under the digest of its bytes. Triggers refuse changes and deletion."""

    digest: str
    data: str  # canonical JSON


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Attempt of a run, numbered from 1."""

    run: str
    number: int
    state: AttemptState
    nonce: str
    job_name: str
    reason: str = ""
    epoch: int = 0
    job_id: str | None = None
    submit_time: str | None = None
    job_state: str | None = None  # as last reported by Slurm
    nodes: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    intent_at: float = 0.0
    submitted_at: float | None = None
    started_at: float | None = None
    ended_at: float | None = None
    resumed_from: int | None = None  # step
    first_step: int | None = None
    last_step: int | None = None
    saved_step: int | None = None  # newest checkpoint this attempt committed
    generations: int = 0
    failure: dict[str, Any] | None = None  # trainer.protocol.failures.outcome.Failure as JSON
    decision: dict[str, Any] | None = None  # {action, reason}
    scheduler: str = ""  # the run's scheduler at the start of this attempt
    config_digest: str = ""  # the run's config then; for a smaller attempt, the config derived from it
    expected_start: float | None = None  # Slurm's last estimate of a waiting job's start, made at `expected_at`
    expected_at: float | None = None
    smaller_world: dict[str, Any] | None = None  # {nodes, spare_nodes, of, of_spare_nodes, reason, base}, else None
    sluid: str = ""  # Slurm's identity of one run of a job (24.11 and later); empty: unknown
    restarts: int = 0  # times that Slurm had requeued the job before this attempt, which continues in it

    @property
    def base_digest(self) -> str:
        """Digest of the run's config at the start of this attempt."""
        return str(self.smaller_world["base"]) if self.smaller_world else self.config_digest


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A call of sbatch for an attempt, numbered from 1 within the attempt."""

    run: str
    attempt: int
    number: int
    submitted_at: float
    job_id: str | None = None  # returned by sbatch
    outcome: str = ""  # ADOPTED, REFUSED, CANCELLED (a duplicate); empty while unknown


@dataclass(frozen=True, kw_only=True)
class Generation:
    """Generation within an attempt, numbered from 1."""

    run: str
    attempt: int
    number: int
    started_at: float
    ended_at: float | None = None
    resumed_from: int | None = None
    last_step: int | None = None
    reason: str = ""
    failure: dict[str, Any] | None = None
    tier: str = ""  # source of `resumed_from`: `memory`, or the path of a tier


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Checkpoint folder of a run; `name` is the folder's name, `path` the location of its first commit."""

    run: str
    name: str
    step: int
    attempt: int
    trust: Trust
    bytes: int
    path: str
    committed_at: float
    reason: str = ""
    tier: str = ""  # path of the first tier; empty for the run's own folder
    seconds: float | None = None  # from start to commit
    stall: float | None = None  # seconds for which training was stopped
    manifest: str = ""  # digest of its manifest at commit; empty: unknown


@dataclass(frozen=True, kw_only=True)
class RestoreTest:
    """Restore test: the run `test` restores a checkpoint of `run` on one layout."""

    test: str
    run: str
    checkpoint: str
    layout: str
    step: int
    begun_at: float
    ended_at: float | None = None  # time of the verdict
    verdict: str = ""  # trainer.protocol.restore_test.Outcome; empty while it is running
    reason: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    forced: bool = False  # requested by a person, regardless of schedule and budget


@dataclass(frozen=True, kw_only=True)
class CheckpointCopy:
    """Copy of a checkpoint in another tier; `tier` is that tier's path."""

    run: str
    name: str
    tier: str
    path: str
    bytes: int
    copied_at: float


@dataclass(frozen=True, kw_only=True)
class Transition:
    """State change with its reason. `kind` is run, attempt or checkpoint."""

    run: str
    kind: str
    subject: str
    before: str
    after: str
    reason: str
    time: float


@dataclass(frozen=True, kw_only=True)
class Notice:
    """Event of an attempt that is kept for users: an incident, a straggler, a skipped batch or the use of a spare."""

    run: str
    attempt: int
    source: str  # identifies the event within the attempt, together with `seq`
    seq: int
    kind: str  # trainer.protocol.events.EventKind
    generation: int
    time: float
    node: str = ""  # node that the event is about
    data: dict[str, Any] = field(default_factory=dict)  # from the event


@dataclass(frozen=True, kw_only=True)
class Node:
    """Node on which an attempt has run, or that was excluded."""

    name: str
    cluster: str
    first_seen: float
    last_seen: float
    attempts: int = 0
    failures: int = 0
    excluded_until: float = 0.0
    reason: str = ""

    def exclusion_source(self, now: float) -> str:
        """Return PERSON or ORCH; empty if the node is not excluded."""
        if self.excluded_until <= now:
            return ""
        return PERSON if self.reason.startswith(BY_PERSON) else ORCH


PERSON, ORCH = "person", "orch"
"""Sources of an exclusion."""
BY_PERSON = "excluded by "
"""Prefix of the reason for an exclusion by a person, followed by the person and the cause."""
UNTIL_RELEASED = 32503680000.0
"""End of an exclusion without a time limit: the year 3000."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Lease of a controller, which acts under this epoch."""

    epoch: int
    holder: str  # host/space:pid:start time (orchestrator.registry.lease.Holder)
    renewed_at: float
    expires_at: float
    ticked_at: float = 0.0
    scheduler: str = ""  # instance whose runs it covers; empty: all runs


REFUSED = "refused: "
"""Prefix of the answer to a refused request."""
REPLACED_VARIABLES = "replaced_variables"
"""Key in a resume request's arguments: the `env_from` variables whose values the user's shell replaced."""


RELEASE, EXCLUDE = "release", "exclude"
OF_NODES = frozenset({RELEASE, EXCLUDE})
"""Requests about nodes in their run's cluster."""


@dataclass(frozen=True, kw_only=True)
class UserRequest:
    """A user's request to the controller; verb is `cancel`, `resume`, `priority`, or a member of OF_NODES."""

    id: int
    run: str
    verb: str
    args: dict[str, Any]
    asked_at: float
    answered_at: float | None = None
    answer: str = ""


@dataclass(frozen=True, kw_only=True)
class EventCursor:
    """Byte offset up to which an event file of a run has been read."""

    run: str
    file: str
    offset: int
