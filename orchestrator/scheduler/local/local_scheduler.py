"""The local scheduler: simulated nodes are processes on this machine, held and released as on Slurm.

A held job is a process that waits for its release and has started nothing yet, so it is PENDING as on Slurm. It is the
parent of the tasks and records their end in Slurm's terms: COMPLETED (all exit codes 0), FAILED, TIMEOUT, CANCELLED. If
it was killed, the job is RUNNING while any of its tasks lives, and then FAILED; NODE_FAIL if the machine was rebooted.
Only the outcome file describes what the run achieved.
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
from collections.abc import Collection
from pathlib import Path

from checkpointing.storage.durable import write_durably
from checkpointing.storage.storage_errors import explain_disk_error
from orchestrator.errors import ConfigError, Precondition, SlurmUnreachable, SubmitAmbiguous, SubmitRejected
from orchestrator.home import state_home
from orchestrator.scheduler import submitit_payload
from orchestrator.scheduler.interface import UNREADABLE, JobSpec, JobStatus
from orchestrator.scheduler.job_environment import package_root
from orchestrator.scheduler.local import local_records as records
from orchestrator.scheduler.local.local_records import Intent, JobEnd, JobProcess
from orchestrator.scheduler.slurm.sbatch_values import check_field, minutes
from trainer.protocol.cut_text import cut
from trainer.protocol.failures.outcome import ExitCode, FailureKind
from trainer.protocol.node_identity import boot_id

_START_TIMEOUT_S = 60.0
_ORPHAN_GRACE_S = 5.0
_SILENT_S = 60.0
"""Seconds without a heartbeat after which a job with invisible processes is unknown."""


class LocalScheduler:
    """Scheduler on this machine (see `interface.Scheduler`)."""

    kind = "local"

    def __init__(self, *, entry: str = submitit_payload.AGENT, index: Path | None = None) -> None:
        self._entry, self._given = entry, index

    @property
    def _index(self) -> Path:
        return self._given or state_home() / "local-jobs"

    def submit(self, spec: JobSpec) -> None:
        intent = _intent(spec, self._entry)
        try:
            intent.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            records.forget_old(self._index, intent.asked_at)
            path = records.write_intent(self._index, intent)
        except OSError as error:
            if not (disk := explain_disk_error(error, intent.folder)):
                raise
            raise _no_room(disk, intent) from error
        with submitit_payload.own_folder(spec):
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
                host = records.read_job_process(intent.folder)
                if host is None or host.job_id not in wanted:
                    continue
                if (status := _known(intent, host)) is not None:
                    found[host.job_id] = status
            except (OSError, ValueError) as error:
                found[intent.name] = _unreadable(intent, str(error))
        return found

    def release(self, job_id: str, submission: Path, exclude: tuple[str, ...] | None = None) -> None:
        marker = records.released_file(submission)
        if submission.is_dir() and not marker.exists():
            write_durably(marker, job_id.encode())

    def out_of_service(self, nodes: frozenset[str]) -> frozenset[str]:
        return frozenset()

    def cancel(self, job_id: str) -> None:
        for intent in self._intents():
            try:
                host = records.read_job_process(intent.folder)
            except (OSError, ValueError):
                continue  # this id cannot have been reported
            if host is None or host.job_id != job_id or records.read_end(intent.folder) is not None:
                continue
            if (alive := records.is_alive(host)) is True:
                records.signal_job_process(host, signal.SIGTERM)
            elif alive is False:
                records.end_marked(intent.name, _ORPHAN_GRACE_S)
            elif host.boot == boot_id():
                records.terminate_marked(intent.name)  # in a container whose processes are visible

    def _intents(self) -> list[Intent]:
        try:
            return records.intents(self._index)
        except OSError as error:
            raise SlurmUnreachable(f"local jobs cannot be looked up: {error}", where=str(self._index)) from error

    def _status_or_trouble(self, intent: Intent) -> JobStatus | None:
        """Return a job's status, UNREADABLE on errors, so that it does not hide other jobs."""
        try:
            return self._status(intent)
        except SlurmUnreachable as error:
            return _unreadable(intent, error.what)
        except (OSError, ValueError) as error:
            return _unreadable(intent, str(error))

    def _status(self, intent: Intent) -> JobStatus | None:
        """Return the status of a job, after waiting for its start if necessary."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while (host := records.read_job_process(intent.folder)) is None:
            if not records.marked_processes(intent.name):
                host = records.read_job_process(intent.folder)  # it may have started and ended since
                return None if host is None else _known(intent, host)
            if time.monotonic() > deadline:
                raise SlurmUnreachable(f"local job {intent.name} is neither up nor gone", where=intent.submission)
            time.sleep(0.05)
        return _known(intent, host)


def check(spec: JobSpec) -> None:
    """Raise ConfigError or SubmitRejected for a job that this machine cannot start."""
    _intent(spec, submitit_payload.AGENT)


def _intent(spec: JobSpec, entry: str) -> Intent:
    """Return the job as it will be started; raises ConfigError for unsupported settings."""
    from orchestrator.scheduler.script import prepare  # jinja2 and YAML: only needed to make a job

    prepared = prepare(spec)
    if prepared.srun:
        raise ConfigError(
            f"cluster.templates: {', '.join(spec.templates)} need srun, and cluster.kind=local has none",
            where="cluster.templates",
            hint="cluster.templates=[default]",
        )
    lines = list(prepared.setup)
    if prepared.own_interpreter:
        root = spec.submitter.package_root
        lines.append(f"export PYTHONPATH={shlex.quote(root)}" if root else "unset PYTHONPATH")
    return Intent(
        name=check_field("name", "name", spec.name), comment=spec.comment, submission=str(spec.submission.absolute()),
        run_dir=str(spec.run_dir), entry=entry, arguments=submitit_payload.arguments(spec), nodes=spec.resources.nodes,
        limit_s=60 * minutes("cluster.time", spec.resources.time), signal_lead=spec.resources.signal_lead,
        command=("bash", "-c", "\n".join([*lines, f"exec {prepared.python}"])), devices=_devices(spec),
        asked_at=time.time(), host=socket.gethostname(), named=str(spec.submission.absolute()),
    )  # fmt: skip


def _devices(spec: JobSpec) -> tuple[str, ...]:
    """Return CUDA_VISIBLE_DEVICES of each simulated node: its share of the machine's GPUs, or none."""
    nodes, each = spec.resources.nodes, spec.resources.gpus_per_node
    if each == 0:
        return ("",) * nodes
    here = _gpus()
    if nodes * each > len(here):
        raise SubmitRejected(
            f"{nodes} nodes (cluster.nodes + cluster.spare_nodes) x cluster.gpus_per_node={each} are more GPUs than "
            f"this machine has ({len(here)})",
            where="cluster.gpus_per_node",
            hint="cluster.gpus_per_node=0 trains on CPUs",
        )
    return tuple(",".join(here[node * each : (node + 1) * each]) for node in range(nodes))


