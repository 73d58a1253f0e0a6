"""Agreement of all ranks on the step after which they save.

The agents' requests reach the ranks at different times, and ranks that save after different steps wait for each other
for ever. So each rank's thread waits until all ranks have the request. Then each rank names the next step at which it
can hold, and the first rank announces the highest. Torch's store carries the messages; no collective is added.
The file needs only the standard library (Python 3.9), because programs load it by its path.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

_PAUSE = threading.Event()
"""Never set. Waiting for it is a pause that also works where a program has replaced `time.sleep`."""
MODULE = "orch_stop_agreement"
"""Name in `sys.modules`, so that a process has one agreement."""
SAVE_AND_GO_ON = 1
"""`StopReason.SAVE_AND_GO_ON`; higher reasons end the program."""
POLL_SECONDS = 0.2
"""Seconds between readings of the cell."""
VOTE_SECONDS = 20.0
"""Seconds for all ranks to name a step once all of them have the request."""
LEAVE_SECONDS, GONE_SECONDS = 1800.0, 5.0
"""Seconds that a rank waits for the other ranks' saves before it exits, and that rank 0 then waits for their exits."""


class Round:
    """One request, from its vote to its save. `step` is the agreed step; 0: not agreed yet; -1: given up."""

    def __init__(self, number: int, hold: int) -> None:
        self.number, self.hold = number, hold
        self.step = self.reason = 0
        self.decided = threading.Event()

    def decide(self, step: int, reason: int) -> None:
        self.reason, self.step = reason, step
        self.decided.set()


class StopAgreement:
    """`request` returns the cell's request: the reason (0: none) and its deadline on CLOCK_MONOTONIC (0: none)."""

    def __init__(self, request: Callable[[], tuple[int, float]], store: Callable[[], Any] | None = None) -> None:
        self._request, self._find_store = request, store or default_group
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._step, self._round = 0, None  # type: int, Round | None
        self._left: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._watch, name="orch-stop-agreement", daemon=True)
        self._thread.start()

    def due(self, step: int) -> int:
        """Return the reason (`StopReason`) if all ranks save after this step, and 0 otherwise.

        To be called at the end of each step by the thread that trains. It blocks while the ranks vote.
        """
        with self._lock:
            self._step, now = step, self._round
        if now is None or step < now.hold or os.getpid() != self._pid:
            return 0
        now.decided.wait(VOTE_SECONDS * 2)
        if 0 <= step < now.step:
            return 0
        with self._lock:
            self._round = None
        return now.reason if now.step > 0 else 0

    def leave(self) -> None:
        """Wait until every rank has saved. Rank 0, which may host the store, returns last."""
        with contextlib.suppress(Exception):  # outermost edge of the agreement: a lost store ends the wait
            if self._left is not None:
                self._left()

    def _watch(self) -> None:
        number, seen = 0, (0, 0.0)
        while True:
            _PAUSE.wait(POLL_SECONDS)
            now = self._request()
            if now == seen or not now[0] or (now[1] and time.monotonic() > now[1]):
                continue
            seen = now
            with contextlib.suppress(Exception):  # outermost edge of this thread: without a store there is no vote
                number += self._vote(number + 1)

    def _vote(self, number: int) -> int:
        """Carry out one round, and return 1, or 0 if the ranks did not meet before the deadline."""
        group = self._poll_until(self._find_store)
        if group is None:
            return 0
        store, rank, world = group
        name = f"orch/stop/{number}"
        store.add(f"{name}/joined", 1)
        if world > 1 and not self._poll_until(lambda: store.add(f"{name}/joined", 0) >= world):
            store.add(f"{name}/joined", -1)
            return 0
        with self._lock:
            # Steps count from 1, and a program that has not stepped yet holds after its first step.
            self._round = current = Round(number, self._step + 1)
        reason = self._request()[0]
        store.set(f"{name}/vote/{rank}", f"{current.hold} {reason}")
        if rank == 0:
            store.set(f"{name}/verdict", _count_votes(store, name, world))
        found = _read(store, f"{name}/verdict", VOTE_SECONDS * 1.5)
        step, agreed = (int(word) for word in (found or "-1 0").split())
        self._left = lambda: _leave(store, name, rank, world)
        current.decide(step, agreed)
        if agreed == SAVE_AND_GO_ON:
            current_round = current
            self._poll_until(lambda: self._round is not current_round)
        return 1

    def _poll_until(self, find: Callable[[], Any]) -> Any:
        """Return the first true value, or None at the deadline of the request."""
        while True:
            if found := find():
                return found
            reason, deadline = self._request()
            if not reason or (deadline and time.monotonic() > deadline):
                return None
            _PAUSE.wait(POLL_SECONDS / 4)


@functools.cache
def start_agreement(rank: Any) -> StopAgreement:
    """Return this process's agreement. `rank` is its `ProgramRank`."""
    return StopAgreement(rank.stop_request)


def default_group() -> tuple[Any, int, int] | None:
    """Return the default process group's store (a connection of its own), rank and size, or None before it exists.

    A program that runs as one process has no store and needs none.
    """
    module = sys.modules.get("torch.distributed")
    if module is not None and module.is_available() and module.is_initialized():
        store = module.distributed_c10d._get_default_store()
        return (store.clone() if hasattr(store, "clone") else store), module.get_rank(), module.get_world_size()
    return (OneProcess(), 0, 1) if os.environ.get("WORLD_SIZE", "1") == "1" else None


class OneProcess:
    """Store of a program with one rank."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def add(self, key: str, amount: int) -> int:
        total = int(self._values.get(key, b"0")) + amount
        self._values[key] = str(total).encode()
        return total

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def get(self, key: str) -> bytes:
        return self._values[key]


def _count_votes(store: Any, name: str, world: int) -> str:
    """Return the highest step and reason, or a verdict that gives the round up if a vote is missing."""
    until = time.monotonic() + VOTE_SECONDS
    votes = [_read(store, f"{name}/vote/{rank}", until - time.monotonic()) for rank in range(world)]
    rows = [[int(word) for word in vote.split()] for vote in votes if vote is not None]
    if len(rows) < world:
        return "-1 0"
    return f"{max(row[0] for row in rows)} {max(row[1] for row in rows)}"


def _read(store: Any, key: str, seconds: float) -> str | None:
    """Return a value once it is there, or None after this many seconds."""
    until = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > until:
            return None
        _PAUSE.wait(POLL_SECONDS / 20)
    value: bytes = store.get(key)
    return value.decode()


def _leave(store: Any, name: str, rank: int, world: int) -> None:
    until = time.monotonic() + LEAVE_SECONDS
    store.add(f"{name}/left", 1)
    while store.add(f"{name}/left", 0) < world and time.monotonic() < until:
        _PAUSE.wait(POLL_SECONDS / 4)
    if rank:
        store.add(f"{name}/gone", 1)
    until = time.monotonic() + GONE_SECONDS
    while not rank and store.add(f"{name}/gone", 0) < world - 1 and time.monotonic() < until:
        _PAUSE.wait(POLL_SECONDS / 4)
