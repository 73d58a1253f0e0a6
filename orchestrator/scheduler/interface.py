"""The scheduler interface: five methods, Slurm's job states, and pauses between retries."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from orchestrator.scheduler.job_environment import Submitter


class Backoff:
    """Pauses of effects, by key: `first` seconds before the first repetition, then doubled up to `longest`."""

    def __init__(self, mono: Callable[[], float], *, first: float = 5.0, longest: float = 60.0) -> None:
        self._first, self._longest, self._mono = first, longest, mono
        self._resting: dict[str, tuple[float, float]] = {}  # since when, and for how many seconds

    def is_due(self, key: str) -> bool:
        since, seconds = self._resting.get(key, (0.0, 0.0))
        return not 0.0 <= self._mono() - since < seconds

    def start(self, key: str) -> None:
        """The effect was just tried. A key that was left alone for long starts afresh: job ids are given out again."""
        now = self._mono()
        kept = {key: rest for key, rest in self._resting.items() if now - rest[0] < rest[1] + self._longest}
        seconds = min(self._longest, 2 * kept[key][1]) if key in kept else self._first
        self._resting = {**kept, key: (now, seconds)}

    def forget(self, key: str) -> None:
        self._resting.pop(key, None)


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What one job asks for; empty strings leave the site's default."""

    nodes: int
    spares: int = 0  # of these nodes the job can lose so many and go on
    cpus_per_task: int = 1
    gpus_per_node: int = 0
    mem: str = ""
    time: str = "1:00:00"
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    exclude: tuple[str, ...] = ()
    avoided: tuple[str, ...] = ()  # those of `exclude` that orch itself has put there
    signal_lead: int = 120
    sbatch: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """One held job: one agent task per node, started as `trainer.agent.main.run_agent(run_dir, attempt)`."""

    name: str  # orch-<run>-<attempt>-<nonce>, unique for ever
    comment: str  # orch:<run>/<attempt>/<nonce>
    run_dir: Path
    attempt: int
    submission: Path  # submitit's folder
    resources: Resources
    templates: tuple[str, ...] = ("default",)
    template_args: dict[str, str] = field(default_factory=dict)
    python: str = ""
    submitter: Submitter = field(default_factory=Submitter.unrecorded)


@dataclass(frozen=True, kw_only=True)
class JobStatus:
    """One answered look-up. `state` is Slurm's own word, without suffixes ("CANCELLED by 0" is CANCELLED)."""

    job_id: str
    name: str
    state: str
    submit_time: str = ""  # job ids are given out again after a crash: an id alone is no identity
    comment: str = ""
    nodes: tuple[str, ...] = ()
    exit_code: int | None = None
    signal: int | None = None
    reason: str = ""
    restarts: int = 0
    start_time: float | None = None  # seconds since the epoch by the scheduler's clock, as `end_time`
    end_time: float | None = None  # seconds since the epoch, the planned or actual end
    held: bool = False
    nodes_down: tuple[str, ...] = ()  # nodes of a job that ends or has ended that the scheduler itself calls down
    source: str = "queue"  # or "accounting"
    script_tag: str | None = field(default=None, compare=False)  # the name in its script, where nothing else tells
    files: tuple[str, ...] = field(default=(), compare=False)  # script and standard output: only the queue has them
    settings: Mapping[str, str] = field(default_factory=dict, compare=False)  # partition, account, ...: as files


QUEUED_STATES = frozenset(
    {
        "PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD", "EXPEDITING",
        "SPECIAL_EXIT",
    }
)  # fmt: skip
"""SPECIAL_EXIT: requeued and held (`scontrol requeuehold state=SpecialExit`)."""
RUNNING_STATES = frozenset({"RUNNING", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING", "STAGE_OUT"})
LEAVING_STATES = frozenset({"COMPLETING"})
"""Processes of the job may still run: no successor may start."""
ENDED_STATES = frozenset(
    {
        "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL",
        "DEADLINE", "LAUNCH_FAILED", "RECONFIG_FAIL", "REVOKED",
    }
)  # fmt: skip

UNRECORDED = "UNRECORDED"
"""Not a state of Slurm: the job has left the queue and accounting does not answer, so its end is unknown."""
UNREADABLE = "UNREADABLE"
"""No word of Slurm: what it says about this one job cannot be read, so nothing is known of it; `reason` says why."""


class Scheduler(Protocol):
    """Where jobs run. Every method raises `SlurmUnreachable` instead of guessing when it gets no answer."""

    kind: str

    def submit(self, spec: JobSpec) -> str | None:
        """Submit the job held; its id where that was answered.

        SubmitRejected: it was refused; SubmitAmbiguous: only `find` can tell.
        """

    def find(self, name_prefix: str, known: Collection[str] = ()) -> list[JobStatus]:
        """This user's jobs in the queue that were submitted under a name which starts so, or have an id in `known`.

        What a site has changed of them is not hidden.
        """

    def poll(self, ids: list[str]) -> dict[str, JobStatus]:
        """Look the ids up in the queue, then in accounting; an id that the answer lacks is unknown to both.

        A row that cannot be parsed makes its job UNREADABLE; without an id, the job is listed under its name.
        UNRECORDED is a job that has left the queue while accounting does not answer.
        """

    def release(self, job_id: str, submission: Path, exclude: tuple[str, ...] | None = None) -> None:
        """Let a held job start, with its payload under the adopted id; repeating it is harmless.

        With `exclude`, a job that waits is kept off these nodes, and no others, from now on; SubmitRejected when Slurm
        does not do that.
        """

    def out_of_service(self, nodes: frozenset[str]) -> frozenset[str]:
        """Those of these nodes that get no jobs for now: down, drained, under maintenance."""

    def cancel(self, job_id: str) -> None:
        """End a job; repeating it, or a job that has ended, is no error."""
