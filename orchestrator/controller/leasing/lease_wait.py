"""Waiting for a lease that another process holds: a single pass for a while, a daemon until it knows who lives."""

import fcntl
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from orchestrator.controller.leasing.host_file import host_file
from orchestrator.controller.leasing.lease import acquire, displayed_state
from orchestrator.controller.leasing.observed_since import ObservedSince
from orchestrator.registry.records import Lease
from orchestrator.registry.store import Store

log = logging.getLogger("orch.controller")

AGAIN = 0.25
"""Seconds between tries for the lease: single passes leave gaps that are no longer than this."""
SLACK = 15.0
"""Seconds beyond the lease's own for which a pass waits until a stalled controller may be replaced."""


@contextmanager
def single_waiter(store_path: Path, key: str) -> Iterator[bool]:
    """Whether no other process of this host waits for this lease: every submit starts one beside a stalled one."""
    with host_file(store_path, "waits", key).open("ab") as waits:
        alone = _locks(waits)
        if not alone:
            time.sleep(AGAIN)  # it may have been held by a look
            alone = _locks(waits)
        if not alone:
            log.info("another process waits for the lease")
        yield alone


def is_awaited(store_path: Path, key: str) -> bool:
    """Whether a process of this host waits for this lease."""
    with host_file(store_path, "waits", key).open("ab") as waits:
        return not _locks(waits)


def _locks(file: BinaryIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # without locks there may be several waiters: one takes the lease, the others see it renewed
    return True


def acquire_once(store: Store, observed: ObservedSince, key: str, patience: float) -> Lease | None:
    """The lease for a single pass; None while another controller lives, or has not been watched for long enough."""
    give_up = time.monotonic() + patience
    while True:
        lease = acquire(store, observed, time.time(), once=True, scheduler=key)
        if lease is not None or displayed_state(store.lease(key), time.time()).alive or time.monotonic() >= give_up:
            return lease
        time.sleep(AGAIN)


def wait_for_lease(store: Store, observed: ObservedSince, key: str, stopping: Callable[[], bool]) -> Lease | None:
    """The lease for a daemon; None when another controller shows signs of life, or this one is to stop."""
    first = store.lease(key)
    while not stopping():
        lease = acquire(store, observed, time.time(), scheduler=key)
        if lease is not None:
            return lease
        held = store.lease(key)
        state = displayed_state(held, time.time())
        renewed = held is not None and first is not None and held.renewed_at != first.renewed_at
        # A single pass is soon over, and nobody would go on after it; a stalled controller is waited out.
        if not state.once and (renewed or (state.alive and state.process_seen)):
            log.info("another controller lives: %s", held.holder if held else "")
            return None
        time.sleep(AGAIN)
    return None
