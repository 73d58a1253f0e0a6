"""Failure kinds, exit codes, and outcome files of ranks and attempts."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, read_json, reserve, write_durably, write_reserved
from trainer.protocol.secrets.secret_redaction import in_use

MOST_BYTES = 16 << 20
"""Maximum size of an outcome file."""
LOSS_SPIKE = "LossSpike"
"""Exception raised by all ranks when a loss is far above the previous ones."""


class ExitCode(IntEnum):
    """Exit codes of ranks and agents; scripts and sites may depend on them."""

    FINISHED = 0
    ERROR = 1
    STORAGE = 74  # sysexits' EX_IOERR: a report that could not be written to a file
    RETRY = 75
    STOPPED_AFTER_SAVE = 76
    NODE_SUSPECT = 77
    NEVER_RETRY = 78


class FailureKind(StrEnum):
    """Cause of the end of an attempt or a generation, kept unchanged up to `recovery.retry_policy.decide`."""

    RANK_KILLED = "rank_killed"  # a rank died of a signal
    OUT_OF_MEMORY = "out_of_memory"  # the kernel killed a rank for lack of memory, or an allocation failed
    USER_ERROR = "user_error"  # a recurring failure of the training code: repeated, or declared by its exit code
    EXCEPTION = "exception"  # an exception or exit code of the training code that is not known to recur
    NODE_LOST = "node_lost"  # the node or its Slurm daemon died
    AGENT_LOST = "agent_lost"  # an agent process died or fell silent; its node is not known to be bad
    NODE_SUSPECT = "node_suspect"  # preflight or a rank blames its own node
    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"  # cancelled from outside orch
    JOB_LOST = "job_lost"  # Slurm no longer knows the job
    NODES_MISSING = "nodes_missing"  # orch gave up waiting for all nodes; the next job requests fewer
    LAUNCH_FAILED = "launch_failed"  # the job ended before its agents agreed to start
    SUBMIT_REJECTED = "submit_rejected"  # Slurm rejected the job permanently
    SUBMIT_DEFERRED = "submit_deferred"  # Slurm rejected the job for now
    SUBMISSION_LOST = "submission_lost"  # Slurm acknowledged the job each time, but never listed it
    HANG = "hang"  # a rank stopped moving, and its peers wait for it
    DESYNC = "desync"  # ranks called different collectives: a bug of the program
    NUMERIC = "numeric"  # NaN, infinity or a loss spike that a rollback did not fix
    STORAGE = "storage"  # disk full, quota, read-only or I/O error
    INSTALLATION = "installation"  # nodes have different versions of orch
    UNKNOWN = "unknown"


MORE_MEMORY = "give the job more (cluster.mem), or use less (train.micro_batch_size, train.activation_checkpointing)"
"""Remedies for OUT_OF_MEMORY on a node."""


class AttemptResult(StrEnum):
    """End of an attempt as seen by its coordinator."""

    FINISHED = "finished"  # all steps trained, final checkpoint committed
    STOPPED = "stopped"  # agreed stop with a save; `reason` gives its cause
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """A root cause of a failure that has several."""

    rank: int
    node: str
    kind: str  # as in an incident
    reason: str

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Culprit":
        return cls(**{key: fields[key] for key in cls.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The earliest root cause of a failure; secondary failures of its peers are recorded elsewhere."""

    kind: FailureKind
    reason: str
    rank: int | None = None
    node: str | None = None
    step: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    exception: str | None = None  # class name
    message: str | None = None  # of the exception
    evidence: str | None = None  # path relative to the run directory
    lines: tuple[str, ...] = ()  # last log lines of a command's rank
    culprits: tuple[Culprit, ...] = ()  # all roots if there are several; `rank` and `node` belong to the first
    room: int = 0  # size in bytes of the checkpoint that did not fit, if known
    script: bool = False  # the batch script exited before any agent started
    drill: str = ""  # kind of the drill that caused it; empty: not a drill

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the nodes it names, each once, beginning with the node of the first root."""
        names = (self.node, *(one.node for one in self.culprits))
        return tuple(dict.fromkeys(name for name in names if name is not None))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Failure":
        known = {key: fields[key] for key in cls.__dataclass_fields__ if key in fields}
        lines = tuple(known.get("lines", ()))
        culprits = tuple(Culprit.from_json(one) for one in fields.get("culprits") or ())
        return cls(**{**known, "kind": FailureKind(fields["kind"]), "lines": lines, "culprits": culprits})


def legible(text: str) -> str:
    """Return `text` in encodable form: lone surrogates (bytes of a file name that are not UTF-8) are escaped."""
    return text.encode(errors="backslashreplace").decode()


def _line(fields: Any) -> bytes:
    """Return JSON that can be encoded again, without secrets."""
    return in_use().record(dump_line(_all_legible(fields))).encode()


def _all_legible(value: Any) -> Any:
    if isinstance(value, str):
        return legible(value)
    if isinstance(value, dict):
        return {key: _all_legible(item) for key, item in value.items()}
    return [_all_legible(item) for item in value] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """A rank's own report of its end; absent if it was killed."""

    rank: int
    generation: int
    node: str
    step: int
    exit_code: int
    time: float
    exception: str | None = None  # class name
    message: str | None = None
    traceback: str | None = None
    secondary: bool = False  # the exception only reports that a peer is gone
    position: int | None = None  # data position of a bad step's batch

    def to_line(self) -> str:
        return dump_line(_all_legible(asdict(self)))


