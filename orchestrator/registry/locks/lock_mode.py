"""How the registry is locked at its place: which journal, a lock by link() besides or not, or not at all.

SQLite keeps writers apart with fcntl byte-range locks. Where another host does not see them, two hosts write at once
and the registry is damaged; a write-ahead log needs memory shared by all its readers besides, so one host. No probe on
one host can tell: locks that stay on the host work there. So `RULES` says what is known of file systems.
"""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from orchestrator.errors import RegistryError
from orchestrator.registry.locks.filesystem import Mount
from orchestrator.registry.locks.lock_probe import locks_work
from orchestrator.registry.locks.lock_proof import is_proved
from orchestrator.registry.sqlite_errors import ELSEWHERE


class LockSupport(StrEnum):
    """How far fcntl locks reach."""

    LOCAL = "one host has the file system"
    SHARED = "all hosts see the locks"
    UNKNOWN = "nobody can tell from here"
    UNSHARED = "other hosts do not see the locks"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One file system type: what its locks do, unless a mount option changes that; `needs` is an option without which
    there are none."""

    support: LockSupport
    reason: str = ""
    unshared: frozenset[str] = frozenset()
    needs: str = ""


_NFS = frozenset({"nolock", "local_lock=all", "local_lock=posix"})
_STALE = frozenset({"cache=loose", "cache=fscache", "cache=mmap"})
_OBJECTS = "an object store behind a mount does not change files in place"

RULES: dict[str, Rule] = {
    # nfs(5): byte-range locks are part of NFSv4, and go through NLM before; `local_lock=flock` leaves fcntl's alone.
    "nfs": Rule(support=LockSupport.SHARED, unshared=_NFS),
    "nfs4": Rule(support=LockSupport.SHARED, unshared=_NFS),
    # mount.lustre(8): coherent with `flock`, of this host with `localflock`, refused by the kernel with neither.
    "lustre": Rule(support=LockSupport.SHARED, unshared=frozenset({"localflock", "noflock"}), needs="flock"),
    # IBM Storage Scale: fcntl locks are tokens of the cluster.
    "gpfs": Rule(support=LockSupport.SHARED),
    # CephFS, kernel client: the metadata server keeps fcntl locks.
    "ceph": Rule(support=LockSupport.SHARED),
    # gfs2(5): `localflocks` keeps flock and fcntl on this host.
    "gfs2": Rule(support=LockSupport.SHARED, unshared=frozenset({"localflocks"})),
    # beegfs-client.conf: tuneUseGlobalFileLocks, false by default, and not among the mount options.
    "beegfs": Rule(
        support=LockSupport.UNKNOWN, reason="BeeGFS keeps locks on each host unless tuneUseGlobalFileLocks=true"
    ),
    # ocfs2: fcntl locks reach other hosts with a userspace cluster stack only.
    "ocfs2": Rule(support=LockSupport.UNKNOWN, unshared=frozenset({"localflocks"})),
    # kernel, filesystems/9p.rst: these caches do not see what others write.
    "9p": Rule(
        support=LockSupport.UNKNOWN, reason="a 9p server may answer every lock with yes", unshared=_STALE | {"nolock"}
    ),
    "virtiofs": Rule(
        support=LockSupport.UNKNOWN, reason="virtiofsd keeps locks in the guest unless it was told otherwise"
    ),
    # mount.cifs(8)
    "cifs": Rule(support=LockSupport.UNKNOWN, unshared=frozenset({"nobrl", "cache=loose"})),
    "smb3": Rule(support=LockSupport.UNKNOWN, unshared=frozenset({"nobrl", "cache=loose"})),
    # fuse: without the server's own lock calls the kernel keeps locks on this host.
    "fuse.sshfs": Rule(support=LockSupport.UNSHARED, reason="sshfs has no locks of its own"),
    "fuse.s3fs": Rule(support=LockSupport.UNSHARED, reason=_OBJECTS),
    "fuse.goofys": Rule(support=LockSupport.UNSHARED, reason=_OBJECTS),
    "fuse.gcsfuse": Rule(support=LockSupport.UNSHARED, reason=_OBJECTS),
    "fuse.blobfuse": Rule(support=LockSupport.UNSHARED, reason=_OBJECTS),
    "fuse.blobfuse2": Rule(support=LockSupport.UNSHARED, reason=_OBJECTS),
    "fuse.rclone": Rule(support=LockSupport.UNSHARED, reason=_OBJECTS),
    "fuse.mountpoint-s3": Rule(support=LockSupport.UNSHARED, reason=_OBJECTS),
    # kernel, filesystems/orangefs.rst (`local_lock`) and filesystems/afs.rst; VirtualBox shared folders.
    "orangefs": Rule(support=LockSupport.UNSHARED, reason="OrangeFS has no locks between hosts"),
    "afs": Rule(support=LockSupport.UNSHARED, reason="AFS locks whole files and not byte ranges"),
    "vboxsf": Rule(support=LockSupport.UNSHARED, reason="shared folders have no locks between host and guest"),
}
"""Types that are no `filesystem.LOCAL`; what is not here is unknown."""


def lock_support(mount: Mount | None) -> tuple[LockSupport, str]:
    """PURE: how far the locks of this mount reach, and why that is so; with /proc unreadable nothing is known."""
    if mount is None:
        return LockSupport.UNKNOWN, "/proc does not tell which file system it is"
    if mount.is_local:
        return LockSupport.LOCAL, f"{mount.kind} belongs to one host"
    rule = RULES.get(mount.kind, Rule(support=LockSupport.UNKNOWN))
    found = sorted(rule.unshared & mount.options)
    if found:
        return LockSupport.UNSHARED, f"it is mounted with {found[0]}: other hosts do not see its locks"
    if rule.needs and rule.needs not in mount.options:
        return LockSupport.UNSHARED, f"it is mounted without {rule.needs}: it has no locks"
    if rule.support is LockSupport.SHARED:
        return rule.support, f"{mount.kind} shows locks to all hosts"
    return rule.support, rule.reason or f"whether other hosts see the locks of {mount.kind} is not known"


@dataclass(frozen=True, kw_only=True)
class LockMode:
    """`journal` is SQLite's journal mode; `linked` says whether a LinkLock goes around every write."""

    journal: str
    linked: bool
    reason: str


