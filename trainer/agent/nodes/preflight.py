"""Checks of a node before training: its GPUs, its shared memory and more."""

import os
import re
import resource
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from types import MappingProxyType
from xml.etree import ElementTree

from checkpointing.storage.durable import write_durably
from checkpointing.storage.storage_errors import FULL
from trainer.agent.control import tcp_transport
from trainer.agent.nodes.node_disk import ARCHIVE, FOLDER
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.fault_detection_config import PreflightConfig
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.messages.agents import PreflightFault
from trainer.protocol.required_packages import NEEDED_BY_RANKS, find_unmet

_BRAKES = {
    "hw_slowdown": "the hardware slows it down",
    "hw_thermal_slowdown": "it is too hot",
    "hw_power_brake_slowdown": "its power supply throttles it",
    "sw_thermal_slowdown": "the driver slows it down because of heat",
}
"""Causes of low clock speeds that an idle GPU should not show."""
_MEMORY_FAULTS = {
    "ecc_errors/*/sram_threshold_exceeded": "has exceeded its manufacturer's limit on SRAM errors",
    "retired_pages/pending_retirement": "needs a reset before broken pages of its memory are retired",
    "remapped_rows/remapped_row_failure": "has no spare rows left for broken memory",
    "remapped_rows/remapped_row_pending": "needs a reset before broken rows of its memory are replaced",
}
"""Fields that are "yes" if a GPU is broken."""
_BRAKE_TAGS = ("clocks_event_reason_", "clocks_throttle_reason_")
"""Tag prefixes used by drivers; those since 535 use the first."""
_LINKS_OF = re.compile(r"^GPU (\d+):")
_LINK = re.compile(r"^\s+Link \d+: (\S+)")


def complaints(report: str) -> list[str]:
    """Return descriptions of broken GPUs from an `nvidia-smi -q -x` report, or an empty list if it cannot be parsed.
    A report in an unknown format proves nothing against a node. Missing GPUs are counted elsewhere.
    """
    try:
        gpus = ElementTree.fromstring(report).findall("gpu")
    except ElementTree.ParseError:
        return []
    return [f"GPU {number} {words}" for number, gpu in enumerate(gpus) for words in _gpu_complaints(gpu)]


def _gpu_complaints(gpu: ElementTree.Element) -> Iterator[str]:
    # Drivers count errors by kind of memory; older ones report a single total.
    counts = [item.text or "" for item in gpu.findall("ecc_errors/volatile/*") if "uncorrectable" in item.tag]
    errors = sum(int(count) for count in counts if count.strip().isdigit())
    recovery = _read_fields(gpu, "gpu_recovery_action")
    # Since Ampere, contained or remapped errors are reported separately from errors that need a reset.
    reports_remedy = (recovery | _read_fields(gpu, "remapped_rows/remapped_row_pending")) - {"", "n/a"}
    if errors and not reports_remedy:
        yield f"has had {errors} uncorrected memory error(s) since its driver was loaded"
    for path, words in _MEMORY_FAULTS.items():
        if "yes" in _read_fields(gpu, path):
            yield words
    for action in recovery - {"", "none", "n/a"}:
        yield f"requests recovery: {action}"
    for brake, words in _BRAKES.items():
        if any("active" in _read_fields(gpu, f"*/{tag}{brake}") for tag in _BRAKE_TAGS):
            yield f"is throttled: {words}"


def _read_fields(gpu: ElementTree.Element, path: str) -> set[str]:
    return {(item.text or "").strip().lower() for item in gpu.findall(path)}


def lost_links(report: str) -> str:
    """Return the GPUs in `nvidia-smi nvlink --status` with fewer links up than their neighbours, or "" if none.
    The expected number depends on the machine. Bridges join pairs: a GPU without a bridge has no links up, and both
    GPUs on a narrow bridge have equally many. Neither counts as a loss.
    """
    up: dict[int, int] = {}
    gpu = -1
    for line in report.splitlines():
        if (head := _LINKS_OF.match(line)) is not None:
            gpu = int(head.group(1))
            up[gpu] = 0
        elif (link := _LINK.match(line)) is not None and gpu >= 0:
            up[gpu] += link.group(1) not in ("<inactive>", "0.000", "0")
    most, alike = max(up.values(), default=0), Counter(up.values())
    lost = {gpu: count for gpu, count in up.items() if 0 < count < most and alike[count] == 1}
    return "; ".join(f"GPU {gpu} has {count} of {most} NVLinks up" for gpu, count in lost.items())