class AgentEnd(StrEnum):
    """Cause of an agent's end without an order of its coordinator."""

    FROZEN = "frozen"  # its own node found it frozen and killed it
    SILENT = "silent"  # no message from the coordinator for too long
    GONE = "gone"  # its connection to the coordinator closed
    REFUSED = "refused"  # the coordinator speaks another protocol


@dataclass(frozen=True, kw_only=True)
class AgentReport:
    """`outcomes/agent-NNNN.json`: an end that the coordinator cannot report."""

    node: int
    name: str
    end: AgentEnd
    reason: str
    time: float

    def write(self, path: Path) -> None:
        write_durably(path, _line(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "AgentReport":
        """Parse a report; raises OSError, ValueError or TypeError."""
        fields = read_json(path, MOST_BYTES)
        return cls(**{**fields, "end": AgentEnd(fields["end"])})


@dataclass(frozen=True, kw_only=True)
class AttemptOutcome:
    """`outcome.json`: the end of an attempt as seen by its coordinator."""

    attempt: int
    job_id: str
    result: AttemptResult
    reason: str
    exit_code: int
    step: int
    generations: int
    started_at: float
    ended_at: float
    failure: Failure | None = None

    @staticmethod
    def reserve(path: Path) -> None:
        """Reserve disk space for the outcome, so that it can be written on a full disk; raises OSError."""
        reserve(path)

    def write(self, path: Path) -> None:
        write_reserved(path, _line({"schema": "orch.outcome/1", **asdict(self)}))

    @classmethod
    def read(cls, path: Path) -> "AttemptOutcome":
        """Parse an outcome; raises OSError if it is missing, ValueError if it is damaged."""
        fields = read_json(path, MOST_BYTES)
        fields.pop("schema")
        failure = fields.pop("failure")
        fields["result"] = AttemptResult(fields["result"])
        return cls(**fields, failure=Failure.from_json(failure) if failure else None)


class Budget(StrEnum):
    """Retry budget that a failure without progress uses up; a new checkpoint restores it fully."""

    PERSON = "person"  # recurs until a user intervenes: no retry
    TRIES = "tries"  # caused by the program or the cluster: `recovery.max_failures`
    TIME = "time"  # caused by the cluster, which recovers: `recovery.no_progress_hours`
    NOTHING = "nothing"  # ended by orch before it began: retried without a pause


class NodeBlame(StrEnum):
    """Evidence against the node that a failure names."""

    NOTHING = "nothing"
    WEAK = "weak"  # it happened on the node: evidence only if more frequent than on other nodes
    NODE = "node"  # sufficient evidence against the node


class Losses(StrEnum):
    """Failure rate in which a failure counts, for estimating the loss of unsaved steps."""

    NOBODY = "nobody"
    RUN = "run"  # a bug or lack of memory affects its own run only
    CLUSTER = "cluster"


@dataclass(frozen=True, kw_only=True)
class FailureTraits:
    """A row of the table."""

    budget: Budget
    blame: NodeBlame = NodeBlame.NOTHING
    losses: Losses = Losses.NOBODY
    restarts_in_place: bool = False  # a new generation on the same nodes repairs it
    comes_back: bool = False  # recurs within a job until a user intervenes
    examined: bool = False  # declared after all ranks were examined: no rank will report anything else
    of_the_state: bool = False  # state loaded from a checkpoint can be the cause
    of_the_program: bool = False  # raised by a program itself
    fixed_by_code: bool = False  # a change of the user's code can be its remedy
    seen_inside: bool = False  # Slurm's status of the job must not replace it
    asked_to_stop: bool = False  # the job was asked to stop: not a failure, and never the effect of a drill
    free: bool = False  # not counted as a failure while the run makes progress
    asked_by_slurm: bool = False  # a reason for Slurm to ask a job to stop


TRAITS: dict[FailureKind, FailureTraits] = {
    FailureKind.RANK_KILLED: FailureTraits(
        budget=Budget.TRIES, blame=NodeBlame.WEAK, losses=Losses.CLUSTER, restarts_in_place=True, of_the_state=True
    ),
    FailureKind.OUT_OF_MEMORY: FailureTraits(
        budget=Budget.TRIES, losses=Losses.RUN, restarts_in_place=True, of_the_program=True, seen_inside=True,
        fixed_by_code=True,
    ),
    FailureKind.USER_ERROR: FailureTraits(
        budget=Budget.PERSON, losses=Losses.RUN, comes_back=True, of_the_program=True, seen_inside=True,
        fixed_by_code=True,
    ),
    FailureKind.EXCEPTION: FailureTraits(
        budget=Budget.TRIES, losses=Losses.RUN, restarts_in_place=True, of_the_state=True, of_the_program=True,
        seen_inside=True, fixed_by_code=True,
    ),
    FailureKind.NODE_LOST: FailureTraits(
        budget=Budget.TIME, blame=NodeBlame.NODE, losses=Losses.CLUSTER, asked_by_slurm=True
    ),
    FailureKind.AGENT_LOST: FailureTraits(budget=Budget.TIME, blame=NodeBlame.WEAK, losses=Losses.CLUSTER),
    FailureKind.NODE_SUSPECT: FailureTraits(
        budget=Budget.TIME, blame=NodeBlame.NODE, losses=Losses.CLUSTER, seen_inside=True
    ),
    FailureKind.PREEMPTED: FailureTraits(
        budget=Budget.TIME, losses=Losses.CLUSTER, asked_to_stop=True, free=True, asked_by_slurm=True
    ),
    FailureKind.TIME_LIMIT: FailureTraits(budget=Budget.TRIES, asked_to_stop=True, free=True, asked_by_slurm=True),
    FailureKind.CANCELLED: FailureTraits(budget=Budget.PERSON, asked_to_stop=True),
    FailureKind.JOB_LOST: FailureTraits(budget=Budget.TIME, losses=Losses.CLUSTER),
    FailureKind.NODES_MISSING: FailureTraits(budget=Budget.NOTHING),
    FailureKind.LAUNCH_FAILED: FailureTraits(budget=Budget.TIME, blame=NodeBlame.WEAK),
    FailureKind.SUBMIT_REJECTED: FailureTraits(budget=Budget.PERSON),
    FailureKind.SUBMIT_DEFERRED: FailureTraits(budget=Budget.TIME),
    FailureKind.SUBMISSION_LOST: FailureTraits(budget=Budget.PERSON),
    FailureKind.HANG: FailureTraits(budget=Budget.TRIES, blame=NodeBlame.WEAK, restarts_in_place=True, examined=True),
    FailureKind.DESYNC: FailureTraits(budget=Budget.PERSON, comes_back=True, examined=True, fixed_by_code=True),
    FailureKind.NUMERIC: FailureTraits(
        budget=Budget.PERSON, comes_back=True, of_the_state=True, fixed_by_code=True
    ),
    FailureKind.STORAGE: FailureTraits(budget=Budget.TIME, seen_inside=True),
    FailureKind.INSTALLATION: FailureTraits(budget=Budget.PERSON, comes_back=True, seen_inside=True),
    FailureKind.UNKNOWN: FailureTraits(budget=Budget.TRIES, losses=Losses.CLUSTER),
}  # fmt: skip
"""Traits of every kind; docs/failures.md describes them, and a test compares the two."""


def select_kinds(holds: Callable[[FailureTraits], bool]) -> frozenset[FailureKind]:
    """Return the kinds whose traits satisfy `holds`."""
    return frozenset(kind for kind, traits in TRAITS.items() if holds(traits))
