"""Failure kinds, exit codes, and outcome files of ranks and attempts."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, read_json, reserve, write_durably, write_reserved
from trainer.protocol.plain_data import build
from trainer.protocol.secrets.secret_redaction import in_use

MOST_BYTES = 16 << 20
"""Maximum size of an outcome file."""
LOSS_SPIKE = "LossSpike"
"""Exception raised by all ranks when a loss is far above the previous ones."""


class ExitCode(IntEnum):
    """Exit codes of ranks and agents. Users' scripts may depend on them."""

    FINISHED = 0
    ERROR = 1
    STORAGE = 74  # sysexits' EX_IOERR: a report that could not be written to a file
    RETRY = 75
    STOPPED_AFTER_SAVE = 76
    NODE_SUSPECT = 77
    NEVER_RETRY = 78


class FailureKind(StrEnum):
    """Why an attempt or a generation ended, passed unchanged to `recovery.retry_policy.decide`.

    A kind's docstring lists its signs and, in a second paragraph, the response: a row of docs/failure-kinds.md.
    """

    RANK_KILLED = "rank_killed"
    """A signal killed a rank.

    All ranks restart in place. A new job follows once `recovery.restarts_in_place` is exhausted."""
    OUT_OF_MEMORY = "out_of_memory"
    """SIGKILL with an entry in `/dev/kmsg` or in the cgroup's `oom_kill`; `torch.OutOfMemoryError` or `MemoryError`;
    Slurm's OUT_OF_MEMORY.

    Same as `rank_killed`. HELD if it occurs before the first step, twice at the same step within a minute of the
    restart, or in an attempt that saved nothing new: `orch resume RUN cluster.mem=64G`, or a smaller
    `train.micro_batch_size`."""
    USER_ERROR = "user_error"
    """An exception before the run's first step; the same exception twice at the same step, within a minute of the
    restart; exit code 78; a state that cannot be saved (docs/saving.md); a workload that no node can import;
    repeated failures of a `command:` (docs/torchrun-scripts.md).

    FAILED with the traceback."""
    EXCEPTION = "exception"
    """Any other exception or exit code of the training code.

    Same as `rank_killed`."""
    NODE_LOST = "node_lost"
    """Slurm's NODE_FAIL; `scontrol requeue`; a signal with `DUE TO NODE FAILURE` in the job's log, or a node that
    is down.

    A new job without that node."""
    AGENT_LOST = "agent_lost"
    """An agent disconnected or froze; a job went silent or left no outcome.

    A spare takes over, or else a new job."""
    NODE_SUSPECT = "node_suspect"
    """A failed preflight; exit code 77; a rank that survives SIGKILL for a minute; a GPU driver that does not answer
    for 20 s; a workload that only this node cannot import.

    A spare takes over, or else a new job without that node."""
    PREEMPTED = "preempted"
    """Slurm's PREEMPTED; a signal that stopped the job with time left and no other cause.

    A save if there is time, then a new job."""
    TIME_LIMIT = "time_limit"
    """The deadline, Slurm's signal or TIMEOUT; a signal near the job's current limit. A node's wrong clock costs at
    most 5 % of the limit.

    A save on all ranks before the end, then a new job."""
    CANCELLED = "cancelled"
    """Slurm's CANCELLED, not requested by orch, for a job that had started or was waiting for nodes.

    HELD."""
    JOB_LOST = "job_lost"
    """The job is not in the queue, accounting shows no end for it, and its heartbeat is silent; or three submissions
    produced no job, and sbatch printed an id for at most half of them.

    The job is cancelled by its id, and a new one submitted."""
    NODES_MISSING = "nodes_missing"
    """A job waited for its nodes for longer than `recovery.patience`, and a smaller one could start.

    The job is cancelled; the next one requests fewer nodes immediately."""
    LAUNCH_FAILED = "launch_failed"
    """The job ended before its agents agreed to start, or a node could not launch it (a failing prolog, a full
    `slurmd` disk, a missing container runtime). Slurm may report CANCELLED.

    A new job. It counts as a try if the batch script ended on its own and no attempt of the run has trained."""
    SUBMIT_REJECTED = "submit_rejected"
    """sbatch refused the job for a reason that no outage explains (an unknown partition); secrets are missing or
    readable by others (docs/security.md).

    HELD with the message and the command to type."""
    SUBMIT_DEFERRED = "submit_deferred"
    """sbatch refused the job for a reason that may clear: a limit on your jobs, maintenance, load, an unknown message;
    account, QOS or size, if Slurm has accepted a job of this run before.

    The job is submitted again later."""
    SUBMISSION_LOST = "submission_lost"
    """Three submissions produced no job, and sbatch printed an id for most of them.

    HELD, with the ids."""
    HANG = "hang"
    """No rank made progress for longer than the run's history explains (docs/watching.md).

    Evidence is kept, and all ranks restart in place. Twice on one node: a spare, or else a new job. In two attempts: a
    new job without that node."""
    DESYNC = "desync"
    """Ranks called different collectives.

    HELD with the two calls, because this is a bug in the program."""
    NUMERIC = "numeric"
    """NaN, infinity or a loss spike (docs/watching.md).

    Restart from the last good state in memory, without that batch. HELD if the same batch fails again, if NaN recurs at
    the same step, or if `detection.spike.roll_backs` is exhausted."""
    STORAGE = "storage"
    """Disk full, quota, read-only, I/O error, `ulimit -f`; exit code 74; a final save that fails, or a time limit while
    saves fail; no usable checkpoint; more than `checkpoint.max_unsaved_steps` unsaved steps; a run folder that does not
    respond for a minute or is not writable; missing files of torch or orch in a run that has trained.

    A new job, once there is room (docs/failures.md). HELD if two jobs in a row find every checkpoint damaged."""
    INSTALLATION = "installation"
    """Nodes with different versions of orch; a hard limit below 1,024 open files on every node; an environment variable
    that torch, gloo or NCCL cannot use; an image whose Python is too old or lacks a package; a damaged
    `cluster.stage.archive`, or a folder of `cluster.stage.to` or `cluster.caches` that no node can use.

    HELD with the versions, the limit, the variable, the package or the folder."""
    UNKNOWN = "unknown"
    """No known cause; a rank that only lost the connection to a peer; in a run that has trained, name resolution, a
    connection, HTTP 429, 500 or 502 to 504; `ulimit -u` or pids.max; an exit of a `command:` that may not be its fault.

    All ranks restart in place, then a new job. After an outage, or when no thread or process can be created, the job
    waits first."""


