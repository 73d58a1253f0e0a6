"""On which file system the registry lies, and which journal is safe there."""

import fcntl
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import RegistryError
from orchestrator.registry.faults import ELSEWHERE

LOCAL = frozenset(
    {
        "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "reiserfs", "tmpfs",
        "ufs", "xfs", "zfs",
    }
)  # fmt: skip
"""File systems of one host only: shared memory and locks work, so write-ahead logging does."""

_UNSHARED_LOCKS = frozenset({"nolock", "localflock", "local_lock=all", "local_lock=posix"})
"""Mount options with which another host does not see our locks."""

_PROBE_SECONDS = 20.0
_PROBE = """
import fcntl, sys
with open(sys.argv[1], "r+b") as stream:
    try:
        fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        print("free")
    except BlockingIOError:
        print("held")
"""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    point: str
    kind: str
    options: frozenset[str]

    @property
    def is_local(self) -> bool:
        return self.kind in LOCAL


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def mounts(text: str) -> list[Mount]:
    """Parse the text of /proc/self/mountinfo, in mount order."""
    found = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        front, back = left.split(" "), right.split(" ")
        options = {*front[5].split(","), *back[2].split(",")}
        found.append(Mount(point=_unescaped(front[4]), kind=back[0], options=frozenset(options)))
    return found


def mount_of(path: Path, text: str) -> Mount | None:
    """The mount that holds `path`: the longest mount point above it, the later one where two are equal."""
    best = None
    for mount in mounts(text):
        above = path.is_relative_to(mount.point)
        if above and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def mounted(path: Path) -> Mount | None:
    """The mount that holds `path` on this machine; None where /proc does not tell."""
    try:
        text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return None
    return mount_of(path.resolve(), text)


def _seen_by_another(path: Path) -> str:
    command = [sys.executable, "-I", "-S", "-c", _PROBE, str(path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS).stdout.strip()


def locks_work(path: Path) -> bool:
    """Whether a lock of this process on `path` stops a second process, and its release lets that one go on.

    WARNING: closing a descriptor drops every POSIX lock that this process has on that file, so `path`
    must be a file of its own, never the registry itself.
    """
    try:
        with path.open("w+b") as stream:
            fcntl.lockf(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            while_held = _seen_by_another(path)
            fcntl.lockf(stream, fcntl.LOCK_UN)
            return (while_held, _seen_by_another(path)) == ("held", "free")
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        path.unlink(missing_ok=True)


def journal_for(path: Path, mount: Mount | None) -> str:
    """`wal` on a local file system, else `delete` where locks work; raises RegistryError where they do not."""
    if mount is not None and mount.is_local:
        return "wal"
    kind = mount.kind if mount else "unknown"
    unshared = sorted(_UNSHARED_LOCKS & mount.options) if mount else []
    if unshared:
        why = f"it is mounted with {unshared[0]}: other hosts do not see its locks"
    elif not locks_work(path.with_name(f".{path.name}.{os.getpid()}.probe")):
        why = "a lock of one process does not stop another one there"
    else:
        return "delete"
    raise RegistryError(
        f"the file system {kind} at {mount.point if mount else path.parent} cannot hold the registry: {why}",
        where=str(path),
        hint=f"set {ELSEWHERE}",
    )
