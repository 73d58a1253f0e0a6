"""The local scheduler: simulated nodes are processes on this machine, held and released as on Slurm.

A held job is a process that waits for its release and has started nothing yet, so it is PENDING as on Slurm. It is the
parent of the tasks and records their end in Slurm's terms: COMPLETED (all exit codes 0), FAILED, TIMEOUT, CANCELLED. If
it was killed, the job is RUNNING while any of its tasks lives, and then FAILED, or NODE_FAIL if the machine was
rebooted. Only the outcome file describes what the run achieved.

`<state home>/local-jobs/<name>.json` is the intent, written before anything is started. The other files are in the
job's submission folder, written by the process that is the job (`local_job`): `local-job.json` (its process),
`local-end.json` (its end). The scheduler creates `local-release` there to release the job.
"""

import contextlib
import errno
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from checkpointing.storage.durable import canonical, only_own_files, read_json, reserve, write_durably, write_reserved
from checkpointing.storage.storage_errors import explain_disk_error
from orchestrator.config.detected_gpus import visible_gpus
from orchestrator.errors import ConfigError, Precondition, SlurmUnreachable, SubmitAmbiguous, SubmitRejected
from orchestrator.home import state_home
from orchestrator.scheduler.interface import UNREADABLE, JobSpec, JobStatus
from orchestrator.scheduler.job_environment import package_root
from orchestrator.scheduler.script import AGENT, own_folder, prepare
from orchestrator.scheduler.slurm.sbatch_values import check_field, minutes
from trainer.protocol.cut_text import cut
from trainer.protocol.failures.outcome import ExitCode, FailureKind
from trainer.protocol.node_identity import boot_id, boot_time, is_visible, local_job_id, process_space, process_state
from trainer.protocol.run_dir import AttemptDir

T = TypeVar("T")

MARK = "ORCH_LOCAL_JOB"
"""Environment variable in every process of a local job. Its value is the job's name, which is never reused."""
KEEP_ENDED_S = 7 * 86400.0
_END_BYTES = 8192  # bytes reserved for a job's end: exit codes of a few hundred simulated nodes


@dataclass(frozen=True, kw_only=True)
class Intent:
    """A local job as requested; times are in seconds since the epoch."""

    name: str
    comment: str
    submission: str
    run_dir: str
    entry: str
    arguments: tuple[str, ...]
    nodes: int
    limit_s: int
    signal_lead: int
    command: tuple[str, ...]  # starts one task; submitit's part is appended to the last word
    devices: tuple[str, ...]  # CUDA_VISIBLE_DEVICES of each simulated node
    asked_at: float
    host: str = ""  # host of the job; another host that shares the home cannot observe its processes
    named: str = ""  # submission folder as passed to tasks; `submission` may be a name valid only in the job's process

    @property
    def folder(self) -> Path:
        return Path(self.submission)


@dataclass(frozen=True, kw_only=True)
class JobProcess:
    """The process that is the job: it starts the tasks, waits for them and records their end."""

    pid: int
    job_id: str  # pid and start time, in the format of trainer.protocol.node_identity
    boot: str
    started_at: float | None = None  # start time of its tasks
    space: str = ""  # pid namespace; empty if written by an older version


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """End of a job, in Slurm's terms."""

    state: str
    reason: str
    ended_at: float
    exit_codes: tuple[int | None, ...] = field(default_factory=tuple)


def intent_file(index: Path, name: str) -> Path:
    return index / f"{name}.json"


RELEASED, _PROCESS, _END = "local-release", "local-job.json", "local-end.json"
"""Names of files in the submission folder."""


def write_intent(index: Path, intent: Intent) -> Path:
    """Record the job before it is started."""
    index.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = intent_file(index, intent.name)
    write_durably(path, canonical(asdict(intent)))
    return path


def read_intent(path: Path) -> Intent:
    fields: dict[str, Any] = {}
    for key, value in read_json(path).items():
        fields[key] = tuple(value) if isinstance(value, list) else value
    return Intent(**fields)


def intents(index: Path) -> list[Intent]:
    """Return all recorded jobs of this host, oldest first; invalid files are skipped."""
    found = []
    for path in index.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            found.append(read_intent(path))
    here = (intent for intent in found if intent.host in ("", socket.gethostname()))
    return sorted(here, key=lambda intent: intent.asked_at)


def forget_old(index: Path, now: float) -> None:
    """Delete the entries for jobs that finished long ago, or whose run directory was deleted."""
    for intent in intents(index):
        with contextlib.suppress(OSError, ValueError):  # unreadable entries are kept
            ended = read_end(intent.folder)
            gone = not intent.folder.is_dir() and not marked_processes(intent.name)
            if gone or (ended is not None and ended.ended_at < now - KEEP_ENDED_S):
                intent_file(index, intent.name).unlink(missing_ok=True)


