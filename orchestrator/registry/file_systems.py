"""File systems that can hold the registry, and the journal mode for each.

SQLite separates writers with fcntl byte-range locks. If another host does not see them, two hosts may write at the same
time and damage the registry. A write-ahead log also needs memory that all readers share, and therefore a single host. A
test on one host cannot show either property, so `SHARED` and `UNSHARED_OPTIONS` list them.
"""

import fcntl
import os
import re
import secrets
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import RegistryError
from orchestrator.registry.sqlite_errors import ELSEWHERE

LOCAL = frozenset(
    {
        "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "reiserfs", "tmpfs",
        "ufs", "xfs", "zfs",
    }
)  # fmt: skip
"""File systems of a single host, where shared memory and locks work, and so write-ahead logging does too.

Overlay is included, because its upper layer cannot be on a network file system (kernel, filesystems/overlayfs.rst).
"""


SHARED = frozenset({"nfs", "nfs4", "lustre", "gpfs", "ceph", "gfs2"})
"""File systems whose fcntl locks all hosts see, except with one of the options below.

NFSv4 has byte-range locks, and older versions use NLM (nfs(5); `local_lock=flock` does not affect them). IBM Storage
Scale implements them as cluster tokens, CephFS in its metadata server. Lustre refuses them unless it is mounted with
`flock` or `localflock` (mount.lustre(8)).
"""
UNSHARED_OPTIONS = frozenset(
    {"nolock", "local_lock=all", "local_lock=posix", "localflock", "noflock", "localflocks"}
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mount:
    """Line of /proc/self/mountinfo."""

    point: str
    kind: str
    options: frozenset[str]
    source: str = ""

    @property
    def is_local(self) -> bool:
        return self.kind in LOCAL


def mounts(text: str) -> list[Mount]:
    """Parse the text of /proc/self/mountinfo, in mount order."""
    found = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        front, back = left.split(" "), right.split(" ")
        options = frozenset({*front[5].split(","), *back[2].split(",")})
        found.append(Mount(point=_unescape(front[4]), kind=back[0], options=options, source=_unescape(back[1])))
    return found


def _unescape(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def match_mount(path: Path, text: str) -> Mount | None:
    """Return the mount that holds `path`: the one with the longest mount point above it, or the later of two equals."""
    best = None
    for mount in mounts(text):
        above = path.is_relative_to(mount.point)
        if above and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def find_mount(path: Path) -> Mount | None:
    """Return the mount that holds `path` on this machine; None if /proc cannot be read."""
    try:
        text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return None
    return match_mount(path.resolve(), text)


def why_unshared(mount: Mount | None) -> str:
    """Return why other hosts may not see the locks of this mount; empty if they do. Pure."""
    if mount is None or mount.kind not in SHARED:
        return f"whether other hosts see the locks of {mount.kind if mount else 'it'} is not known"
    found = sorted(UNSHARED_OPTIONS & mount.options)
    return f"it is mounted with {found[0]}: other hosts do not see its locks" if found else ""


def choose_journal_mode(registry: Path, mount: Mount | None) -> str:
    """Return SQLite's journal mode: `wal` on a local file system, `delete` on one whose locks all hosts see.

    Raises RegistryError on other file systems, and OSError if no file can be created.
    """
    if mount is not None and mount.is_local:
        return "wal"
    reason = why_unshared(mount)
    if not reason and not locks_work(registry):
        reason = "one process's lock does not stop another process there"
    if not reason:
        return "delete"
    move = f"set {ELSEWHERE}"
    if registry.exists():
        move = f"it can still be read. Move it: `orch db backup {ELSEWHERE.partition('=')[2]}`, then {move}"
    kind, place = (mount.kind, mount.point) if mount else ("unknown", registry.parent)
    what = f"the file system {kind} at {place} cannot hold the registry: {reason}"
    raise RegistryError(what, where=str(registry), hint=move)


_TRY_LOCK = """\
import fcntl, sys
try:
    fcntl.lockf(open(sys.argv[1], "r+"), fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
except (BlockingIOError, PermissionError):
    print("held")
"""


def locks_work(registry: Path) -> bool:
    """Return whether a lock next to `registry` stops a second process on this host.

    It uses a separate file, because closing a descriptor drops every POSIX lock of the process on that file. Raises
    OSError if it cannot create that file.
    """
    path = registry.with_name(f".{registry.name}.{secrets.token_hex(6)}.probe")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1)
        tried = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _TRY_LOCK, str(path)], capture_output=True, text=True, timeout=20
        )
        return tried.stdout == "held\n"
    except (OSError, subprocess.TimeoutExpired):
        return False
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)