MORE_MEMORY = "give the job more (cluster.mem), or use less (train.micro_batch_size, train.activation_checkpointing)"
"""Remedies for OUT_OF_MEMORY on a node."""


class AttemptResult(StrEnum):
    """Result of an attempt according to its coordinator."""

    FINISHED = "finished"  # all steps trained, final checkpoint committed
    STOPPED = "stopped"  # agreed stop with a save; `reason` gives its cause
    FAILED = "failed"


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """One of several root causes of a failure."""

    rank: int
    node: str
    kind: str  # as in an incident
    reason: str


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Earliest root cause of a failure. Secondary failures of peers are recorded elsewhere."""

    kind: FailureKind
    reason: str
    rank: int | None = None
    node: str | None = None
    step: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    exception: str | None = None  # class name
    message: str | None = None  # of the exception
    evidence: str | None = None  # path, relative to the run directory
    lines: tuple[str, ...] = ()  # last log lines of a command's rank
    culprits: tuple[Culprit, ...] = ()  # all root causes if there are several; `rank` and `node` belong to the first
    room: int = 0  # size in bytes of the checkpoint that did not fit, if known
    script: bool = False  # the batch script exited before any agent started
    drill: str = ""  # kind of the drill that caused it; empty: not a drill

    @property
    def nodes(self) -> tuple[str, ...]:
        """Return the named nodes, each once, starting with the node of the first root cause."""
        names = (self.node, *(one.node for one in self.culprits))
        return tuple(dict.fromkeys(name for name in names if name is not None))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Failure":
        return build(cls, fields)


def legible(text: str) -> str:
    """Return `text` with lone surrogates, which come from file names that are not UTF-8, escaped."""
    return text.encode(errors="backslashreplace").decode()


def _line(fields: Any) -> bytes:
    """Return the fields as encoded JSON, without secrets."""
    return in_use().record(dump_line(_all_legible(fields))).encode()


def _all_legible(value: Any) -> Any:
    if isinstance(value, str):
        return legible(value)
    if isinstance(value, dict):
        return {key: _all_legible(item) for key, item in value.items()}
    return [_all_legible(item) for item in value] if isinstance(value, (list, tuple)) else value


class AgentEnd(StrEnum):
    """Why an agent exited without an order from its coordinator."""

    FROZEN = "frozen"  # its own node found it frozen and killed it
    SILENT = "silent"  # no message from the coordinator for too long
    GONE = "gone"  # its connection to the coordinator closed
    REFUSED = "refused"  # the coordinator speaks a different protocol


@dataclass(frozen=True, kw_only=True)
class AgentReport:
    """`outcomes/agent-NNNN.json`, an agent's report of an exit that the coordinator cannot report."""

    node: int
    name: str
    end: AgentEnd
    reason: str
    time: float

    def write(self, path: Path) -> None:
        write_durably(path, _line(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "AgentReport":
        """Parse a report. Raises OSError, ValueError or TypeError."""
        return build(cls, read_json(path, MOST_BYTES))


@dataclass(frozen=True, kw_only=True)
class AttemptOutcome:
    """`outcome.json`, the outcome of an attempt according to its coordinator."""

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
        """Reserve disk space for the outcome, so that it can be written on a full disk. Raises OSError."""
        reserve(path)

    def write(self, path: Path) -> None:
        write_reserved(path, _line({"schema": "orch.outcome/1", **asdict(self)}))

    @classmethod
    def read(cls, path: Path) -> "AttemptOutcome":
        """Parse an outcome. Raises OSError if it is missing, ValueError or TypeError if it is damaged."""
        return build(cls, read_json(path, MOST_BYTES))


class Budget(StrEnum):
    """Retry budget that a failure without progress consumes. A new checkpoint restores it in full."""

    PERSON = "person"  # recurs until a user intervenes: no retry
    TRIES = "tries"  # caused by the program or the cluster: `recovery.max_failures`
    TIME = "time"  # caused by the cluster, which recovers: `recovery.no_progress_hours`
    NOTHING = "nothing"  # ended by orch before it began: retried without a pause


class NodeBlame(StrEnum):
    """Strength of the evidence against the node that a failure names."""

    NOTHING = "nothing"
    WEAK = "weak"  # it happened on the node: evidence only if more frequent than on other nodes
    NODE = "node"  # sufficient evidence against the node


class Losses(StrEnum):
    """Failure rate that a failure counts towards, used to estimate how many unsaved steps will be lost."""

    NOBODY = "nobody"
    RUN = "run"  # a bug or lack of memory affects only its own run
    CLUSTER = "cluster"


@dataclass(frozen=True, kw_only=True)
class FailureTraits:
    """Traits of a failure kind, a row in TRAITS."""

    budget: Budget
    blame: NodeBlame = NodeBlame.NOTHING
    losses: Losses = Losses.NOBODY
    restarts_in_place: bool = False  # a new generation on the same nodes can fix it
    comes_back: bool = False  # recurs within a job until a user intervenes
    examined: bool = False  # declared after all ranks were examined, so no rank will report anything else
    of_the_state: bool = False  # state loaded from a checkpoint can be the cause
    of_the_program: bool = False  # raised by the program itself
    fixed_by_code: bool = False  # changing the user's code can fix it
    seen_inside: bool = False  # Slurm's status of the job must not replace it
    asked_to_stop: bool = False  # the job was asked to stop: not a failure, and never the effect of a drill
    free: bool = False  # not counted as a failure while the run makes progress
    asked_by_slurm: bool = False  # a reason for Slurm to ask a job to stop
    slurm_states: tuple[str, ...] = ()  # states of a job in which Slurm itself names this cause
    ends_run: bool = False  # whether the run is FAILED, not HELD, if no retry can fix it
    final: str = "{reason}"  # message if no retry can fix it


TRAITS: dict[FailureKind, FailureTraits] = {
    FailureKind.RANK_KILLED: FailureTraits(
        budget=Budget.TRIES, blame=NodeBlame.WEAK, losses=Losses.CLUSTER, restarts_in_place=True, of_the_state=True
    ),
    FailureKind.OUT_OF_MEMORY: FailureTraits(
        budget=Budget.TRIES, losses=Losses.RUN, restarts_in_place=True, of_the_program=True, seen_inside=True,
        fixed_by_code=True, slurm_states=("OUT_OF_MEMORY",),
    ),
    FailureKind.USER_ERROR: FailureTraits(
        budget=Budget.PERSON, losses=Losses.RUN, comes_back=True, of_the_program=True, seen_inside=True,
        fixed_by_code=True, ends_run=True, final="the training code failed: {reason}",
    ),
    FailureKind.EXCEPTION: FailureTraits(
        budget=Budget.TRIES, losses=Losses.RUN, restarts_in_place=True, of_the_state=True, of_the_program=True,
        seen_inside=True, fixed_by_code=True,
    ),
    FailureKind.NODE_LOST: FailureTraits(
        budget=Budget.TIME, blame=NodeBlame.NODE, losses=Losses.CLUSTER, asked_by_slurm=True,
        slurm_states=("NODE_FAIL",),
    ),
    FailureKind.AGENT_LOST: FailureTraits(budget=Budget.TIME, blame=NodeBlame.WEAK, losses=Losses.CLUSTER),
    FailureKind.NODE_SUSPECT: FailureTraits(
        budget=Budget.TIME, blame=NodeBlame.NODE, losses=Losses.CLUSTER, seen_inside=True
    ),
    FailureKind.PREEMPTED: FailureTraits(
        budget=Budget.TIME, losses=Losses.CLUSTER, asked_to_stop=True, free=True, asked_by_slurm=True,
        slurm_states=("PREEMPTED",),
    ),
    FailureKind.TIME_LIMIT: FailureTraits(
        budget=Budget.TRIES, asked_to_stop=True, free=True, asked_by_slurm=True, slurm_states=("TIMEOUT", "DEADLINE"),
    ),
    FailureKind.CANCELLED: FailureTraits(budget=Budget.PERSON, asked_to_stop=True),
    FailureKind.JOB_LOST: FailureTraits(budget=Budget.TIME, losses=Losses.CLUSTER),
    FailureKind.NODES_MISSING: FailureTraits(budget=Budget.NOTHING),
    FailureKind.LAUNCH_FAILED: FailureTraits(
        budget=Budget.TIME, blame=NodeBlame.WEAK, slurm_states=("BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL"),
    ),
    FailureKind.SUBMIT_REJECTED: FailureTraits(budget=Budget.PERSON, final="the job was refused: {reason}"),
    FailureKind.SUBMIT_DEFERRED: FailureTraits(budget=Budget.TIME),
    FailureKind.SUBMISSION_LOST: FailureTraits(budget=Budget.PERSON),
    FailureKind.HANG: FailureTraits(budget=Budget.TRIES, blame=NodeBlame.WEAK, restarts_in_place=True, examined=True),
    # These two would recur at the same step, on any nodes.
    FailureKind.DESYNC: FailureTraits(
        budget=Budget.PERSON, comes_back=True, examined=True, fixed_by_code=True,
        final="ranks called different collectives: {reason}; this is a bug in the program, or in orch with the "
        "built-in model: make sure every rank takes the same path through it",
    ),
    FailureKind.NUMERIC: FailureTraits(
        budget=Budget.PERSON, comes_back=True, of_the_state=True, fixed_by_code=True,
        final="the loss became unusable: {reason}; fix the data or the code, or continue with other settings "
        "(optimizer.lr, optimizer.clip_norm, detection.spike): from the last good checkpoint in `orch ckpt ls {run}` "
        "with `orch submit --from {run}@STEP KEY=VALUE`, or if there is none with `orch resume {run} KEY=VALUE`",
    ),
    FailureKind.STORAGE: FailureTraits(budget=Budget.TIME, seen_inside=True),
    FailureKind.INSTALLATION: FailureTraits(budget=Budget.PERSON, comes_back=True, seen_inside=True),
    FailureKind.UNKNOWN: FailureTraits(budget=Budget.TRIES, losses=Losses.CLUSTER),
}  # fmt: skip
"""Traits of every kind. See docs/failure-kinds.md for the budgets."""


def select_kinds(holds: Callable[[FailureTraits], bool]) -> frozenset[FailureKind]:
    """Return the kinds whose traits satisfy `holds`."""
    return frozenset(kind for kind, traits in TRAITS.items() if holds(traits))
