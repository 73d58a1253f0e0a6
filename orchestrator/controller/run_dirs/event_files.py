"""What the event files of an attempt have got since the last look, and the places that they speak of.
The records in the run directories, written behind every commit; one that hangs, or is large, is owed for a while."""

import errno
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpointing.storage.durable import NotAFile
from orchestrator.controller.run_dirs.bounded_files import Files, RunDirHangs
from orchestrator.controller.run_view import RunView
from orchestrator.registry.operations.reads import Reads
from orchestrator.registry.operations.run_record import Record, write_record, write_records
from orchestrator.registry.store import Store
from trainer.contract.events import Event, EventKind, read_events
from trainer.contract.run_dir import AttemptDir, RunDir


@dataclass(frozen=True, kw_only=True)
class NewEvents:
    """What was read of one event file: from `offset` of the last time up to `end`."""

    name: str
    events: list[Event]
    end: int


@dataclass(frozen=True, kw_only=True)
class TierPaths:
    """What only the file system can tell, asked before the registry is locked: no transaction waits for a mount."""

    first_tier: str
    """Where checkpoints are committed; empty for the run's own folder."""
    real: Mapping[str, str]

    def same(self, tier: str, other: str) -> bool:
        return self.real.get(tier, tier) == self.real.get(other, other)


def event_files(place: AttemptDir) -> list[Path]:
    """The event files that are there."""
    return sorted(place.events.glob("*.jsonl")) if place.events.is_dir() else []


def read_new_events(view: RunView, path: Path, cursors: Mapping[Path, int]) -> NewEvents | None:
    """What is new in one file; one that is no file of ours is left, and told of by `collect_evidence`."""
    offset = cursors[path]
    try:
        if path.stat().st_size <= offset:
            return None
        events, end = read_events(path, offset)
    except FileNotFoundError:
        return None
    except OSError as error:
        if isinstance(error, NotAFile) or error.errno == errno.ELOOP:
            return None
        raise
    return None if end == offset else NewEvents(name=str(path.relative_to(view.folder.path)), events=events, end=end)


def tiers_mentioned(store: Store, view: RunView, fresh: Sequence[NewEvents]) -> set[str]:
    """Every place that these events, or what is known of the run, may speak of."""
    told = {str(event.data.get("tier") or "") for one in fresh for event in one.events}
    known = {item.tier for item in store.checkpoints(view.run.name)} | {
        copy.tier for copy in store.copies(view.run.name)
    }
    return (told | known | {str(view.folder.checkpoints)}) - {""}


def resolve_paths(view: RunView, node: str, tiers: Iterable[str]) -> TierPaths:
    """Look the places up."""
    return TierPaths(first_tier=_first_tier(view, node), real={tier: _real_path(tier) for tier in tiers})


def first_node(fresh: Sequence[NewEvents]) -> str:
    """The node that leads, when the attempt is only being told of."""
    nodes = (
        event.data.get("nodes") for one in fresh for event in one.events if event.kind == EventKind.ATTEMPT_STARTED
    )
    return str(next((names[0] for names in nodes if isinstance(names, list) and names), "unknown"))


def _first_tier(view: RunView, node: str) -> str:
    """Where the checkpoint was committed; empty for the run's own folder."""
    config, folder = view.config.checkpoint, view.folder
    if not config.tiers:
        return ""
    try:
        # Late: it brings fsspec, which runs without tiers do not need here.
        from checkpointing.tiers.tier import resolve_tiers

        path = resolve_tiers(config, folder.checkpoints, folder.name, node)[0].path
    except (ImportError, ValueError, OSError):
        return f"{config.tiers[0].path}/{folder.name}"
    return "" if _real_path(path) == _real_path(str(folder.checkpoints)) else path


def _real_path(tier: str) -> str:
    return tier if "://" in tier else os.path.realpath(tier)


AGAIN = 10.0
"""Seconds between two tries for a directory that hangs."""
RATE = 64 << 10
"""Bytes a second that the record of one run may cost on average: a large one is written less often."""


class RecordWriter:
    """To be called after every commit with the names of the runs that it changed, and at the end to write the rest."""

    def __init__(self, store: Reads, files: Files, clock: Callable[[], float] = time.monotonic) -> None:
        self._store, self._files, self._clock = store, files, clock
        self._owed: set[str] = set()
        self._tried_at = 0.0
        self._not_before: dict[str, float] = {}

    def __call__(self, runs: set[str]) -> None:
        """Write the records of these runs, and now and then those that are owed."""
        now = self._clock()
        if self._owed and now - self._tried_at >= AGAIN:
            self._tried_at, runs, self._owed = now, runs | self._owed, set()
        early = {name for name in runs if now < self._not_before.get(name, 0.0)}
        self._owed |= early
        write_records(self._store, runs - early, self._write)

    def write_owed(self) -> None:
        """Write what is owed, however much has been written before; not to where a directory hangs."""
        owed, self._owed = self._owed, set()
        write_records(self._store, owed, self._write)

    def _write(self, folder: RunDir, record: Record) -> None:
        name = record.run.name
        try:
            size = self._files.call(folder.path, lambda: write_record(folder, record))
        except RunDirHangs:
            self._owed.add(name)
        else:
            self._not_before[name] = self._clock() + size / RATE - 1.0
