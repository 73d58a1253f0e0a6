"""New events in an attempt's event files since the last pass."""

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from checkpointing.storage.durable import NotAFile
from orchestrator.controller.controlled_run import ControlledRun
from orchestrator.registry.store import Store
from trainer.protocol.events import Event, EventKind, read_events
from trainer.protocol.run_dir import AttemptDir


@dataclass(frozen=True, kw_only=True)
class NewEvents:
    """Events read from one file, up to the offset `end`."""

    name: str
    events: list[Event]
    end: int


@dataclass(frozen=True, kw_only=True)
class TierPaths:
    """Facts from the file system, collected before the registry is locked, so that no transaction waits for a mount."""

    first_tier: str
    """Tier in which checkpoints are committed; empty for the run's own folder."""
    real: Mapping[str, str]

    def same(self, tier: str, other: str) -> bool:
        return self.real.get(tier, tier) == self.real.get(other, other)


def event_files(place: AttemptDir) -> list[Path]:
    """Return the existing event files."""
    return sorted(place.events.glob("*.jsonl")) if place.events.is_dir() else []


def read_new_events(view: ControlledRun, path: Path, cursors: Mapping[Path, int]) -> NewEvents | None:
    """Return the new events of one file; foreign entries are skipped here and reported by `collect_evidence`."""
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


def tiers_mentioned(store: Store, view: ControlledRun, fresh: Sequence[NewEvents]) -> set[str]:
    """Return every tier that these events or the run's rows may mention."""
    told = {str(event.data.get("tier") or "") for one in fresh for event in one.events}
    known = {item.tier for item in store.checkpoints(view.run.name)} | {
        copy.tier for copy in store.copies(view.run.name)
    }
    return (told | known | {str(view.folder.checkpoints)}) - {""}


def resolve_paths(view: ControlledRun, node: str, tiers: Iterable[str]) -> TierPaths:
    """Resolve the real paths of the tiers."""
    return TierPaths(first_tier=_first_tier(view, node), real={tier: _real_path(tier) for tier in tiers})


def first_node(fresh: Sequence[NewEvents]) -> str:
    """Return the leading node of an attempt whose start event is among the new ones."""
    nodes = (
        event.data.get("nodes") for one in fresh for event in one.events if event.kind == EventKind.ATTEMPT_STARTED
    )
    return str(next((names[0] for names in nodes if isinstance(names, list) and names), "unknown"))


def _first_tier(view: ControlledRun, node: str) -> str:
    """Return the tier in which checkpoints are committed; empty for the run's own folder."""
    config, folder = view.config.checkpoint, view.folder
    if not config.tiers:
        return ""
    try:
        # Imported late: fsspec is needed only for runs with tiers.
        from checkpointing.tiers.tier import resolve_tiers

        path = resolve_tiers(config, folder.checkpoints, folder.name, node)[0].path
    except (ImportError, ValueError, OSError):
        return f"{config.tiers[0].path}/{folder.name}"
    return "" if _real_path(path) == _real_path(str(folder.checkpoints)) else path


def _real_path(tier: str) -> str:
    return tier if "://" in tier else os.path.realpath(tier)