def _gpus() -> list[str]:
    """Return the GPUs that this process may use, in the notation of CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name and name != "-1"]
    numbers = [path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*")]
    return [str(number) for number in range(len(numbers))]


def _start(intent: Intent, path: Path, seen: dict[str, str]) -> None:
    """Start the job's process and wait until it has recorded itself."""
    environ = {**seen, records.MARK: intent.name, "SPT_NOENV": "1"}
    root = package_root()
    command = [sys.executable, "-P", "-m", "orchestrator.scheduler.local.local_job", str(path)]
    try:
        done = subprocess.run(
            command, env={**environ, "PYTHONPATH": root} if root else environ, cwd=intent.run_dir, check=False,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=_START_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise SubmitAmbiguous(
            f"the local job was not up within {_START_TIMEOUT_S:.0f} s", where=intent.submission
        ) from error
    if done.returncode == ExitCode.STORAGE:
        # The OSError cause marks this as temporary, unlike errors for the user to fix: it is retried until there is
        # room.
        raise _no_room(done.stderr.strip(), intent) from OSError(errno.ENOSPC, done.stderr.strip())
    if done.returncode != 0:
        raise SubmitRejected(
            f"the local job could not be started: {_last_words(done.stderr, intent.folder)}",
            where=intent.submission,
            hint=f"see {intent.folder / 'local-job.log'}",
        )


def _no_room(disk: str, intent: Intent) -> Precondition:
    what = f"{FailureKind.STORAGE}: the local job cannot be started: {disk}"
    return Precondition(what, hint="make room there, or choose another folder with cluster.root=FOLDER")


def _last_words(said: str, submission: Path) -> str:
    with contextlib.suppress(OSError):
        said += (submission / "local-job.log").read_text(errors="replace")
    lines = [line for line in said.splitlines() if line.strip()]
    return cut(lines[-1], 300) if lines else "no message"


def _known(intent: Intent, host: JobProcess) -> JobStatus | None:
    """Return the status of a job with a recorded process; None if it cannot be observed from here."""
    end = records.read_end(intent.folder)
    alive = records.is_alive(host) if end is None else False
    if end is None and alive is None:
        end = _reboot_end(intent, host)
        alive = end is None and _seems_alive(intent, host)
        if end is None and not alive and (end := records.read_end(intent.folder)) is None:
            return None
    elif end is None and not alive:
        end = records.read_end(intent.folder) or _without_end(intent, host)  # it may have ended since
    held = end is None and alive is True and not records.released_file(intent.folder).exists()
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
    if records.marked_processes(intent.name):
        return None
    reason = "the process that held the job was killed"
    return JobEnd(state="FAILED", reason=reason, ended_at=host.started_at or intent.asked_at)


def _seems_alive(intent: Intent, host: JobProcess) -> bool:
    """Return whether a job with an unobservable process seems alive (in a container, or on a host of the same name).

    Without a sign of life its state is *unknown*, not ended: the controller watches the heartbeat before it decides.
    """
    return bool(records.marked_processes(intent.name)) or time.time() - _last_sign(intent, host) < _SILENT_S


def _reboot_end(intent: Intent, host: JobProcess) -> JobEnd | None:
    """Return NODE_FAIL if this machine was rebooted since; None for a job of this boot, or of another machine."""
    if host.boot == boot_id() or _last_sign(intent, host) >= records.boot_time():
        return None
    return JobEnd(state="NODE_FAIL", reason="the machine was started anew", ended_at=host.started_at or intent.asked_at)


def _last_sign(intent: Intent, host: JobProcess) -> float:
    return max(intent.asked_at, host.started_at or 0.0, records.last_beat(intent.folder))
