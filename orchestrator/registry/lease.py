"""Controller lease: holder, liveness, takeover and waiting."""

import fcntl
import hashlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from orchestrator.observed_since import ObservedSince
from orchestrator.registry.records import Lease
from trainer.protocol.node_identity import is_visible, process_space, process_state, start_time

if TYPE_CHECKING:  # `orch status` reads the lease without opening the store
    from orchestrator.registry.store import Store

LEASE_TTL = 60.0
"""Seconds without renewal after which a controller counts as stalled and its lease may be taken, even on its host."""
ONCE = "+once"
"""Name suffix of a holder that makes a single pass."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Process that holds or wants the lease: `host/space:pid:start time`. The time is needed because pids are reused.

    The space identifies the pid namespace (`process_space`). The suffix `+once` marks a single pass, which later work
    cannot rely on.
    """

    host: str
    pid: int
    started: str
    once: bool = False
    space: str = ""

    def __str__(self) -> str:
        host = f"{self.host}/{self.space}" if self.space else self.host
        return f"{host}:{self.pid}:{self.started}{ONCE if self.once else ''}"

    @classmethod
    def parse(cls, text: str) -> "Holder | None":
        """Return the parts of a holder; None for the empty holder of a dropped lease or for unreadable text."""
        place, _, pid = text.rpartition(":")[0].rpartition(":")
        host, _, space = place.partition("/")
        started = text.rpartition(":")[2]
        once, started = started.endswith(ONCE), started.removesuffix(ONCE)
        if not host or not pid.isdigit():
            return None
        return cls(host=host, pid=int(pid), started=started, once=once, space=space)

    @property
    def is_here(self) -> bool:
        """Whether its process is visible from here. The host name alone does not prove it."""
        return self.host == host_name() and is_visible(self.space)

    @property
    def lives(self) -> bool | None:
        """Whether the process is alive; None if it is not visible from here."""
        return start_time(self.pid) == self.started if self.is_here else None


def holder_host(text: str) -> str:
    """Return the host in a holder's name; empty for a dropped lease."""
    holder = Holder.parse(text)
    return holder.host if holder is not None else text.partition(":")[0]


def this_process(*, once: bool = False) -> Holder:
    pid = os.getpid()
    return Holder(host=host_name(), pid=pid, started=start_time(pid) or "0", once=once, space=process_space())


def host_name() -> str:
    return socket.gethostname()


@dataclass(frozen=True, kw_only=True)
class LeaseFacts:
    """Facts about a held lease; `unrenewed_for` is in seconds of a clock that the caller can trust."""

    holder: Holder | None
    lives: bool | None  # the holder's process; None: not visible from here
    stopped: bool
    own: bool
    unrenewed_for: float

    @classmethod
    def from_lease(cls, lease: Lease, unrenewed_for: float) -> "LeaseFacts":
        holder = Holder.parse(lease.holder)
        return cls(
            holder=holder,
            lives=holder.lives if holder is not None else None,
            stopped=holder is not None and holder.is_here and process_state(holder.pid) == "T",
            own=holder in (this_process(), this_process(once=True)),
            unrenewed_for=unrenewed_for,
        )


@dataclass(frozen=True, kw_only=True)
class LeaseState:
    """Whether a controller is alive, whether its lease may be taken now, and why."""

    alive: bool
    may_take: bool
    reason: str
    stalled: bool = False
    once: bool = False  # exits after a single pass
    process_seen: bool = False  # its process is alive and visible from here

    @property
    def stays(self) -> bool:
        """Whether it will keep driving the runs; a single pass does not."""
        return self.alive and not self.once

    @property
    def may_write(self) -> bool:
        """Whether it is working, or is stalled on this host and may wake in the middle of a write."""
        return self.alive or self.process_seen


def judge(facts: LeaseFacts | None, ttl: float) -> LeaseState:
    """Return the state of a lease, which is not held if `facts` is None. This is the only expiry rule. Pure."""
    if facts is None:
        return LeaseState(alive=False, may_take=True, reason="no controller is alive")
    who = f"pid {facts.holder.pid} on {facts.holder.host}" if facts.holder is not None else "an unknown holder"
    of = partial(LeaseState, once=facts.holder is not None and facts.holder.once, process_seen=facts.lives is True)
    if facts.own:
        return of(alive=True, may_take=True, reason="this process holds the lease")
    # If the process is visible and dead, no wait is needed.
    if facts.lives is False:
        return of(alive=False, may_take=True, reason=f"no controller is alive: {who} is gone")
    said = f"controller stalled for {facts.unrenewed_for:.0f} s ({who})"
    # A process may live forever without progress, stopped or stuck in the kernel. Its epoch fences it when it wakes.
    if facts.unrenewed_for >= ttl:
        return of(alive=False, may_take=True, stalled=True, reason=said)
    if facts.stopped:
        left = f"stopped by a signal; its lease expires in {ttl - facts.unrenewed_for:.0f} s"
        return of(alive=False, may_take=False, stalled=True, reason=f"{said}: {left}")
    return of(alive=True, may_take=False, reason=f"{who} renewed its lease {facts.unrenewed_for:.0f} s ago")


