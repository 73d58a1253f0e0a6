"""Failure kinds, exit codes, and outcome files of ranks and attempts."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, read_json, reserve, write_durably, write_reserved
from trainer.contract.secrets.secret_redaction import in_use

MOST_BYTES = 16 << 20
"""Beyond this nothing is an outcome."""
LOSS_SPIKE = "LossSpike"
"""The exception of all ranks alike when a loss is far above those before it."""


class ExitCode(IntEnum):
    """Exit codes of ranks and agents; scripts and sites may depend on them."""

    FINISHED = 0
    ERROR = 1
    STORAGE = 74  # sysexits' EX_IOERR: says what no file could say
    RETRY = 75
    STOPPED_AFTER_SAVE = 76
    NODE_SUSPECT = 77
    NEVER_RETRY = 78


class FailureKind(StrEnum):
    """What ended an attempt or a generation, kept as it was until `recovery.retry_policy.decide` has seen it."""

    RANK_KILLED = "rank_killed"  # a rank died of a signal
    OUT_OF_MEMORY = "out_of_memory"  # the kernel killed a rank for lack of memory, or an allocation failed
    USER_ERROR = "user_error"  # a failure of the training code that recurs: it has, or its exit code declares it
    EXCEPTION = "exception"  # an exception of the training code, or its exit code, that is not shown to come back
    NODE_LOST = "node_lost"  # the node or its Slurm daemon died
    AGENT_LOST = "agent_lost"  # an agent process died or fell silent, its node is not known to be bad
    NODE_SUSPECT = "node_suspect"  # preflight or a rank blames its own node
    PREEMPTED = "preempted"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"  # by somebody other than orch
    JOB_LOST = "job_lost"  # Slurm no longer knows the job
    NODES_MISSING = "nodes_missing"  # orch gave up waiting for all nodes: the next job asks for fewer
    LAUNCH_FAILED = "launch_failed"  # the job ended before its agents agreed to start
    SUBMIT_REJECTED = "submit_rejected"  # Slurm answered that it will never take this job
    SUBMIT_DEFERRED = "submit_deferred"  # Slurm answered that it does not take this job now
    SUBMISSION_LOST = "submission_lost"  # Slurm acknowledged the job each time, and never listed it
    HANG = "hang"  # a rank stopped moving, and its peers wait for it
    DESYNC = "desync"  # ranks called different collectives: a bug of the program
    NUMERIC = "numeric"  # NaN, infinity or a loss spike that a rollback did not fix
    STORAGE = "storage"  # disk full, quota, read-only or I/O error
    INSTALLATION = "installation"  # nodes have different versions of orch
    UNKNOWN = "unknown"


MORE_MEMORY = "give the job more (cluster.mem), or use less (train.micro_batch_size, train.activation_checkpointing)"
"""What helps against OUT_OF_MEMORY on a node."""


class AttemptResult(StrEnum):
    """How the coordinator saw its attempt end."""

    FINISHED = "finished"  # all steps trained, final checkpoint committed
    STOPPED = "stopped"  # agreed stop with a save; `reason` says what asked for it
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """One of several roots of a failure."""

    rank: int
    node: str
    kind: str  # as of an incident
    reason: str

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Culprit":
        return cls(**{key: fields[key] for key in cls.__dataclass_fields__})


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The earliest root cause; the secondary failures of its peers stand elsewhere."""

    kind: FailureKind
    reason: str
    rank: int | None = None
    node: str | None = None
    step: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    exception: str | None = None  # class name
    evidence: str | None = None  # path relative to the run directory
    lines: tuple[str, ...] = ()  # the last ones in the log of a command's rank
    culprits: tuple[Culprit, ...] = ()  # all roots, where there are several; `rank` and `node` are those of the first
    room: int = 0  # bytes of the checkpoint that there was no room for, as far as is known
    script: bool = False  # the batch script exited before any agent started
    drill: str = ""  # kind of the drill that brought it about on purpose; empty: none

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that it names, each once, that of the first root first."""
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
    """`text` with lone surrogates (bytes of a file name that are no UTF-8) spelled out, so that it can be written."""
    return text.encode(errors="backslashreplace").decode()


def _line(fields: Any) -> bytes:
    """JSON that every reader can write down again, without secrets."""
    return in_use().record(dump_line(_all_legible(fields))).encode()


def _all_legible(value: Any) -> Any:
    if isinstance(value, str):
        return legible(value)
    if isinstance(value, dict):
        return {key: _all_legible(item) for key, item in value.items()}
    return [_all_legible(item) for item in value] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """What a rank wrote about its own end; absent when it was killed."""

    rank: int
    generation: int
    node: str
    step: int
    exit_code: int
    time: float
    exception: str | None = None  # class name
    message: str | None = None
    traceback: str | None = None
    secondary: bool = False  # the exception only repeats that a peer went away
    position: int | None = None  # in the data, of the batch of a bad step

    def to_line(self) -> str:
        return dump_line(_all_legible(asdict(self)))


class AgentEnd(StrEnum):
    """Why an agent ended without an order of its coordinator."""

    FROZEN = "frozen"  # its own node saw it stand still, and ended it
    SILENT = "silent"  # no message of the coordinator came for too long
    GONE = "gone"  # its connection to the coordinator ended
    REFUSED = "refused"  # the coordinator speaks another protocol


@dataclass(frozen=True, kw_only=True)
class AgentReport:
    """`outcomes/agent-NNNN.json`: an end that no coordinator can report."""

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
    """`outcome.json`: how the coordinator saw its attempt end."""

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
        """Take the room for an outcome, so that a disk that is full by then cannot keep it away; raises OSError."""
        reserve(path)

    def write(self, path: Path) -> None:
        write_reserved(path, _line({"schema": "orch.outcome/1", **asdict(self)}))

    @classmethod
    def read(cls, path: Path) -> "AttemptOutcome":
        """Parse an outcome; raises OSError when there is none, ValueError when it is damaged."""
        fields = read_json(path, MOST_BYTES)
        fields.pop("schema")
        failure = fields.pop("failure")
        fields["result"] = AttemptResult(fields["result"])
        return cls(**fields, failure=Failure.from_json(failure) if failure else None)


class Budget(StrEnum):
    """What a failure without progress uses up; a new checkpoint gives all of it back."""

    PERSON = "person"  # comes back until somebody changes something: no retry
    TRIES = "tries"  # the program or the cluster: `recovery.max_failures`
    TIME = "time"  # the cluster, which heals: `recovery.no_progress_hours`
    NOTHING = "nothing"  # orch itself ended it before it began: no pause either


class Blame(StrEnum):
    """What a failure that names a node says of it."""

    NOTHING = "nothing"
    WEAK = "weak"  # it happened there: evidence only when it happens more often than elsewhere
    NODE = "node"  # the node by itself


class Losses(StrEnum):
    """In which rate of failures it counts: whose unsaved steps it may cost again."""

    NOBODY = "nobody"
    RUN = "run"  # a bug, or a need for memory, is its own run's affair
    CLUSTER = "cluster"


@dataclass(frozen=True, kw_only=True)
class FailureTraits:
    """One row of the table."""

    budget: Budget
    blame: Blame = Blame.NOTHING
    losses: Losses = Losses.NOBODY
    restarts_in_place: bool = False  # a new generation on the same nodes mends it
    comes_back: bool = False  # within a job, until somebody has changed something
    examined: bool = False  # declared after all ranks were examined: no rank will report anything else
    of_the_state: bool = False  # what was loaded from a checkpoint can be the cause
    of_the_program: bool = False  # a program raises it by itself
    seen_inside: bool = False  # Slurm's word about the end of the job must not cover it
    asked_to_stop: bool = False  # the job says that it had to stop: no failure of anybody's, and no drill's
    free: bool = False  # nobody's failure while the run makes progress
    asked_by_slurm: bool = False  # why Slurm asks a job to stop


TRAITS: dict[FailureKind, FailureTraits] = {
    FailureKind.RANK_KILLED: FailureTraits(
        budget=Budget.TRIES, blame=Blame.WEAK, losses=Losses.CLUSTER, restarts_in_place=True, of_the_state=True
    ),
    FailureKind.OUT_OF_MEMORY: FailureTraits(
        budget=Budget.TRIES, losses=Losses.RUN, restarts_in_place=True, of_the_program=True, seen_inside=True
    ),
    FailureKind.USER_ERROR: FailureTraits(
        budget=Budget.PERSON, losses=Losses.RUN, comes_back=True, of_the_state=True, of_the_program=True,
        seen_inside=True,
    ),
    FailureKind.EXCEPTION: FailureTraits(
        budget=Budget.TRIES, losses=Losses.RUN, restarts_in_place=True, of_the_state=True, of_the_program=True,
        seen_inside=True,
    ),
    FailureKind.NODE_LOST: FailureTraits(
        budget=Budget.TIME, blame=Blame.NODE, losses=Losses.CLUSTER, asked_by_slurm=True
    ),
    FailureKind.AGENT_LOST: FailureTraits(budget=Budget.TIME, blame=Blame.WEAK, losses=Losses.CLUSTER),
    FailureKind.NODE_SUSPECT: FailureTraits(
        budget=Budget.TIME, blame=Blame.NODE, losses=Losses.CLUSTER, seen_inside=True
    ),
    FailureKind.PREEMPTED: FailureTraits(
        budget=Budget.TIME, losses=Losses.CLUSTER, asked_to_stop=True, free=True, asked_by_slurm=True
    ),
    FailureKind.TIME_LIMIT: FailureTraits(budget=Budget.TRIES, asked_to_stop=True, free=True, asked_by_slurm=True),
    FailureKind.CANCELLED: FailureTraits(budget=Budget.PERSON, asked_to_stop=True),
    FailureKind.JOB_LOST: FailureTraits(budget=Budget.TIME, losses=Losses.CLUSTER),
    FailureKind.NODES_MISSING: FailureTraits(budget=Budget.NOTHING),
    FailureKind.LAUNCH_FAILED: FailureTraits(budget=Budget.TIME, blame=Blame.WEAK),
    FailureKind.SUBMIT_REJECTED: FailureTraits(budget=Budget.PERSON),
    FailureKind.SUBMIT_DEFERRED: FailureTraits(budget=Budget.TIME),
    FailureKind.SUBMISSION_LOST: FailureTraits(budget=Budget.PERSON),
    FailureKind.HANG: FailureTraits(budget=Budget.TRIES, blame=Blame.WEAK, restarts_in_place=True, examined=True),
    FailureKind.DESYNC: FailureTraits(budget=Budget.PERSON, comes_back=True, examined=True),
    FailureKind.NUMERIC: FailureTraits(budget=Budget.PERSON, comes_back=True, of_the_state=True),
    FailureKind.STORAGE: FailureTraits(budget=Budget.TIME, seen_inside=True),
    FailureKind.INSTALLATION: FailureTraits(budget=Budget.PERSON, comes_back=True, seen_inside=True),
    FailureKind.UNKNOWN: FailureTraits(budget=Budget.TRIES, losses=Losses.CLUSTER),
}  # fmt: skip
"""Every kind; docs/failures.md has it in words, and a test compares the two."""


def kinds_with(holds: Callable[[FailureTraits], bool]) -> frozenset[FailureKind]:
    """The kinds of which this is true."""
    return frozenset(kind for kind, traits in TRAITS.items() if holds(traits))
