"""File next to the registry with a controller's environment and whether Slurm answers in it."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from checkpointing.storage.durable import dump_line, read_json, write_atomically
from orchestrator.registry.lease import Holder, host_file
from orchestrator.registry.records import Lease
from orchestrator.scheduler.slurm.client_environment import ClientEnvironment
from trainer.protocol.config_sections.scheduler_kinds import SLURM


@dataclass(frozen=True, kw_only=True)
class SlurmContact:
    """A controller's recorded environment and the reason why Slurm does not answer; empty if it does."""

    pid: int
    client: ClientEnvironment
    silence: str = ""


def read_contact(store_path: Path, lease: Lease | None) -> SlurmContact | None:
    """Return the record of the lease's holder; None if it is missing or another process wrote it."""
    holder = Holder.parse(lease.holder) if lease is not None else None
    if lease is None or holder is None:
        return None
    with suppress(OSError, ValueError, KeyError, TypeError):
        fields = read_json(host_file(store_path, SLURM, lease.scheduler, holder.host))
        client = ClientEnvironment.from_json(fields["client"])
        if client is not None and fields["pid"] == holder.pid:
            return SlurmContact(pid=fields["pid"], client=client, silence=str(fields["silence"]))
    return None


def write_contact(store_path: Path, scheduler: str, silence: str) -> None:
    """Record this process's environment, and why Slurm does not answer in it. Raises OSError."""
    fields = {"pid": os.getpid(), "client": ClientEnvironment.from_environ().to_json(), "silence": silence}
    write_atomically(host_file(store_path, SLURM, scheduler), dump_line(fields).encode())
