"""Two or more tiers below one folder, and the flushers of all ranks over them."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from checkpointing.engine.save.flusher import Flusher, TransferTimeouts
from checkpointing.tiers.catalog import Catalog, Owner
from checkpointing.tiers.tier import ResolvedTier, RunTiers
from tests.checkpointing.engine.thread_ranks import ThreadedWriter, ThreadGroup, together
from tests.checkpointing.fake_storages import Faulty
from tests.checkpointing.made_checkpoint import NONCE, make, tier_at

SECONDS = 20.0
FOUR = {
    ".metadata": b"metadata",
    "index.json": b"index",
    **{f"__{rank}_0.distcp": b"%d" % rank * 999 for rank in range(4)},
}


@dataclass
class Tiers:
    """Two or more tiers below one folder, and the flushers of all ranks over them."""

    root: Path
    names: tuple[str, ...] = ("fast", "slow")
    size: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    alive: bool = True
    reported: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    flushers: list[Flusher] = field(default_factory=list)
    thread_group: ThreadGroup = field(init=False)

    def __post_init__(self) -> None:
        self.storages = {name: Faulty(self.root / name) for name in self.names}
        self.writer = ThreadedWriter({str(storage.root): storage for storage in self.storages.values()})
        self.changed = threading.Condition()

    def place(self, name: str) -> ResolvedTier:
        return tier_at(self.root / name, self.storages[name], **self.changes.get(name, {}))

    def start(self, places: Callable[[int], list[ResolvedTier]] | None = None, **options: Any) -> None:
        self.thread_group = ThreadGroup(self.size)
        owner = Owner(1, NONCE, (), lambda: self.alive)
        for member in self.thread_group.members():
            known = places(member.rank) if places else [self.place(name) for name in self.names]
            arguments = {"timeouts": TransferTimeouts(look=0.02), **self.options, **options}
            run_tiers = RunTiers(tuple(known), known[0].storage)
            self.flushers.append(Flusher(run_tiers, member, owner, lambda: self.writer, self.emit, **arguments))
        self.idle()  # what was there before is dealt with

    def emit(self, kind: str, data: dict[str, Any]) -> None:
        with self.changed:
            self.reported.append((kind, data))
            self.changed.notify_all()

    def commit(self, step: int, **options: Any) -> str:
        name = make(self.storages[self.names[0]], step, **options)
        for flusher in self.flushers:
            flusher.record_commit(name)
        return name

    def drain(self, seconds: float = SECONDS) -> bool:
        results = together([lambda flusher=flusher: flusher.drain(seconds) for flusher in self.flushers])
        assert len(set(results)) == 1
        return results[0]

    def idle(self) -> None:
        """Wait until everything that was signalled is done."""
        deadline = time.monotonic() + SECONDS
        while any(flusher._done < flusher._signals for flusher in self.flushers):
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def steps(self, name: str) -> list[int]:
        return [entry.step for entry in Catalog(self.root / name).committed_entries()]

    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.reported]

    def wait_for(self, kind: str) -> dict[str, Any]:
        with self.changed:
            assert self.changed.wait_for(lambda: kind in self.kinds(), SECONDS), self.reported
            return next(data for each, data in self.reported if each == kind)

    def close(self) -> None:
        for storage in self.storages.values():
            if isinstance(storage, Faulty):
                storage.healed.set()
        together([flusher.close for flusher in self.flushers])


def tiers_of(tmp_path: Path, *names: str, size: int = 1, **changes: dict[str, Any]) -> Tiers:
    return Tiers(tmp_path, names or ("fast", "slow"), size, changes=changes)


@pytest.fixture
def no_waiting_for_disks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy disk must not look like a hung one here; what is waited for in which order others test."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[Tiers]:
    made = Tiers(tmp_path)
    yield made
    made.close()