def claim(submission: Path) -> JobProcess | None:
    """Make the calling process this folder's job. Return None if the folder already has a job. Raises OSError."""
    host = JobProcess(pid=os.getpid(), job_id=local_job_id(os.getpid()), boot=boot_id(), space=process_space())
    own = submission / f".local-job.{host.job_id}"
    reserve(submission / _END, _END_BYTES)
    write_durably(own, canonical(asdict(host)))
    try:
        os.link(own, submission / _PROCESS)  # atomic, and only the first succeeds
    except FileExistsError:
        return None
    finally:
        own.unlink()
    return host


def unclaim(submission: Path) -> None:
    """Remove the claim of a job that could not be prepared, so that the next submission under its name is a new job."""
    (submission / _PROCESS).unlink(missing_ok=True)


def write_job_process(submission: Path, host: JobProcess) -> None:
    write_durably(submission / _PROCESS, canonical(asdict(host)))


def read_job_process(submission: Path) -> JobProcess | None:
    """Return the job's process, or None if it has not recorded itself yet. Raises OSError or ValueError."""
    return _read(submission / _PROCESS, lambda fields: JobProcess(**fields))


def write_end(submission: Path, end: JobEnd) -> None:
    write_reserved(submission / _END, canonical(asdict(end)))


def read_end(submission: Path) -> JobEnd | None:
    """Return the job's end, or None if it has not ended yet. Raises OSError or ValueError."""
    return _read(submission / _END, lambda fields: JobEnd(**{**fields, "exit_codes": tuple(fields["exit_codes"])}))


def _read(path: Path, make: Callable[[dict[str, Any]], T]) -> T | None:
    try:
        with only_own_files():  # its pid will be signalled
            return make(read_json(path))
    except FileNotFoundError:
        return None
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path}: {error}") from error


def is_alive(host: JobProcess) -> bool | None:
    """Return whether this process still runs (same boot, pid and start time; not a zombie), or None if unknown."""
    if host.boot != boot_id() or not is_visible(host.space):
        return None
    return process_state(host.pid) not in ("", "Z", "X") and _is_same_process(host)


def _is_same_process(host: JobProcess) -> bool:
    try:
        return local_job_id(host.pid) == host.job_id
    except OSError:
        return False


def marked_processes(name: str) -> list[int]:
    """Return the job's live processes, found by the mark in their environment, other than the calling process."""
    wanted = f"{MARK}={name}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            marks = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
            if wanted in marks and process_state(int(entry)) not in ("", "Z", "X"):
                found.append(int(entry))
    return found


def signal_job_process(host: JobProcess, number: int) -> None:
    """Signal this process, but never a later process with the same pid."""
    try:
        handle = os.pidfd_open(host.pid)
    except OSError:
        return
    try:
        if _is_same_process(host):  # the handle stays bound to the process for which it was opened
            signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return
    finally:
        os.close(handle)


def end_marked(name: str, grace: float) -> None:
    """Send SIGTERM to every process of the job, and SIGKILL to the remaining processes after `grace` seconds."""
    deadline = time.monotonic() + grace
    _send(marked_processes(name), signal.SIGTERM)
    while (left := marked_processes(name)) and time.monotonic() < deadline:
        time.sleep(0.05)
    while left:
        _send(left, signal.SIGKILL)
        time.sleep(0.01)
        left = marked_processes(name)


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


_START_TIMEOUT_S = 60.0
_ORPHAN_GRACE_S = 5.0
_SILENT_S = 60.0  # seconds without a heartbeat after which the state of a job with invisible processes is unknown


