"""Small, real checks of a node before anything trains on it, and which node a failed one blames."""

import os
import resource
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from checkpointing.storage.durable import write_durably
from checkpointing.storage.storage_errors import FULL
from trainer.agent.control import address
from trainer.agent.nodes import gpu_health
from trainer.contract.config import JobConfig
from trainer.contract.config_sections.fault_detection_config import PreflightConfig
from trainer.contract.failures.outcome import Failure, FailureKind
from trainer.contract.messages.agents import Fault

_FEWEST_FILES = 1024
_DEVICES = Path("/dev")
_AMD = Path("/dev/kfd")
_DRIVER_SECONDS = 20.0
"""The driver is queried a few times in a row, within the coordinator's timeout for the whole preflight."""
_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED = 16 << 20  # for each rank: NCCL's buffers; gloo and the progress cells need none


def examine(run_dir: Path, config: JobConfig) -> list[Fault]:
    """All checks on the calling node."""
    cluster = config.cluster
    found = (
        _run_folder(run_dir),
        _data(config),
        _shared_memory(cluster.gpus_per_node),
        _open_files(cluster.ranks_per_node),
        _interface(cluster.interface),
        _devices(cluster.gpus_per_node),
        _broken_devices(cluster.gpus_per_node),
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
        full = error.errno in FULL
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


def _shared_memory(gpus: int) -> Fault | None:
    if not os.access(_SHARED_MEMORY, os.W_OK | os.X_OK):
        return Fault(check="shared memory", reason="/dev/shm is missing or not writable", shared=False)
    free, wanted = shutil.disk_usage(_SHARED_MEMORY).free, _LEAST_SHARED * gpus
    if free >= wanted:
        return None
    reason = f"/dev/shm has {free >> 20} MiB free, below {wanted >> 20} MiB for {gpus} rank(s) with GPUs"
    return Fault(check="shared memory", reason=reason, shared=False)


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
    # Slurm passes the limits of the submitter's shell on, so it is seldom the node's own.
    reason = f"open-files limit is {soft}, below {_FEWEST_FILES}"
    return Fault(check="open files", reason=reason, shared=True)


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
        said = _driver("-L")
    except subprocess.TimeoutExpired:
        return 0
    except OSError:
        return None
    return sum(1 for line in said.splitlines() if line.strip().startswith(("GPU ", "MIG ")))


def _broken_devices(wanted: int) -> Fault | None:
    """GPUs that are there and answer, but have lost memory, links or clocks."""
    if not wanted:
        return None
    try:
        found = gpu_health.complaints(_driver("-q", "-x"))
        lost = gpu_health.lost_links(_driver("nvlink", "--status")) if wanted > 1 else ""
    except (subprocess.TimeoutExpired, OSError):
        return None  # `_devices` reports a driver that does not answer
    reasons = [*found, lost] if lost else found
    return Fault(check="GPU health", reason="; ".join(reasons), shared=False) if reasons else None


def _driver(*arguments: str) -> str:
    command = ["nvidia-smi", *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_DRIVER_SECONDS).stdout


def find_blamed_node(faults: Mapping[str, Sequence[Fault]]) -> Failure | None:
    """PURE: which node to blame when the nodes (by name) report these faults; None when all are fit.

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
    if first.check == "open files":
        hint = f"raise it to {_FEWEST_FILES} (`ulimit -Hn`) in the shell that starts the controller, or ask the site"
        return Failure(kind=FailureKind.INSTALLATION, reason=f"on every node: {first.reason}; {hint}", node=None)
    return Failure(kind=FailureKind.STORAGE, reason=first.reason, node=None)


def skew(ahead: Mapping[str, float], config: PreflightConfig) -> Failure | None:
    """PURE: which node to blame when the nodes' clocks are so many seconds ahead of the coordinator's.

    Of two nodes that disagree it is not known which one is right.
    """
    if not ahead:
        return None
    middle = median(ahead.values())
    node = max(ahead, key=lambda name: abs(ahead[name] - middle))
    apart = max(ahead.values()) - min(ahead.values())
    if apart <= config.skew:
        return None
    if len(ahead) < 3:
        reason = f"the clocks of {' and '.join(ahead)} are {apart:.0f} s apart, above {config.skew:g} s"
        return Failure(kind=FailureKind.UNKNOWN, reason=reason, node=None)
    reason = (
        f"{node}: its clock is {abs(ahead[node] - middle):.0f} s {'ahead of' if ahead[node] > middle else 'behind'}"
        f" the median of {len(ahead)} nodes (limit {config.skew:g} s)"
    )
    return Failure(kind=FailureKind.NODE_SUSPECT, reason=reason, node=node)