_FEWEST_FILES = 1024
_DEVICES = Path("/dev")
_AMD = Path("/dev/kfd")
_DRIVER_SECONDS = 20.0
"""Time limit for one driver query. Several queries must fit into the coordinator's timeout for the whole preflight."""
_SHARED_MEMORY = Path("/dev/shm")
_LEAST_SHARED = 16 << 20  # per rank, for NCCL's buffers; gloo and the progress cells need hardly any


def examine(run_dir: Path, config: JobConfig) -> list[PreflightFault]:
    """Run all checks on the calling node and return the faults."""
    cluster = config.cluster
    found = (
        _run_folder(run_dir),
        _data(config),
        _shared_memory(cluster.gpus_per_node),
        _open_files(cluster.ranks_per_node),
        _packages(config),
        _interface(cluster.interface),
        _devices(cluster.gpus_per_node),
        _broken_devices(cluster.gpus_per_node),
    )
    return [fault for fault in found if fault is not None]


def _run_folder(run_dir: Path) -> PreflightFault | None:
    """Check the operations that every checkpoint needs: write, fsync, rename and read back."""
    probe = run_dir / f".probe-{secrets.token_hex(6)}"
    token = secrets.token_bytes(32)
    try:
        write_durably(probe, token)
        back = probe.read_bytes()
        probe.unlink()
    except OSError as error:
        full = error.errno in FULL
        reason = f"cannot write to the run folder {run_dir}: {error.strerror}"
        return PreflightFault(check="run folder", reason=reason, shared=True, full=full)
    reason = f"{run_dir} returns different bytes than were written"
    return None if back == token else PreflightFault(check="run folder", reason=reason, shared=True)


def ahead_of_files(run_dir: Path) -> float | None:
    """Return how many seconds this node's clock is ahead of the run folder's server's, or None if unknown.
    The result is 0 on file systems that date files by the writer's own clock.
    """
    probe = run_dir / f".probe-{secrets.token_hex(6)}"
    before = time.time()
    try:
        write_durably(probe, b"?")
        after, written = time.time(), probe.stat().st_mtime
        probe.unlink()
    except OSError:
        return None
    return before - written if written < before else min(0.0, after - written)


def _data(config: JobConfig) -> PreflightFault | None:
    if config.command or not config.data.path:
        return None
    path = Path(config.data.path).expanduser()
    try:
        os.listdir(path)
    except OSError as error:
        return PreflightFault(check="data", reason=f"cannot read data.path={path}: {error.strerror}", shared=True)
    return None


def _shared_memory(gpus: int) -> PreflightFault | None:
    if not gpus:
        return None
    if not os.access(_SHARED_MEMORY, os.W_OK | os.X_OK):
        return PreflightFault(check="shared memory", reason="/dev/shm is missing or not writable", shared=False)
    free, wanted = shutil.disk_usage(_SHARED_MEMORY).free, _LEAST_SHARED * gpus
    if free >= wanted:
        return None
    reason = f"/dev/shm has {free >> 20} MiB free, below {wanted >> 20} MiB for {gpus} rank(s) with GPUs"
    return PreflightFault(check="shared memory", reason=reason, shared=False)


def _open_files(ranks: int) -> PreflightFault | None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = max(_FEWEST_FILES, 256 * ranks)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return None
    if hard == resource.RLIM_INFINITY or hard > soft:
        # The soft limit may be raised; ranks inherit it.
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
        soft = raised
    if soft >= _FEWEST_FILES:
        return None
    # Slurm propagates the limits of the submitter's shell, so the node is rarely at fault.
    reason = f"open-files limit is {soft}, below {_FEWEST_FILES}"
    return PreflightFault(check="open files", reason=reason, shared=True)


def _packages(config: JobConfig) -> PreflightFault | None:
    """Check the packages of this Python for orch's own workloads. Commands and staged archives may have another one."""
    unmet = [] if config.command or config.cluster.stage.archive else list(find_unmet(NEEDED_BY_RANKS))
    if not unmet:
        return None
    wanted = {name: f"{name}>={NEEDED_BY_RANKS[name]}" if NEEDED_BY_RANKS[name] else name for name, _ in unmet}
    found = ", ".join(f"{name} {version}" if version else f"no {name}" for name, version in unmet)
    install = f"{sys.executable} -m pip install {' '.join(shlex.quote(word) for word in wanted.values())}"
    return PreflightFault(check="packages", reason=f"{sys.executable} has {found}; {install}", shared=True)


