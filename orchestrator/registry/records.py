"""Rows of the registry as plain values: what the store returns."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.states import AttemptState, RunState, Trust


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run; times are seconds since the epoch."""

    name: str
    state: RunState
    reason: str
    cluster: str  # slurm or local
    run_dir: str
    config_digest: str  # of its next attempt: `orch resume` may change it
    total_steps: int
    step: int = 0
    loss: float | None = None
    not_before: float = 0.0  # no new attempt before this time
    fresh_from: int = 1  # budgets count attempts from this number on (`orch resume` moves it)
    created_at: float = 0.0
    updated_at: float = 0.0
    identity: dict[str, Any] = field(default_factory=dict)  # code, environment, data
    scheduler: str = ""  # the instance that its jobs belong to (scheduler/instance.py); empty: not known
    tags: tuple[str, ...] = ()  # people's own, sorted
    notified: dict[str, Any] = field(default_factory=dict)  # orchestrator.notifications.channels.Notified as JSON
    removal: str = ""  # how far `orch rm` has come (orchestrator/registry/operations/removal_writes.py)

    @property
    def domain(self) -> str:
        """What its nodes belong to: two clusters may have nodes of one name."""
        return self.scheduler or self.cluster


@dataclass(frozen=True, kw_only=True)
class NewRun:
    """What a run is made of; its name is `slug` with the next free number, its folder lies in `root`."""

    slug: str
    cluster: str  # slurm or local
    root: Path
    config_digest: str
    total_steps: int
    identity: dict[str, Any]
    scheduler: str = ""  # as in Run
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt of a run, numbered from 1."""

    run: str
    number: int
    state: AttemptState
    nonce: str
    job_name: str
    reason: str = ""
    epoch: int = 0
    job_id: str | None = None
    submit_time: str | None = None
    job_state: str | None = None  # Slurm's own word, last seen
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
    failure: dict[str, Any] | None = None  # trainer.contract.failures.outcome.Failure as JSON
    decision: dict[str, Any] | None = None  # {action, reason}
    scheduler: str = ""  # as the run's, when this attempt was begun
    config_digest: str = ""  # likewise; of a smaller attempt the config that was derived from it
    smaller_world: dict[str, Any] | None = None  # {nodes, spare_nodes, of, of_spare_nodes, reason, base}, else None

    @property
    def base_digest(self) -> str:
        """Of the run's config as it was when this attempt was begun."""
        return str(self.smaller_world["base"]) if self.smaller_world else self.config_digest


@dataclass(frozen=True, kw_only=True)
class Submission:
    """One call of sbatch for an attempt, numbered from 1 within it."""

    run: str
    attempt: int
    number: int
    submitted_at: float
    job_id: str | None = None  # what sbatch answered
    outcome: str = ""  # ADOPTED, REFUSED, CANCELLED (a duplicate); empty while nobody knows what became of it


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One generation within an attempt, numbered from 1."""

    run: str
    attempt: int
    number: int
    started_at: float
    ended_at: float | None = None
    resumed_from: int | None = None
    last_step: int | None = None
    reason: str = ""
    failure: dict[str, Any] | None = None
    tier: str = ""  # where `resumed_from` was loaded from: `memory`, or the path of a tier


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One checkpoint folder of a run; `name` is the folder's name, `path` where it was committed first."""

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
    seconds: float | None = None  # from its beginning to its commit
    stall: float | None = None  # for which training stood still
    manifest: str = ""  # digest of its manifest when it was committed; empty: not known


@dataclass(frozen=True, kw_only=True)
class RestoreTest:
    """One restore test: the run `test` restores a checkpoint of `run` on one layout."""

    test: str
    run: str
    checkpoint: str
    layout: str
    step: int
    begun_at: float
    ended_at: float | None = None  # when its verdict was written down
    verdict: str = ""  # trainer.contract.restore_test.Outcome; empty while it goes on
    reason: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)
    forced: bool = False  # a person asked for it: no schedule, no budget


@dataclass(frozen=True, kw_only=True)
class Copy:
    """A checkpoint in a further tier, `tier` being that tier's path."""

    run: str
    name: str
    tier: str
    path: str
    bytes: int
    copied_at: float


@dataclass(frozen=True, kw_only=True)
class Transition:
    """One change of state with its reason. `kind` is run, attempt or checkpoint."""

    run: str
    kind: str
    subject: str
    before: str
    after: str
    reason: str
    time: float


@dataclass(frozen=True, kw_only=True)
class Notice:
    """An event of an attempt that people look for later: an incident, a straggler, a batch left out, a spare used."""

    run: str
    attempt: int
    source: str  # with `seq` the event's identity within the attempt
    seq: int
    kind: str  # trainer.contract.events.EventKind
    generation: int
    time: float
    node: str = ""  # that it speaks of
    data: dict[str, Any] = field(default_factory=dict)  # the event's own


@dataclass(frozen=True, kw_only=True)
class Node:
    """A node that some attempt has run on."""

    name: str
    cluster: str
    first_seen: float
    last_seen: float
    attempts: int = 0
    failures: int = 0
    excluded_until: float = 0.0
    reason: str = ""

    def excluded_by(self, now: float) -> str:
        """PERSON or ORCH; empty for a node that is not excluded."""
        if self.excluded_until <= now:
            return ""
        return PERSON if self.reason.startswith(BY_PERSON) else ORCH


PERSON, ORCH = "person", "orch"
"""Who may have excluded a node."""
BY_PERSON = "excluded by "
"""How the reason of an exclusion begins that a person has ordered; who and why follow."""
UNTIL_RELEASED = 32503680000.0
"""When an exclusion ends that has no end: the year 3000."""


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Who may act: the controller with this epoch."""

    epoch: int
    holder: str  # host:pid:start time
    renewed_at: float
    expires_at: float
    ticked_at: float = 0.0
    scheduler: str = ""  # the instance whose runs it is for; empty: all runs


REFUSED = "refused: "
"""How the answer to a request begins that was not followed, though it could have been."""


RELEASE, EXCLUDE = "release", "exclude"
OF_NODES = frozenset({RELEASE, EXCLUDE})
"""Requests about nodes of the cluster that their run belongs to."""


@dataclass(frozen=True, kw_only=True)
class UserRequest:
    """A request of a person to the controller; verb is `cancel`, `resume`, or one of OF_NODES."""

    id: int
    run: str
    verb: str
    args: dict[str, Any]
    asked_at: float
    answered_at: float | None = None
    answer: str = ""