class LocalScheduler:
    """Scheduler on this machine (see `interface.Scheduler`)."""

    kind = "local"

    def __init__(self, *, entry: str = AGENT, index: Path | None = None) -> None:
        self._entry, self._given = entry, index

    @property
    def _index(self) -> Path:
        return self._given or state_home() / "local-jobs"

    def submit(self, spec: JobSpec) -> None:
        intent = _intent(spec, self._entry)
        try:
            intent.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            forget_old(self._index, intent.asked_at)
            path = write_intent(self._index, intent)
        except OSError as error:
            if not (disk := explain_disk_error(error, intent.folder)):
                raise
            raise _no_room(disk, intent) from error
        with own_folder(spec):
            _start(intent, path, spec.submitter.environ(os.environ))

    def find(self, name_prefix: str, known: Collection[str] = ()) -> list[JobStatus]:
        found = [self._status_or_trouble(intent) for intent in self._intents() if intent.name.startswith(name_prefix)]
        for status in found:
            if status is not None and status.state == UNREADABLE and status.name == name_prefix:
                raise SlurmUnreachable(status.reason)  # the requested job
        return [status for status in found if status is not None]

    def poll(self, ids: list[str]) -> dict[str, JobStatus]:
        wanted = set(ids)
        found = {}
        for intent in self._intents():
            try:
                host = read_job_process(intent.folder)
                if host is None or host.job_id not in wanted:
                    continue
                if (status := _known(intent, host)) is not None:
                    found[host.job_id] = status
            except (OSError, ValueError) as error:
                found[intent.name] = _unreadable(intent, str(error))
        return found

    def release(self, job_id: str, submission: Path, exclude: tuple[str, ...] | None = None) -> None:
        marker = submission / RELEASED
        if submission.is_dir() and not marker.exists():
            write_durably(marker, job_id.encode())

    def out_of_service(self, nodes: frozenset[str]) -> frozenset[str]:
        return frozenset()

    def cancel(self, job_id: str) -> None:
        for intent in self._intents():
            try:
                host = read_job_process(intent.folder)
            except (OSError, ValueError):
                continue  # this id cannot have been reported
            if host is None or host.job_id != job_id or read_end(intent.folder) is not None:
                continue
            if (alive := is_alive(host)) is True:
                signal_job_process(host, signal.SIGTERM)
            elif alive is False:
                end_marked(intent.name, _ORPHAN_GRACE_S)
            elif host.boot == boot_id():
                _send(marked_processes(intent.name), signal.SIGTERM)  # in a container, but visible here

    def _intents(self) -> list[Intent]:
        try:
            return intents(self._index)
        except OSError as error:
            raise SlurmUnreachable(f"cannot look up local jobs: {error}", where=str(self._index)) from error

    def _status_or_trouble(self, intent: Intent) -> JobStatus | None:
        """Return a job's status, or UNREADABLE on an error, so that one job does not hide the others."""
        try:
            return self._status(intent)
        except (SlurmUnreachable, OSError, ValueError) as error:
            return _unreadable(intent, error.what if isinstance(error, SlurmUnreachable) else str(error))

    def _status(self, intent: Intent) -> JobStatus | None:
        """Return the status of a job, after waiting for its start if necessary."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while (host := read_job_process(intent.folder)) is None:
            if not marked_processes(intent.name):
                host = read_job_process(intent.folder)  # it may have started and finished since
                return None if host is None else _known(intent, host)
            if time.monotonic() > deadline:
                raise SlurmUnreachable(f"local job {intent.name} neither started nor ended", where=intent.submission)
            time.sleep(0.05)
        return _known(intent, host)


def check(spec: JobSpec) -> None:
    """Raise ConfigError or SubmitRejected for a job that this machine cannot start."""
    _intent(spec, AGENT)


def _intent(spec: JobSpec, entry: str) -> Intent:
    """Return the job as it will be started. Raises ConfigError for unsupported settings."""
    prepared = prepare(spec)
    if prepared.srun:
        raise ConfigError(
            f"cluster.templates: {', '.join(spec.templates)} need srun, which cluster.kind=local does not have",
            where="cluster.templates",
            hint="cluster.templates=[default]",
        )
    lines = list(prepared.setup)
    if prepared.own_interpreter:
        root = spec.submitter.package_root
        lines.append(f"export PYTHONPATH={shlex.quote(root)}" if root else "unset PYTHONPATH")
    return Intent(
        name=check_field("name", spec.name, "name"), comment=spec.comment, submission=str(spec.submission.absolute()),
        run_dir=str(spec.run_dir), entry=entry, arguments=(str(spec.run_dir), str(spec.attempt)),
        nodes=spec.resources.nodes, limit_s=60 * minutes("cluster.time", spec.resources.time),
        signal_lead=spec.resources.signal_lead,
        command=("bash", "-c", "\n".join([*lines, f"exec {prepared.agent}"])), devices=_devices(spec),
        asked_at=time.time(), host=socket.gethostname(), named=str(spec.submission.absolute()),
    )  # fmt: skip


def _devices(spec: JobSpec) -> tuple[str, ...]:
    """Return CUDA_VISIBLE_DEVICES of each simulated node: its share of the machine's GPUs, or none."""
    nodes, each = spec.resources.nodes, spec.resources.gpus_per_node
    if each == 0:
        return ("",) * nodes
    here = visible_gpus()
    if nodes * each > len(here):
        raise SubmitRejected(
            f"{nodes} nodes (cluster.nodes + cluster.spare_nodes) x cluster.gpus_per_node={each} are more than "
            f"this machine's {len(here)} GPUs",
            where="cluster.gpus_per_node",
            hint="cluster.gpus_per_node=0 trains on CPUs",
        )
    return tuple(",".join(here[node * each : (node + 1) * each]) for node in range(nodes))


