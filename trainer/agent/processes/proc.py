"""Processes of a node: death signals, groups, orphans, activity, OOM kills, and the report of a lost coordinator."""

import ctypes
import os
import re
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainer.agent.processes.background_tasks import run_detached
from trainer.protocol.failures.outcome import AgentEnd, AgentReport, ExitCode
from trainer.protocol.node_identity import NodeIdentity
from trainer.protocol.run_dir import AttemptDir

_SECONDS = 5.0
"""Time limit for the report; the coordinator may have been lost because of a hung file system."""


async def write_agent_report(attempt: AttemptDir, identity: NodeIdentity, end: AgentEnd, why: str) -> None:
    """Write the agent's report, if the file system responds."""
    reason = f"{identity.name}{'' if end is AgentEnd.REFUSED else ' lost the coordinator'}: {why}"
    report = AgentReport(node=identity.node, name=identity.name, end=end, reason=reason, time=time.time())
    with suppress(OSError):
        await run_detached(lambda: report.write(attempt.agent_report(identity.node)), _SECONDS)


AGENT_DIED_SIGNAL = signal.SIGRTMIN + 5
"""Parent-death signal of a fork server with ranks; it kills their process groups before it exits."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def set_pdeathsig(parent: int, number: int = signal.SIGKILL) -> None:
    """Request signal `number` for when process `parent` dies; exit immediately if it is already dead."""
    _prctl(_PR_SET_PDEATHSIG, number)
    # The parent may have died before the call.
    if os.getppid() != parent:
        os._exit(ExitCode.RETRY)


def become_subreaper() -> None:
    """Make orphaned descendants children of this process, so that it can wait for them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def kill_group(group: int, number: int = signal.SIGKILL) -> bool:
    """Signal a process group. Return False if it has no members."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    except PermissionError:  # a member now runs as another user: it exists but cannot be killed
        return True
    return True


def kill_children(exclude: Collection[int] = ()) -> bool:
    """Kill every child of this process, adopted orphans included, except `exclude`. Return False if none was left."""
    found = [pid for pid in children() if pid not in exclude]
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    return bool(found)


def children() -> list[int]:
    """Return every unreaped child of this process, adopted orphans included."""
    return [int(pid) for task in os.listdir("/proc/self/task") for pid in _task_children(task)]


def _task_children(task: str) -> list[str]:
    try:
        return Path(f"/proc/self/task/{task}/children").read_text().split()
    except FileNotFoundError:  # the thread has ended; its children now belong to another thread
        return []


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


_PROC = Path("/proc")
_TICK = os.sysconf("SC_CLK_TCK")
_UTIME, _STIME = 11, 12  # counted from the state, the first field after the name
_CPU_CLOCK = 2
"""The kernel's number for a process CPU clock; the remaining bits of the clock ID identify the process."""
_THREADS = 500
"""Maximum number of threads described per process."""
_TEXT = 16384
"""Maximum bytes kept per file."""
_WHOLE = ("status", "io", "wchan", "syscall", "stack", "cgroup", "limits", "cmdline")


@dataclass(frozen=True, slots=True)
class ProcessActivity:
    """Activity of one process; the counters only grow while it lives."""

    state: str  # of its first thread: R S D T t Z
    cpu_seconds: float  # of all its threads, user and kernel mode
    io_bytes: int  # read and written through system calls, to any target
    starved_seconds: float = 0.0  # its first thread was runnable but had no core


def read_activity(pid: int) -> ProcessActivity | None:
    """Return the activity from a few short reads, or None if the process does not exist."""
    try:
        fields = _stat(_PROC / str(pid) / "stat")
    except OSError:
        return None
    ticks = (int(fields[_UTIME]) + int(fields[_STIME])) / _TICK
    return ProcessActivity(
        fields[0], _cpu_seconds(pid, ticks), _io_bytes(pid), _read_schedstat(_PROC / str(pid)).waited
    )


def threads_named(pid: int, name: str) -> tuple[int, ...]:
    """Return the threads of a process with this name, or an empty tuple if it is gone."""
    folder = _PROC / str(pid) / "task"
    try:
        threads = os.listdir(folder)
    except OSError:
        return ()
    return tuple(int(thread) for thread in threads if _text(folder / thread / "comm").strip() == name)


def threads_cpu_seconds(pid: int, threads: Collection[int]) -> float:
    """Return the total CPU seconds of some threads of a process; threads that are gone do not count."""
    return sum(_read_schedstat(_PROC / str(pid) / "task" / str(thread)).ran for thread in threads)