def displayed_state(lease: Lease | None, now: float) -> LeaseState:
    """Return the lease state by the wall clock, for display only. A clock jump distorts it until the next renewal."""
    if lease is None or not lease.holder:
        return judge(None, LEASE_TTL)
    # A renewal time in the future means that the clock was set back, and that there has been no renewal since.
    return judge(LeaseFacts.from_lease(lease, abs(now - lease.renewed_at)), LEASE_TTL)


def observed_state(lease: Lease | None, observed: ObservedSince) -> LeaseState:
    """Return the lease state for takeovers, judged by how long this host, its own pauses aside, has seen no renewal."""
    if lease is None or not lease.holder:
        return judge(None, LEASE_TTL)
    seen = observed.watched_seconds(f"lease:{lease.scheduler}", f"{lease.epoch}:{lease.renewed_at}")
    return judge(LeaseFacts.from_lease(lease, seen), LEASE_TTL)


def acquire(
    store: "Store", observed: ObservedSince, now: float, *, once: bool = False, scheduler: str = ""
) -> Lease | None:
    """Acquire the lease for this scheduler's runs (empty: for all runs) and return it.

    Returns None while another controller is alive or has not been silent for long enough. A stalled controller on this
    host is killed first, because it may hold the registry's lock and must not wake in the middle of an effect. A
    controller on another host is fenced by the epoch.
    """
    rivals = [held for held in store.leases() if scheduler in ("", held.scheduler) or not held.scheduler]
    # Observe every lease, because `all` would stop at the first live one.
    states = [observed_state(held, observed) for held in rivals]
    if not all(state.may_take for state in states):
        return None
    for held, state in zip(rivals, states, strict=True):
        if state.stalled:
            _end(Holder.parse(held.holder))
    lease = store.take_lease(str(this_process(once=once)), now, LEASE_TTL, scheduler, over=rivals)
    return store.renew_lease(lease, now, LEASE_TTL) if lease is not None else None


def _end(holder: Holder | None) -> None:
    """Send SIGKILL to a stalled daemon on this host. A single pass runs in a user's shell; the epoch fences it."""
    if holder is None or not holder.lives or holder.once:
        return
    try:
        handle = os.pidfd_open(holder.pid)
    except OSError:
        return
    try:
        if holder.lives:  # the descriptor belongs to the holder, not to a later process with its pid
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        return
    finally:
        os.close(handle)


def host_file(store_path: Path, what: str, key: str, host: str = "") -> Path:
    """Return the path of a file for one host (default: this one) and scheduler `key`; controllers must not share it."""
    digest = hashlib.sha256(key.encode()).hexdigest()[:8]
    return store_path.with_name(f".{store_path.name}.{what}.{host or host_name()}.{digest}")


log = logging.getLogger("orch.controller")

AGAIN = 0.25
"""Seconds between attempts to take the lease; the gaps between single passes may be as short."""
SLACK = 15.0
"""Seconds beyond the lease's TTL for which a single pass waits to replace a stalled controller."""


@contextmanager
def single_waiter(store_path: Path, key: str) -> Iterator[bool]:
    """Yield whether no other process on this host is waiting for the lease; each submit may start one."""
    with host_file(store_path, "waits", key).open("ab") as waits:
        alone = _locks(waits)
        if not alone:
            time.sleep(AGAIN)  # a probe by `is_awaited` may have held it
            alone = _locks(waits)
        if not alone:
            log.info("another process is already waiting for the lease")
        yield alone


def is_awaited(store_path: Path, key: str) -> bool:
    """Return whether a process on this host is waiting for this lease."""
    with host_file(store_path, "waits", key).open("ab") as waits:
        return not _locks(waits)


def _locks(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # without locks several processes may wait: one takes the lease, and the others see it renewed
    return True


def acquire_once(store: "Store", observed: ObservedSince, key: str, patience: float) -> Lease | None:
    """Return the lease for a single pass; None if another controller is alive or was not watched for long enough."""
    give_up = time.monotonic() + patience
    while True:
        lease = acquire(store, observed, time.time(), once=True, scheduler=key)
        if lease is not None or displayed_state(store.lease(key), time.time()).alive or time.monotonic() >= give_up:
            return lease
        time.sleep(AGAIN)


def wait_for_lease(store: "Store", observed: ObservedSince, key: str, stopping: Callable[[], bool]) -> Lease | None:
    """Return the lease for a daemon; None if another controller is alive or this one must stop."""
    first = store.lease(key)
    while not stopping():
        lease = acquire(store, observed, time.time(), scheduler=key)
        if lease is not None:
            return lease
        held = store.lease(key)
        state = displayed_state(held, time.time())
        renewed = held is not None and first is not None and held.renewed_at != first.renewed_at
        # Wait for a single pass to exit, since it will not stay, and for a stalled controller's lease to expire.
        if not state.once and (renewed or (state.alive and state.process_seen)):
            log.info("another controller is alive: %s", held.holder if held else "")
            return None
        time.sleep(AGAIN)
    return None
