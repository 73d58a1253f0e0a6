"""Records of local jobs on disk, and detection of their live processes.

`<state home>/local-jobs/<name>.json` is the intent, written before anything is started. The other files are in the
job's submission folder, written by the process that is the job: `local-job.json` (its process), `local-end.json` (its
end). The scheduler creates `local-release` there to release the job.
"""

import contextlib
import os
import signal
import socket
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import canonical, only_own_files, read_json, reserve, write_durably, write_reserved
from trainer.protocol.node_identity import boot_id, is_visible, local_job_id, process_space, process_state
from trainer.protocol.run_dir import AttemptDir

MARK = "ORCH_LOCAL_JOB"
"""Environment variable of every process of a local job; its value is the job's name, which is never reused."""
KEEP_ENDED_S = 7 * 86400.0
_END_BYTES = 8192
"""Bytes reserved for a job's end: exit codes of a few hundred simulated nodes."""


@dataclass(frozen=True, kw_only=True)
class Intent:
    """A local job as requested; times are seconds since the epoch."""

    name: str
    comment: str
    submission: str
    run_dir: str
    entry: str
    arguments: tuple[str, ...]
    nodes: int
    limit_s: int
    signal_lead: int
    command: tuple[str, ...]
    """Command that starts one task; submitit's part is appended to the last word."""
    devices: tuple[str, ...]
    """CUDA_VISIBLE_DEVICES of each simulated node."""
    asked_at: float
    host: str = ""
    """Host of the job; another host that shares the home cannot observe its processes."""
    named: str = ""
    """The submission folder as given to tasks; `submission` may be a name that only this job's process has."""

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
    space: str = ""  # pid namespace; older versions wrote none


@dataclass(frozen=True, kw_only=True)
class JobEnd:
    """End of a job, in Slurm's terms."""

    state: str
    reason: str
    ended_at: float
    exit_codes: tuple[int | None, ...] = field(default_factory=tuple)


def boot_time() -> float:
    """Return the boot time of this machine, in seconds since the epoch."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def intent_file(index: Path, name: str) -> Path:
    return index / f"{name}.json"


def released_file(submission: Path) -> Path:
    return submission / "local-release"


def _job_process_file(submission: Path) -> Path:
    return submission / "local-job.json"


def _end_file(submission: Path) -> Path:
    return submission / "local-end.json"


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
    found = [intent for intent in found if intent.host in ("", socket.gethostname())]
    return sorted(found, key=lambda intent: intent.asked_at)


def forget_old(index: Path, now: float) -> None:
    """Delete entries of jobs that ended long ago, or whose run directory was deleted."""
    for intent in intents(index):
        with contextlib.suppress(OSError, ValueError):  # unreadable entries are kept
            ended = read_end(intent.folder)
            gone = not intent.folder.is_dir() and not marked_processes(intent.name)
            if gone or (ended is not None and ended.ended_at < now - KEEP_ENDED_S):
                intent_file(index, intent.name).unlink(missing_ok=True)


def claim(submission: Path) -> JobProcess | None:
    """Make the calling process the job of this folder; return None if it has one already. Raises OSError."""
    host = JobProcess(pid=os.getpid(), job_id=local_job_id(os.getpid()), boot=boot_id(), space=process_space())
    own = submission / f".local-job.{host.job_id}"
    reserve(_end_file(submission), _END_BYTES)
    write_durably(own, canonical(asdict(host)))
    try:
        os.link(own, _job_process_file(submission))  # atomic, and only the first succeeds
    except FileExistsError:
        return None
    finally:
        own.unlink()
    return host


def unclaim(submission: Path) -> None:
    """Remove the claim of a job that could not be prepared, so that the next submission under its name is a new job."""
    _job_process_file(submission).unlink(missing_ok=True)


def write_job_process(submission: Path, host: JobProcess) -> None:
    write_durably(_job_process_file(submission), canonical(asdict(host)))


def read_job_process(submission: Path) -> JobProcess | None:
    """Return the job's process; None until it has recorded itself. Raises OSError or ValueError."""
    fields = _read(_job_process_file(submission))
    try:
        return None if fields is None else JobProcess(**fields)
    except TypeError as error:
        raise ValueError(f"{_job_process_file(submission)}: {error}") from error


def write_end(submission: Path, end: JobEnd) -> None:
    write_reserved(_end_file(submission), canonical(asdict(end)))


def read_end(submission: Path) -> JobEnd | None:
    """Return the job's end; None until it has ended. Raises OSError or ValueError."""
    fields = _read(_end_file(submission))
    try:
        return None if fields is None else JobEnd(**{**fields, "exit_codes": tuple(fields["exit_codes"])})
    except (TypeError, KeyError) as error:
        raise ValueError(f"{_end_file(submission)}: {error}") from error


def _read(path: Path) -> dict[str, Any] | None:
    try:
        with only_own_files():  # its pid will be signalled
            fields: dict[str, Any] = read_json(path)
    except FileNotFoundError:
        return None
    return fields


def is_alive(host: JobProcess) -> bool | None:
    """Return whether this process still runs (same boot, pid and start time; no zombie); None if it is not visible."""
    if host.boot != boot_id() or not is_visible(host.space):
        return None
    return process_state(host.pid) not in ("", "Z", "X") and _is_same_process(host)


def last_beat(submission: Path) -> float:
    """Return the time of the last heartbeat of the job's coordinator; 0.0 without one."""
    try:
        return AttemptDir(submission.parent).heartbeat.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_same_process(host: JobProcess) -> bool:
    try:
        return local_job_id(host.pid) == host.job_id
    except OSError:
        return False


def marked_processes(name: str) -> list[int]:
    """Return the job's live processes, found by the mark in their environment, except the calling one."""
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
    """Signal this process; a later one with the same pid is not affected."""
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


def terminate_marked(name: str) -> None:
    """Send SIGTERM to every visible process of the job."""
    _send(marked_processes(name), signal.SIGTERM)


def end_marked(name: str, grace: float) -> None:
    """Send SIGTERM to every process of the job, and SIGKILL to the remaining ones after `grace` seconds."""
    deadline = time.monotonic() + grace
    terminate_marked(name)
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
