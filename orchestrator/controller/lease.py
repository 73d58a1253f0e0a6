"""The lease as this host sees it: who holds it, whether that process lives, and when it may be taken over."""

import os
import socket
from dataclasses import dataclass

from orchestrator.controller.actor import LEASE_TTL
from orchestrator.controller.watch import Watch
from orchestrator.registry.records import Lease
from orchestrator.registry.store import Store

ONCE = "+once"
"""Ends the name of a holder that makes a single pass."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """A process that holds or wants the lease: `host:pid:start time`, because pids come back.

    `+once` at the end says that it makes a single pass: it is no controller that anybody may rely on.
    """

    host: str
    pid: int
    started: str
    once: bool = False

    def __str__(self) -> str:
        return f"{self.host}:{self.pid}:{self.started}{ONCE if self.once else ''}"

    @classmethod
    def parse(cls, text: str) -> "Holder | None":
        """The parts of a holder; None for the empty one of a dropped lease, or for anything else."""
        host, _, rest = text.rpartition(":")[0].rpartition(":")
        pid, started = rest, text.rpartition(":")[2]
        once, started = started.endswith(ONCE), started.removesuffix(ONCE)
        return cls(host=host, pid=int(pid), started=started, once=once) if host and pid.isdigit() else None

    @property
    def is_here(self) -> bool:
        return self.host == host_name()

    @property
    def lives(self) -> bool | None:
        """Whether the process lives; None when it runs on another host."""
        return start_time(self.pid) == self.started if self.is_here else None


def this_process(*, once: bool = False) -> Holder:
    return Holder(host=host_name(), pid=os.getpid(), started=start_time(os.getpid()) or "0", once=once)


def host_name() -> str:
    return socket.gethostname()


def start_time(pid: int) -> str | None:
    """When the process was started, in clock ticks since boot; None when there is none, or only its remains."""
    try:
        with open(f"/proc/{pid}/stat") as stream:
            fields = stream.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else fields[19]


def may_take(held: Lease | None, watch: Watch, *, ttl: float = LEASE_TTL) -> bool:
    """Whether the lease may be taken (over): hosts' clocks differ, so its age is judged by our own observation."""
    # Nobody has it, or its holder gave it back.
    if held is None or not held.holder:
        return True
    holder = Holder.parse(held.holder)
    lives = holder.lives if holder is not None else None
    # On this host the process itself can be looked at, dead or alive.
    if lives is not None:
        return not lives or holder in (this_process(), this_process(once=True))
    return watch.age(f"lease:{held.scheduler}", f"{held.epoch}:{held.renewed_at}") >= ttl


def acquire(
    store: Store, watch: Watch, now: float, *, ttl: float = LEASE_TTL, once: bool = False, scheduler: str = ""
) -> Lease | None:
    """The lease of this scheduler's runs (of all runs) for this process; None while another controller lives."""
    rivals = [held for held in store.leases() if scheduler in ("", held.scheduler) or not held.scheduler]
    # Every one is looked at, so that the time of each is measured.
    if not all([may_take(held, watch, ttl=ttl) for held in rivals]):
        return None
    # The store compares with its column: let a lease that we saw die count as expired, whatever that host's clock said.
    then = max([now, *(held.expires_at for held in rivals)])
    lease = store.take_lease(str(this_process(once=once)), then, ttl, scheduler)
    return store.renew_lease(lease, now, ttl) if lease is not None else None
