"""Small, true checks of a node before anything trains on it, and whom a failed one blames."""

import errno
import os
import resource
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from checkpointing.durable import write_durably
from trainer.agent import address
from trainer.contract.config import JobConfig
from trainer.contract.outcome import Failure, FailureKind

_FEWEST_FILES = 1024
_DEVICES = Path("/dev")
_AMD = Path("/dev/kfd")
_DRIVER_SECONDS = 60.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One check that failed; `shared`: it looks at something that all nodes see, so others can bear witness."""

    check: str
    reason: str
    shared: bool
    full: bool = False

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def examine(run_dir: Path, config: JobConfig) -> list[Fault]:
    """All checks on the calling node."""
    cluster = config.cluster
    found = (
        _run_folder(run_dir),
        _data(config),
        _shared_memory(),
        _open_files(cluster.ranks_per_node),
        _interface(cluster.interface),
        _devices(cluster.gpus_per_node),
    )
    return [fault for fault in found if fault is not None]


def _run_folder(run_dir: Path) -> Fault | None:
    """Write, fsync, rename, read back: what every checkpoint needs."""
    probe = run_dir / f".probe-{secrets.token_hex(6)}"
    token = secrets.token_bytes(32)
    try:
        write_durably(probe, token)
        back = probe.read_bytes()
        probe.unlink()
    except OSError as error:
        full = error.errno in _FULL
        reason = f"cannot write to the run folder {run_dir}: {error.strerror}"
        return Fault(check="run folder", reason=reason, shared=True, full=full)
    if back != token:
        return Fault(check="run folder", reason=f"{run_dir} reads back other bytes than were written", shared=True)
    return None


def _data(config: JobConfig) -> Fault | None:
    if config.command or not config.data.path:
        return None
    path = Path(config.data.path).expanduser()
    try:
        os.listdir(path)
    except OSError as error:
        return Fault(check="data", reason=f"cannot read data.path={path}: {error.strerror}", shared=True)
    return None


def _shared_memory() -> Fault | None:
    if os.access("/dev/shm", os.W_OK | os.X_OK):
        return None
    return Fault(check="shared memory", reason="/dev/shm is missing or not writable", shared=False)


def _open_files(ranks: int) -> Fault | None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(_FEWEST_FILES, 256 * ranks)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return None
    if hard == resource.RLIM_INFINITY or hard > soft:
        # Ours to raise: ranks inherit it.
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    if soft >= _FEWEST_FILES:
        return None
    return Fault(check="open files", reason=f"open-files limit is {soft}, below {_FEWEST_FILES}", shared=False)


def _interface(name: str) -> Fault | None:
    try:
        if name:
            address.of_interface(name)
    except RuntimeError as error:
        return Fault(check="interface", reason=str(error), shared=False)
    return None


def _devices(wanted: int) -> Fault | None:
    """A GPU that has fallen off the bus keeps its file in /dev, so the driver is asked first."""
    if not wanted or _AMD.exists():
        return None
    found = _driver_count()
    if found is None:
        found = sum(1 for path in _DEVICES.glob("nvidia[0-9]*"))
    if found >= wanted:
        return None
    return Fault(check="GPUs", reason=f"{found} GPU(s), cluster.gpus_per_node={wanted}", shared=False)


def _driver_count() -> int | None:
    """GPUs that answer nvidia-smi; 0 when it hangs, None when there is no nvidia-smi."""
    try:
        said = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=_DRIVER_SECONDS).stdout
    except subprocess.TimeoutExpired:
        return 0
    except OSError:
        return None
    return sum(1 for line in said.splitlines() if line.strip().startswith(("GPU ", "MIG ")))


def verdict(faults: Mapping[str, Sequence[Fault]]) -> Failure | None:
    """PURE: whom to blame when the nodes (by name) report these faults; None when all are fit.

    A node is suspect only for what the others do not suffer from, or what is its own by nature.
    """
    sick = {node: found for node, found in faults.items() if found}
    if not sick:
        return None
    for node, found in sick.items():
        own = next((fault for fault in found if not fault.shared), None)
        if own is not None:
            return Failure(kind=FailureKind.NODE_SUSPECT, reason=f"{node}: {own.reason}", node=node)
    node, found = next(iter(sick.items()))
    first = found[0]
    if len(sick) < len(faults) and not first.full:
        reason = f"{node}: {first.reason}, while {len(faults) - len(sick)} of {len(faults)} nodes can"
        return Failure(kind=FailureKind.NODE_SUSPECT, reason=reason, node=node)
    if first.check == "data":
        return Failure(kind=FailureKind.USER_ERROR, reason=f"on every node: {first.reason}", node=None)
    return Failure(kind=FailureKind.STORAGE, reason=first.reason, node=None)
