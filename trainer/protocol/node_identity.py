"""Identity of nodes and processes: scheduler environment, start time, boot and pid namespace.

Pids are reused, so a pid is stored with its start time; start times repeat after a reboot. Containers with their own
pid namespaces cannot see each other's processes, and neither can two machines with the same name.
"""

import hashlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trainer.protocol.config_sections.scheduler_kinds import LOCAL, SLURM

UNKNOWN = "unknown"
"""Space of a process whose /proc belongs to another pid namespace, so it cannot look up its peers by pid."""


def start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot, or None if it does not exist or is a zombie."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] not in ("Z", "X") else None


def process_state(pid: int) -> str:
    """Return the state letter from proc(5), such as T (stopped) or Z (zombie), or "" if the process does not exist."""
    return next(iter(_stat(pid)), "")


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat that follow the process name, which may contain any character."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def boot_id() -> str:
    """Return the boot ID of this machine. Raises OSError."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def boot_time() -> float:
    """Return the boot time of this machine, in seconds since the epoch."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def process_start_time() -> float:
    """Return the start time of the calling process, in seconds since the epoch."""
    return boot_time() + int(start_time(os.getpid()) or 0) / os.sysconf("SC_CLK_TCK")


def process_space() -> str:
    """Return a short digest of the calling process's boot and pid namespace."""
    return _space(os.getpid())


def is_visible(space: str) -> bool:
    """Return whether processes in `space` can be looked up by pid. Older versions stored an empty space."""
    own = process_space()
    return own != UNKNOWN and space in ("", own)


@cache
def _space(pid: int) -> str:
    try:
        # `unshare --pid` without its own /proc: /proc shows the pids of another namespace.
        if os.readlink("/proc/self") != str(pid):
            return UNKNOWN
        parts = boot_id(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


@dataclass(frozen=True, kw_only=True)
class NodeIdentity:
    """Identity of one agent in its job. `node` counts from 0."""

    kind: str  # one of scheduler_kinds.KINDS
    job_id: str
    node: int
    nodes: int
    name: str
    restarts: int = 0  # times that Slurm has requeued the job
    expedited: bool = False  # its next attempt continues in the job once Slurm has requeued it
    switches: tuple[str, ...] = ()  # network switches above the node, top one first, if the scheduler reports them


REQUEUE_VARIABLE, EXPEDITE = "ORCH_REQUEUE", "expedite"
"""Variable of a job's script, and its value in a job submitted with `--requeue=expedite`."""


def local_job_id(pid: int) -> str:
    """Return the ID of a local job: pid and start time (clock ticks since boot), because pids are reused."""
    started = start_time(pid)
    if started is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return f"{pid}-{started}"


def discover(environ: Mapping[str, str] = os.environ) -> NodeIdentity:
    """Return the calling agent's identity. Raises RuntimeError outside a job."""
    if "SUBMITIT_LOCAL_JOB_ID" in environ:
        node = int(environ["SUBMITIT_LOCAL_GLOBALID"])
        return NodeIdentity(
            kind=LOCAL,
            job_id=local_job_id(int(environ["SUBMITIT_LOCAL_JOB_ID"])),
            node=node,
            nodes=int(environ["SUBMITIT_LOCAL_NTASKS"]),
            name=f"local-{node}",
        )
    if "SLURM_JOB_ID" in environ and "SLURM_NODEID" in environ:
        return NodeIdentity(
            kind=SLURM,
            job_id=environ["SLURM_JOB_ID"],
            node=int(environ["SLURM_NODEID"]),
            nodes=int(environ.get("SLURM_NNODES", "1")),
            name=environ.get("SLURMD_NODENAME", f"node-{environ['SLURM_NODEID']}"),
            restarts=int(environ.get("SLURM_RESTART_COUNT") or 0),
            expedited=environ.get(REQUEUE_VARIABLE) == EXPEDITE,
            switches=_switches(environ),
        )
    raise RuntimeError("not inside a job: neither SLURM_JOB_ID nor SUBMITIT_LOCAL_JOB_ID is set")


def _switches(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the switches, for example s0 and s4 for `s0.s4.node7` with the pattern `switch.switch.node`."""
    address = environ.get("SLURM_TOPOLOGY_ADDR", "")
    levels = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").count(".")
    # Node names may contain dots.
    return tuple(address.split(".", levels)[:levels]) if address.count(".") >= levels else ()
