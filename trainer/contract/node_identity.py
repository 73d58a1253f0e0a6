"""Identity of nodes and processes: scheduler environment, start time, boot and pid namespace.

Pids come back, so a start time belongs to each one; start times come back after the next boot. Neither containers with
a pid namespace of their own nor two machines of one name can look at each other's processes.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from trainer.contract.config_sections.scheduler_kinds import LOCAL, SLURM

UNKNOWN = "unknown"
"""Stands for the space of a process whose /proc shows another one: nobody can look at its kind by pid."""


def start_time(pid: int) -> str | None:
    """When the process was started, in clock ticks since boot; None when there is none, or only its remains."""
    fields = _stat(pid)
    return fields[19] if fields and fields[0] not in ("Z", "X") else None


def process_state(pid: int) -> str:
    """One letter of proc(5): T is stopped by a signal, Z a zombie; empty when there is no such process."""
    return next(iter(_stat(pid)), "")


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; the name before it may hold anything."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def boot_id() -> str:
    """Names this boot of this machine; raises OSError."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_space() -> str:
    """A short digest of the calling process's space."""
    return _space(os.getpid())


def is_visible(space: str) -> bool:
    """Whether processes of that space can be looked at by their pids; an older version wrote down none (empty)."""
    own = process_space()
    return own != UNKNOWN and space in ("", own)


@cache
def _space(pid: int) -> str:
    try:
        # `unshare --pid` without a /proc of its own: the pids that are shown are others.
        if os.readlink("/proc/self") != str(pid):
            return UNKNOWN
        parts = boot_id(), os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


@dataclass(frozen=True, kw_only=True)
class NodeIdentity:
    """One agent's place in its job; `node` counts from 0."""

    kind: str  # of scheduler_kinds.KINDS
    job_id: str
    node: int
    nodes: int
    name: str
    restarts: int = 0
    switches: tuple[str, ...] = ()  # that lead to the node, the top one first, as far as the scheduler tells


def local_job_id(pid: int) -> str:
    """Identity of a local job: pid and start time (clock ticks since boot), because pids come back."""
    started = start_time(pid)
    if started is None:
        raise ProcessLookupError(f"there is no process {pid}")
    return f"{pid}-{started}"


def discover(environ: Mapping[str, str] = os.environ) -> NodeIdentity:
    """The calling agent's place; raises RuntimeError outside a job."""
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
            switches=_switches(environ),
        )
    raise RuntimeError("not inside a job: neither SLURM_JOB_ID nor SUBMITIT_LOCAL_JOB_ID is set")


def _switches(environ: Mapping[str, str]) -> tuple[str, ...]:
    """`s0.s4.node7` with the pattern `switch.switch.node` are two switches; a node's own name may have dots in it."""
    address = environ.get("SLURM_TOPOLOGY_ADDR", "")
    levels = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").count(".")
    return tuple(address.split(".", levels)[:levels]) if address.count(".") >= levels else ()
