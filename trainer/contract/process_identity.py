"""Which process a pid is: its start time, its state, the boot of its machine, and the pid namespace that it counts in.

Pids come back, so a start time belongs to each one; start times come back after the next boot. Neither containers with
a pid namespace of their own nor two machines of one name can look at each other's processes.
"""

import hashlib
import os
from functools import cache
from pathlib import Path

UNKNOWN = "unknown"
"""Stands for the space of a process whose /proc shows another one: nobody can look at its kind by pid."""


def start_time(pid: int) -> str | None:
    """When the process was started, in clock ticks since boot; None when there is none, or only its remains."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] not in ("Z", "X") else None


def process_state(pid: int) -> str:
    """One letter of proc(5): T is stopped by a signal, Z a zombie; empty when there is no such process."""
    return next(iter(_stat(pid)), "")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; the name before it may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def boot_id() -> str:
    """Names this boot of this machine; raises OSError."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_space() -> str:
    """A short digest of the calling process's space."""
    return _space(os.getpid())


def is_visible(space: str) -> bool:
    """Whether processes of that space can be looked at by their pids; an older version wrote down none (empty)."""
    own = process_space()
    return own != UNKNOWN and space in ("", own)


@cache
def _space(pid: int) -> str:
    try:
        # `unshare --pid` without a /proc of its own: the pids that are shown are others.
        if os.readlink("/proc/self") != str(pid):
            return UNKNOWN
        parts = boot_id(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]
