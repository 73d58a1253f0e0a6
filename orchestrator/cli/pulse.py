"""Whether a controller lives, told from its lease without the ORM."""

import socket
from pathlib import Path

from orchestrator.home import registry_path
from orchestrator.registry.records import Lease


def controller_lives(now: float, scheduler: str = "") -> bool:
    """Whether a controller drives the runs of this scheduler; whether any lives where that is not known (empty)."""
    from orchestrator.registry import quick  # sqlite3: not for `orch --help`

    return alive(quick.lease(registry_path(), scheduler or None), now)


def alive(lease: Lease | None, now: float) -> bool:
    """Of this host the process itself is looked at; of another host its lease must not have run out."""
    if lease is None or not lease.holder:
        return False
    host, pid, started = lease.holder.rsplit(":", 2)
    if host != socket.gethostname():
        return lease.expires_at > now
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] not in ("Z", "X") and fields[19] == started
