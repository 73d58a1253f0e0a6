"""How the registry is locked at its place: which journal, a lock by link() besides or not, or not at all."""

from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import RegistryError
from orchestrator.registry.locks.filesystem import Mount
from orchestrator.registry.locks.lock_probe import locks_work
from orchestrator.registry.locks.lock_proof import is_proved
from orchestrator.registry.locks.lock_support import LockSupport, lock_support
from orchestrator.registry.sqlite_errors import ELSEWHERE


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
        move = f"it can still be read. Move it: orch db backup {ELSEWHERE.partition('=')[2]}, then {move}"
    kind, place = (mount.kind, mount.point) if mount else ("unknown", registry.parent)
    return RegistryError(
        f"the file system {kind} at {place} cannot hold the registry: {why}",
        where=str(registry),
        hint=f"{move}{more}",
    )
