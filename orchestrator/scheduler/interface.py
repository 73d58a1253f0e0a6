"""The scheduler interface, Slurm's job states, pauses between retries, and tags that tie a job to its attempt."""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from orchestrator.scheduler.job_environment import Submitter


class Backoff:
    """Pauses between retries, for each key. Each pause is twice as long as the last, starting with `first` seconds.

    No pause is longer than `longest`.
    """

    def __init__(self, mono: Callable[[], float], *, first: float = 5.0, longest: float = 60.0) -> None:
        self._first, self._longest, self._mono = first, longest, mono
        self._resting: dict[str, tuple[float, float]] = {}  # start time and length in seconds

    def is_due(self, key: str) -> bool:
        since, seconds = self._resting.get(key, (0.0, 0.0))
        return not 0.0 <= self._mono() - since < seconds

    def start(self, key: str) -> None:
        """Start the pause that follows a try. A key unused for a long time starts over, because job ids are reused."""
        now = self._mono()
        kept = {key: rest for key, rest in self._resting.items() if now - rest[0] < rest[1] + self._longest}
        seconds = min(self._longest, 2 * kept[key][1]) if key in kept else self._first
        self._resting = {**kept, key: (now, seconds)}

    def forget(self, key: str) -> None:
        self._resting.pop(key, None)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources that a job requests; an empty string keeps the site's default."""

    nodes: int
    spares: int = 0  # the job can lose this many of its nodes and continue
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    gpus: str = "per-node"  # option that requests them: per-node or gres
    mem: str = ""
    time: str = "1:00:00"
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    exclude: tuple[str, ...] = ()
    avoided: tuple[str, ...] = ()  # nodes in `exclude` that orch added itself
    signal_lead: int = 120
    sbatch: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A held job: one agent task per node, started as `trainer.agent.main.run_agent(run_dir, attempt)`."""

    name: str  # orch-<run>-<attempt>-<nonce>, never reused
    comment: str  # orch:<run>/<attempt>/<nonce>
    run_dir: Path
    attempt: int
    submission: Path  # submitit's folder
    resources: Resources
    templates: tuple[str, ...] = ("default",)
    template_args: dict[str, str] = field(default_factory=dict)
    python: str = ""
    submitter: Submitter = field(default_factory=Submitter.from_current_process)
    expedite: bool = False  # Slurm may requeue the job after a node failure and keep its other nodes


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """Result of one look-up. `state` is Slurm's state without suffixes ("CANCELLED by 0" is CANCELLED)."""

    job_id: str
    name: str
    state: str
    submit_time: str = ""  # job ids are reused after a crash, so an id alone does not identify a job
    comment: str = ""
    nodes: tuple[str, ...] = ()
    batch_node: str = ""  # the node that starts the job's script; empty: unknown
    exit_code: int | None = None
    signal: int | None = None
    reason: str = ""
    restarts: int = 0
    start_time: float | None = None  # seconds since the epoch by the scheduler's clock, like `end_time`
    end_time: float | None = None  # planned or actual end, in seconds since the epoch
    held: bool = False
    unlaunched: bool = False  # cancelled on its nodes without a signal to its script: it may never have run
    cancelled_by: int | None = None  # id of the user who cancelled it, if known
    nodes_down: tuple[str, ...] = ()  # nodes of an ending or ended job that the scheduler reports down
    sluid: str = ""  # Slurm's identity of one run of a job: a requeued job has another one; empty: unknown
    source: str = "queue"  # or "accounting"
    script_tag: str | None = field(default=None, compare=False)  # job name in its script, if it has no other tag
    files: tuple[str, ...] = field(default=(), compare=False)  # script and standard output: queue only
    settings: Mapping[str, str] = field(default_factory=dict, compare=False)  # partition, account, ...: queue only
    earlier: "tuple[JobStatus, ...]" = field(default=(), compare=False)  # ended runs of a requeued job, by accounting


QUEUED_STATES = frozenset(
    {
        "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "SPECIAL_EXIT",
    }
)  # fmt: skip
"""SPECIAL_EXIT: requeued and held (`scontrol requeuehold state=SpecialExit`)."""
WAITING_STATES = frozenset({"PENDING", "EXPEDITING"})
"""EXPEDITING: the surviving nodes of a requeued job wait for those that replace the failed ones."""
RUNNING_STATES = frozenset({"RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"})
LEAVING_STATES = frozenset({"COMPLETING"})  # processes of the job may still run, so no successor may start
ENDED_STATES = frozenset(
    {
        "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL",
        "DEADLINE", "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED",
    }
)  # fmt: skip

UNRECORDED = "UNRECORDED"
"""Not a Slurm state: the job has left the queue and accounting does not answer, so its end is unknown."""
UNREADABLE = "UNREADABLE"  # not a Slurm state: the output about this job cannot be parsed; `reason` has the cause