def catches_signal(pid: int, number: int) -> bool:
    """Return whether the process has a handler for the signal."""
    masks = [line.split()[1] for line in _text(_PROC / str(pid) / "status").splitlines() if line.startswith("SigCgt:")]
    return bool(masks) and bool(int(masks[0], 16) >> (number - 1) & 1)


_PARENT = 1  # counted from the state
_GENERATIONS = 16
"""Maximum number of processes between a rank's process and the one that trains."""


def is_descendant(pid: int, ancestor: int) -> bool:
    """Return whether `ancestor` has started the process, directly or through other processes."""
    for _ in range(_GENERATIONS):
        try:
            pid = int(_stat(_PROC / str(pid) / "stat")[_PARENT])
        except OSError:
            return False
        if pid in (ancestor, 0):
            return pid == ancestor
    return False


def group_members(groups: Collection[int]) -> dict[int, list[int]]:
    """Return the members of each process group, from one pass over /proc that opens none of its files."""
    found: dict[int, list[int]] = {group: [] for group in groups}
    for name in os.listdir(_PROC):
        if not name.isdigit():
            continue
        try:
            group = os.getpgid(int(name))
        except OSError:  # it has exited in the meantime, or is hidden from this user
            continue
        if group in found:
            found[group].append(int(name))
    return found


def descendants(pids: Collection[int]) -> dict[int, list[int]]:
    """Return each of these processes with all that it has started, from one pass over /proc."""
    parents = {}
    for name in os.listdir(_PROC):
        if name.isdigit():
            with suppress(OSError):  # it has exited in the meantime
                parents[int(name)] = int(_stat(_PROC / name / "stat")[_PARENT])
    found: dict[int, list[int]] = {pid: [] for pid in pids}
    for pid in parents:
        one: int | None = pid
        while one is not None and one not in found:
            one = parents.get(one)
        if one is not None:
            found[one].append(pid)
    return found


def find_descendant(number: int, ancestor: int) -> int | None:
    """Return the process that has this PID in its own PID namespace, if `ancestor` is it or has started it."""
    for pid in (number, *descendants([ancestor])[ancestor]):
        if _innermost_pid(pid) == number and (pid == ancestor or is_descendant(pid, ancestor)):
            return pid
    return None


def _innermost_pid(pid: int) -> int:
    """Return a process's PID in its own namespace, as it knows it, or 0 if it has ended."""
    rows = [line.split() for line in _text(_PROC / str(pid) / "status").splitlines() if line.startswith("NSpid:")]
    return int(rows[0][-1]) if rows else 0


def _stat(path: Path) -> list[str]:
    """Return a stat file's fields, starting with the state. The name before it may contain spaces and parentheses."""
    return path.read_text(errors="replace").rpartition(")")[2].split()


def _cpu_seconds(pid: int, ticks: float) -> float:
    """Return CPU seconds to the nanosecond, or `ticks` (10 ms resolution) if the kernel has no clock for it."""
    try:
        return time.clock_gettime((~pid << 3) | _CPU_CLOCK)
    except OSError:
        return ticks


class _Scheduled(NamedTuple):
    """Seconds a thread ran, and seconds it waited for a core."""

    ran: float
    waited: float


def _read_schedstat(folder: Path) -> _Scheduled:
    """Return the content of a schedstat file, or zeros if the kernel keeps none."""
    try:
        ran, waited, *_ = (folder / "schedstat").read_text().split()
    except (OSError, ValueError):
        return _Scheduled(0.0, 0.0)
    return _Scheduled(int(ran) * 1e-9, int(waited) * 1e-9)


def _io_bytes(pid: int) -> int:
    """Return the bytes moved by a process's system calls, or 0 if unknown."""
    try:
        lines = (_PROC / str(pid) / "io").read_text().splitlines()
    except OSError:
        return 0
    counts = dict(line.split(": ", 1) for line in lines if ": " in line)
    return int(counts.get("rchar", 0)) + int(counts.get("wchar", 0))


def describe(pid: int) -> dict[str, Any] | None:
    """Return /proc's information on a process and its threads, for display, or None if the process does not exist.
    An unreadable file is replaced by the reason. WARNING: this may block while the kernel holds its memory map.
    """
    folder = _PROC / str(pid)
    try:
        stat = _stat(folder / "stat")
    except OSError as error:
        return None if not folder.exists() else {"pid": pid, "stat": str(error)}
    return {
        "pid": pid,
        "state": stat[0],
        "stat": " ".join(stat),
        **{name: _text(folder / name) for name in _WHOLE},
        "descriptors": _descriptors(folder / "fd"),
        "threads": _threads(folder / "task"),
    }


