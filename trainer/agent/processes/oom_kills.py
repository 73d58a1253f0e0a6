"""Whether the kernel killed a process for lack of memory: its own log, or the counter of the cgroup."""

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_KILLED = re.compile(rb"Killed process (\d+) ")
_RECORD = 8192
"""Bytes of the longest record of the kernel's log."""
_FIRST_NAMESPACE = "pid:[4026531836]"
"""The pid namespace that the kernel's log counts in."""
_NO_LIMIT = 1 << 60


class OomKills:
    """Kills since it was made; ranks run in the cgroup of the process that makes it."""

    def __init__(
        self, *, cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup"),
        log: Path = Path("/dev/kmsg"),
    ) -> None:  # fmt: skip
        self._folder = _memory_cgroup(cgroups, membership)
        self._before = self._count()
        self._log = _open_at_end(log)
        self._pids: set[int] = set()

    def words(self, pid: int | None) -> str:
        """That the kernel killed this process, and the limit; empty where nothing says so."""
        if self._log is not None:
            self._pids.update(_new_pids(self._log))
            killed = pid in self._pids
        else:  # others of the cgroup may have been meant, but nobody else sends SIGKILL
            killed = self._count() > self._before
        if not killed:
            return ""
        limit = self._limit()
        return "the kernel killed it" + (f", its cgroup may have {limit / (1 << 30):.1f} GiB" if limit else "")

    def close(self) -> None:
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def _count(self) -> int:
        """Processes of this cgroup that were killed so far, by `memory.events` (v2) or `memory.oom_control` (v1)."""
        for name in ("memory.events", "memory.oom_control"):
            for line in _read(self._folder, name).splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill" and value.isdigit():
                    return int(value)
        return 0

    def _limit(self) -> int:
        """The smallest limit of this cgroup and those above it, in bytes; 0 without any."""
        folders = [self._folder, *self._folder.parents] if self._folder is not None else []
        texts = [_read(one, name).strip() for one in folders for name in ("memory.max", "memory.limit_in_bytes")]
        limits = [int(text) for text in texts if text.isdigit() and int(text) < _NO_LIMIT]
        return min(limits, default=0)


def _memory_cgroup(cgroups: Path, membership: Path) -> Path | None:
    """The folder of this process's memory controller, v1 or v2; None where there is none."""
    for line in _read(membership.parent, membership.name).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        roots = [cgroups / "memory"] if "memory" in controllers.split(",") else []
        roots += [cgroups, cgroups / "unified"] if not controllers else []
        for root in roots:
            for folder in (root / path.lstrip("/"), root):  # in a container the path may be that of the host
                if any((folder / name).exists() for name in ("memory.events", "memory.oom_control")):
                    return folder
    return None


def _read(folder: Path | None, name: str) -> str:
    with suppress(OSError, UnicodeDecodeError):
        return (folder / name).read_text() if folder is not None else ""
    return ""


def _open_at_end(log: Path) -> int | None:
    """None where it may not be read, or counts processes otherwise than this one does."""
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
        except BrokenPipeError:  # records were overwritten before they were read; the next one is there
            continue
        except OSError:  # EAGAIN: that was the newest one
            return
        if not record:
            return
        if found := _KILLED.search(record):
            yield int(found[1])