def _interface(name: str) -> PreflightFault | None:
    try:
        if name:
            tcp_transport.interface_address(name)
    except RuntimeError as error:
        return PreflightFault(check="interface", reason=str(error), shared=False)
    return None


def _devices(wanted: int) -> PreflightFault | None:
    """Check the number of GPUs. Query the driver first, since a GPU that fell off the bus keeps its file in /dev."""
    if not wanted or _AMD.exists():
        return None
    found = _driver_count()
    if found is None:
        found = sum(1 for path in _DEVICES.glob("nvidia[0-9]*"))
    if found >= wanted:
        return None
    return PreflightFault(check="GPUs", reason=f"{found} GPU(s), cluster.gpus_per_node={wanted}", shared=False)


def _driver_count() -> int | None:
    """Return the number of GPUs listed by nvidia-smi, 0 if it hangs, or None if it is missing."""
    try:
        output = _driver("-L")
    except subprocess.TimeoutExpired:
        return 0
    except OSError:
        return None
    return sum(1 for line in output.splitlines() if line.strip().startswith(("GPU ", "MIG ")))


def _broken_devices(wanted: int) -> PreflightFault | None:
    """Check for GPUs that respond but have lost memory, links or clock speed."""
    if not wanted:
        return None
    try:
        found = complaints(_driver("-q", "-x"))
        lost = lost_links(_driver("nvlink", "--status")) if wanted > 1 else ""
    except (subprocess.TimeoutExpired, OSError):
        return None  # `_devices` reports an unresponsive driver
    reasons = [*found, lost] if lost else found
    return PreflightFault(check="GPU health", reason="; ".join(reasons), shared=False) if reasons else None


def _driver(*arguments: str) -> str:
    command = ["nvidia-smi", *arguments]
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_DRIVER_SECONDS).stdout


def find_blamed_node(faults: Mapping[str, Sequence[PreflightFault]]) -> Failure | None:
    """PURE: blame a node for the faults that the nodes reported, keyed by name. Return None if all nodes are fit.
    A node is suspect only for faults that other nodes do not share, or that are local by nature.
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
    if first.check in ("packages", ARCHIVE, FOLDER):
        return Failure(kind=FailureKind.INSTALLATION, reason=f"on every node: {first.reason}", node=None)
    return Failure(kind=FailureKind.STORAGE, reason=first.reason, node=None)


def skew(
    ahead: Mapping[str, float], config: PreflightConfig, of_files: Mapping[str, float | None] = MappingProxyType({})
) -> Failure | None:
    """PURE: blame a node for clock skew. `ahead` is each clock's lead over the coordinator's, in seconds.
    If two nodes disagree, the one whose clock agrees with the file server's is right (`of_files`: each clock's lead
    over it in seconds). If neither or both agree, no node is blamed, so a wrong file server blames none.
    """
    if not ahead:
        return None
    middle = median(ahead.values())
    node = max(ahead, key=lambda name: abs(ahead[name] - middle))
    apart = max(ahead.values()) - min(ahead.values())
    if apart <= config.skew:
        return None
    if len(ahead) < 3:
        if (failure := _blame_by_files(of_files, config)) is not None:
            return failure
        reason = f"the clocks of {' and '.join(ahead)} are {apart:.0f} s apart, above {config.skew:g} s"
        return Failure(kind=FailureKind.UNKNOWN, reason=reason, node=None)
    return _blame_clock(node, ahead[node] - middle, f"the median of {len(ahead)} nodes", config)


def _blame_by_files(of_files: Mapping[str, float | None], config: PreflightConfig) -> Failure | None:
    off = {node: ahead for node, ahead in of_files.items() if ahead is not None and abs(ahead) > config.skew}
    right = [node for node, ahead in of_files.items() if ahead is not None and node not in off]
    if not right or len(off) != 1:
        return None
    ((node, ahead),) = off.items()
    return _blame_clock(node, ahead, f"the file server's, which agrees with the clock of {right[0]}", config)


def _blame_clock(node: str, ahead: float, reference: str, config: PreflightConfig) -> Failure:
    where = f"{abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} {reference} (limit {config.skew:g} s)"
    return Failure(kind=FailureKind.NODE_SUSPECT, reason=f"{node}: its clock is {where}", node=node)