def lock_mode_for(registry: Path, mount: Mount | None) -> LockMode:
    """`wal` on a local file system, else `delete` where other hosts see the locks; raises RegistryError elsewhere."""
    support, reason = lock_support(mount)
    if support is LockSupport.LOCAL:
        return LockMode(journal="wal", linked=False, reason=reason)
    if support is LockSupport.UNSHARED:
        raise _refused(registry, mount, reason)
    if support is LockSupport.UNKNOWN and not (mount and is_proved(registry, mount)):
        raise _refused(registry, mount, reason, f". Or try its locks with another host: {_PROVE}" if mount else "")
    if not locks_work(registry):
        raise _refused(registry, mount, "a lock of one process does not stop another one there")
    if support is LockSupport.SHARED:
        return LockMode(journal="delete", linked=False, reason=reason)
    return LockMode(journal="delete", linked=True, reason=f"{reason}; with another host they were seen to work")


_PROVE = "orch doctor --locks  (or --peer HOST, without Slurm)"


def _refused(registry: Path, mount: Mount | None, why: str, more: str = "") -> RegistryError:
    move = f"set {ELSEWHERE}"
    if registry.exists():
        move = f"it can still be read. Move it: `orch db backup {ELSEWHERE.partition('=')[2]}`, then {move}"
    kind, place = (mount.kind, mount.point) if mount else ("unknown", registry.parent)
    return RegistryError(
        f"the file system {kind} at {place} cannot hold the registry: {why}",
        where=str(registry),
        hint=f"{move}{more}",
    )
