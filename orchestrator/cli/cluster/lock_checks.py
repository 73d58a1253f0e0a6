"""What `orch doctor --locks` finds out: whether another host sees the locks of the registry's file system."""

import shutil
import time
from collections.abc import Iterator

from orchestrator.cli.cluster.machine_checks import FAIL, OK, Check
from orchestrator.home import registry_path

SRUN = ("srun", "--quiet", "--immediate=60", "--nodes=1", "--ntasks=1", "--time=2", "--job-name=orch-locks")
"""One task on any node that is free within a minute; SLURM_PARTITION, SLURM_ACCOUNT and the like say which."""


def registry_locks(peer: str) -> Iterator[Check]:
    """Try the locks with `peer` by ssh, else with a node of Slurm, and keep what was proved."""
    from orchestrator.registry.locks.filesystem import mounted
    from orchestrator.registry.locks.lock_mode import LockSupport, lock_support
    from orchestrator.registry.locks.lock_probe import ProbeFailed
    from orchestrator.registry.locks.lock_proof import Proof, prove_with
    from orchestrator.registry.sqlite_errors import ELSEWHERE

    path = registry_path().absolute()
    launcher = launched_by(peer)
    if launcher is None:
        yield Check(
            "locks", FAIL, "there is no srun here to start a process on another host", "orch doctor --peer HOST"
        )
        return
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        mount = mounted(path.parent)
        support, reason = lock_support(mount)
        if mount is None or support in (LockSupport.LOCAL, LockSupport.UNSHARED):
            yield Check("locks", OK, f"no other host is asked about the locks of {path}: {reason}")
            return
        found = prove_with(launcher, path, mount, time.time())
    except (OSError, ProbeFailed) as error:
        yield Check("locks", FAIL, f"the other host could not be asked: {error}", "orch doctor --peer HOST")
        return
    if isinstance(found, Proof):
        yield Check("locks", OK, f"{' and '.join(found.hosts)} see each other's locks on {found.kind}")
    else:
        yield Check("locks", FAIL, f"the locks of {mount.kind} at {mount.point}: {found}", f"set {ELSEWHERE}")


def launched_by(peer: str) -> tuple[str, ...] | None:
    """What starts a program on another host; None when there is nothing that could."""
    if peer:
        return ("ssh", "-o", "BatchMode=yes", "--", peer)
    return SRUN if shutil.which("srun") else None
