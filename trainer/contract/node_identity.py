"""Where an agent finds itself: its job, its node's index and name, read from the scheduler's environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.contract.config_sections.scheduler_kinds import LOCAL, SLURM
from trainer.contract.process_identity import start_time


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