def _threads(folder: Path) -> list[dict[str, Any]]:
    try:
        names = sorted(os.listdir(folder), key=int)
    except OSError:
        return []
    return [_thread(folder / name) for name in names[:_THREADS]]


def _thread(folder: Path) -> dict[str, Any]:
    try:
        stat = _stat(folder / "stat")
    except OSError as error:
        return {"tid": int(folder.name), "gone": str(error)}
    return {
        "tid": int(folder.name),
        "name": _text(folder / "comm").strip(),
        "state": stat[0],
        "cpu_seconds": (int(stat[_UTIME]) + int(stat[_STIME])) / _TICK,
        "wchan": _text(folder / "wchan"),
        "syscall": _text(folder / "syscall").strip(),
    }


def _descriptors(folder: Path) -> dict[str, str]:
    """Return the targets of a process's open descriptors, which show the file that a rank is stuck on."""
    try:
        names = sorted(os.listdir(folder), key=int)
    except OSError as error:
        return {"error": str(error)}
    found = {}
    for name in names[:_THREADS]:
        try:
            found[name] = os.readlink(folder / name)
        except OSError:  # closed in the meantime
            continue
    return found


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_TEXT).replace(b"\0", b" ").decode(errors="replace")
    except OSError as error:
        return f"[{error.strerror}]"


_KILLED = re.compile(rb"Killed process (\d+) ")
_RECORD = 8192
"""Maximum bytes of a record in the kernel's log."""
_FIRST_NAMESPACE = "pid:[4026531836]"
"""The PID namespace that the kernel's log uses."""
_NO_LIMIT = 1 << 60


class OomKills:
    """Out-of-memory kills since construction. Ranks run in the cgroup of the constructing process."""

    def __init__(
        self, *, cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup"),
        log: Path = Path("/dev/kmsg"),
    ) -> None:  # fmt: skip
        self._folder = _memory_cgroup(cgroups, membership)
        self._before = self._count()
        self._log = _open_at_end(log)
        self._pids: set[int] = set()

    def words(self, pid: int | None) -> str:
        """Describe how the kernel killed this process, and the limit. Return "" if there is no evidence of a kill."""
        if self._log is not None:
            self._pids.update(_new_pids(self._log))
            killed = pid in self._pids
        else:  # the kill may have hit another process of the cgroup, but nothing else sends SIGKILL
            killed = self._count() > self._before
        if not killed:
            return ""
        limit = self._limit()
        return "the kernel killed it" + (f"; the limit of its cgroup is {limit / (1 << 30):.1f} GiB" if limit else "")

    def close(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _count(self) -> int:
        """Return this cgroup's number of kills, from `memory.events` (v2) or `memory.oom_control` (v1)."""
        for name in ("memory.events", "memory.oom_control"):
            for line in _read(self._folder, name).splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill" and value.isdigit():
                    return int(value)
        return 0

    def _limit(self) -> int:
        """Return the smallest limit of this cgroup and its ancestors in bytes, or 0 if unlimited."""
        folders = [self._folder, *self._folder.parents] if self._folder is not None else []
        texts = [_read(one, name).strip() for one in folders for name in ("memory.max", "memory.limit_in_bytes")]
        limits = [int(text) for text in texts if text.isdigit() and int(text) < _NO_LIMIT]
        return min(limits, default=0)


def _memory_cgroup(cgroups: Path, membership: Path) -> Path | None:
    """Return the folder of this process's memory controller, v1 or v2, or None."""
    for line in _read(membership.parent, membership.name).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        roots = [cgroups / "memory"] if "memory" in controllers.split(",") else []
        roots += [cgroups, cgroups / "unified"] if not controllers else []
        for root in roots:
            for folder in (root / path.lstrip("/"), root):  # in a container the path may be the host's
                if any((folder / name).exists() for name in ("memory.events", "memory.oom_control")):
                    return folder
    return None


def _read(folder: Path | None, name: str) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return (folder / name).read_text() if folder is not None else ""
    return ""


def _open_at_end(log: Path) -> int | None:
    """Open the kernel's log at its end. Return None if it is unreadable or its PIDs belong to another namespace."""
    try:
        if os.readlink("/proc/self/ns/pid") != _FIRST_NAMESPACE:
            return None
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(descriptor, 0, os.SEEK_END)
    except OSError:
        return None
    return descriptor


def _new_pids(descriptor: int) -> Iterator[int]:
    while True:
        try:
            record = os.read(descriptor, _RECORD)
        except BrokenPipeError:  # records were overwritten before they were read; the next one is available
            continue
        except OSError:  # EAGAIN: no newer record
            return
        if not record:
            return
        if found := _KILLED.search(record):
            yield int(found[1])