class Scheduler(Protocol):
    """Interface to a batch scheduler.

    Every method raises `SlurmUnreachable` instead of guessing when it gets no answer.
    """

    kind: str

    def submit(self, spec: JobSpec) -> str | None:
        """Submit the job held, and return its id if the scheduler reported one.

        Raises SubmitRejected if it was refused, and SubmitAmbiguous if only `find` can determine the outcome.
        """

    def find(self, name_prefix: str, known: Collection[str] = ()) -> list[JobStatus]:
        """Return this user's queued jobs that were submitted under a name with this prefix, or have an id in `known`.

        Jobs are found even if a site has changed their names or comments.
        """

    def poll(self, ids: list[str]) -> dict[str, JobStatus]:
        """Look the ids up in the queue, then in accounting. An id missing from the answer is in neither."""

    def release(self, job_id: str, submission: Path, exclude: tuple[str, ...] | None = None) -> None:
        """Let a held job start, after giving it its payload under the adopted id. Repeating this is harmless.

        With `exclude`, a pending job avoids exactly these nodes from now on. Raises SubmitRejected if Slurm refuses
        this change.
        """

    def out_of_service(self, nodes: frozenset[str]) -> frozenset[str]:
        """Return those of the nodes that get no jobs now because they are down, drained or under maintenance."""

    def cancel(self, job_id: str) -> None:
        """Cancel a job. Repeating this, or cancelling a job that has finished, is not an error."""


PREFIX = "orch-"
TAG_VARIABLE = "ORCH_JOB"
"""Environment variable in which a job's script exports the job name. Sites do not change it, and users can read it."""

_EXPORT = re.compile(rf"^export {TAG_VARIABLE}=(\S+)$", re.MULTILINE)

_NAME = re.compile(r"orch-(\S+)-(\d+)-([0-9a-f]{8})(?!\S)", re.ASCII)
_COMMENT = re.compile(r"orch:([^\s/]+)/(\d+)(?:/([0-9a-f]{8}))?(?![\w/])", re.ASCII)
_FOLDER = re.compile(r"(.*/([^/]+)/attempts/(\d+)/submission)/[^/]*", re.DOTALL)


class JobTag(NamedTuple):
    """The attempt that one of a job's tags identifies. A tag parsed from a path has a folder in place of the nonce."""

    run: str
    attempt: int
    nonce: str = ""
    folder: str = ""

    def matches(self, name_prefix: str) -> bool:
        """Return whether a job of this attempt may have a name with this prefix."""
        name = f"{PREFIX}{self.run}-{self.attempt}-{self.nonce}"
        return name.startswith(name_prefix) or (not self.nonce and name_prefix.startswith(name))


def job_comment(run: str, attempt: int, nonce: str) -> str:
    """Return the job comment, which is as unique as the job name."""
    return f"orch:{run}/{attempt}/{nonce}"


def tags(job: JobStatus) -> tuple[JobTag, ...]:
    """Return all orch tags of the job, the most reliable first; its script's tag counts only if there is no other.

    Name and comment must begin with the tag: a user's job named `eval-` plus an orch name is not orch's.
    """
    return _parse_tags(job.name, job.comment, tuple(job.files), job.script_tag)


@lru_cache(maxsize=4096)  # each pass needs these several times per job
def _parse_tags(name: str, comment: str, files: tuple[str, ...], script_tag: str | None) -> tuple[JobTag, ...]:
    marks = (_NAME.match(name), _COMMENT.match(comment))
    paths = (_FOLDER.fullmatch(path) for path in files)
    script = _NAME.match(script_tag or "")
    return (
        *(JobTag(match[1], int(match[2]), match[3] or "") for match in marks if match),
        *(JobTag(match[2], int(match[3]), folder=match[1]) for match in paths if match),
        *((JobTag(script[1], int(script[2]), script[3]),) if script else ()),
    )


def find_script_tag(script: str) -> str:
    """Return the job name that a batch script exports, or "" for a script that is not orch's."""
    found = _EXPORT.search(script)
    return found[1] if found else ""


def find_name_and_comment(text: str) -> tuple[str, str]:
    """Return a possible job name and comment within unparsable text, or "" if absent."""
    name, comment = _NAME.search(text), _COMMENT.search(text)
    return name[0] if name else "", comment[0] if comment else ""


def is_marked(job: JobStatus, name_prefix: str, known: Collection[str]) -> bool:
    """Return whether this may be an orch job submitted under a name with this prefix; any id in `known` counts."""
    named = job.job_id in known or job.name.startswith(name_prefix)
    return named or any(tag.matches(name_prefix) for tag in tags(job))