def _start(intent: Intent, path: Path, seen: dict[str, str]) -> None:
    """Start the job's process and wait until it has recorded itself."""
    environ = {**seen, MARK: intent.name, "SPT_NOENV": "1"}
    root = package_root()
    command = [sys.executable, "-P", "-m", "orchestrator.scheduler.local.local_job", str(path)]
    try:
        done = subprocess.run(
            command, env={**environ, "PYTHONPATH": root} if root else environ, cwd=intent.run_dir, check=False,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_START_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SubmitAmbiguous(
            f"the local job did not start within {_START_TIMEOUT_S:.0f} s", where=intent.submission
        ) from error
    if done.returncode == ExitCode.STORAGE:
        # The OSError cause marks this as temporary, unlike errors that the user must fix. It is retried until there is
        # space.
        raise _no_room(done.stderr.strip(), intent) from OSError(errno.ENOSPC, done.stderr.strip())
    if done.returncode != 0:
        raise SubmitRejected(
            f"the local job could not be started: {_last_words(done.stderr, intent.folder)}",
            where=intent.submission,
            hint=f"see {intent.folder / 'local-job.log'}",
        )


def _no_room(disk: str, intent: Intent) -> Precondition:
    what = f"{FailureKind.STORAGE}: the local job cannot be started: {disk}"
    return Precondition(what, hint="free some space there, or choose another folder with cluster.root=FOLDER")


def _last_words(text: str, submission: Path) -> str:
    with contextlib.suppress(OSError):
        text += (submission / "local-job.log").read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.strip()]
    return cut(lines[-1], 300) if lines else "no message"


def _known(intent: Intent, host: JobProcess) -> JobStatus | None:
    """Return the status of a job with a recorded process, or None if it cannot be observed from here."""
    end = read_end(intent.folder)
    alive = is_alive(host) if end is None else False
    if end is None and alive is None:
        end = _reboot_end(intent, host)
        alive = end is None and _seems_alive(intent, host)
        if end is None and not alive and (end := read_end(intent.folder)) is None:
            return None
    elif end is None and not alive:
        end = read_end(intent.folder) or _without_end(intent, host)  # it may have just finished
    held = end is None and alive is True and not (intent.folder / RELEASED).exists()
    state = end.state if end else "PENDING" if held else "RUNNING"
    codes = [code for code in end.exit_codes if code is not None] if end else []
    worst = next((code for code in codes if code), 0 if codes else None)
    limit = None if host.started_at is None else host.started_at + intent.limit_s
    return JobStatus(
        job_id=host.job_id, name=intent.name, state=state, comment=intent.comment,
        submit_time=time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(intent.asked_at)),
        nodes=() if host.started_at is None else tuple(f"local-{node}" for node in range(intent.nodes)),
        exit_code=worst if worst is None or worst >= 0 else None, signal=-worst if worst and worst < 0 else None,
        reason=end.reason if end else "held" if held else "", start_time=host.started_at,
        end_time=end.ended_at if end else limit, held=held,
    )  # fmt: skip


def _unreadable(intent: Intent, why: str) -> JobStatus:
    return JobStatus(job_id="", name=intent.name, state=UNREADABLE, comment=intent.comment, reason=why)


def _without_end(intent: Intent, host: JobProcess) -> JobEnd | None:
    """Return FAILED for a job whose process vanished without a record, or None while its tasks live."""
    if marked_processes(intent.name):
        return None
    reason = "the process that held the job was killed"
    return JobEnd(state="FAILED", reason=reason, ended_at=host.started_at or intent.asked_at)


def _seems_alive(intent: Intent, host: JobProcess) -> bool:
    """Return whether a job with an unobservable process seems alive (in a container, or on a host with the same name).

    Without a sign of life its state is *unknown*, not ended: the controller watches the heartbeat before it decides.
    """
    return bool(marked_processes(intent.name)) or time.time() - _last_sign(intent, host) < _SILENT_S


def _reboot_end(intent: Intent, host: JobProcess) -> JobEnd | None:
    """Return NODE_FAIL if this machine has rebooted since the job's last sign of life, else None."""
    if host.boot == boot_id() or _last_sign(intent, host) >= boot_time():
        return None
    return JobEnd(state="NODE_FAIL", reason="the machine was rebooted", ended_at=host.started_at or intent.asked_at)


def _last_sign(intent: Intent, host: JobProcess) -> float:
    """Return the time of the job's last sign of life: its submission, its start or the coordinator's last heartbeat."""
    beat = 0.0
    with contextlib.suppress(FileNotFoundError):
        beat = AttemptDir(intent.folder.parent).heartbeat.stat().st_mtime
    return max(intent.asked_at, host.started_at or 0.0, beat)
