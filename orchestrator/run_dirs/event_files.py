"""Output of an attempt's jobs: events since the last pass, and the newest progress."""

import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import NotAFile, number, open_regular
from orchestrator.registry.store import Store
from orchestrator.run_dirs.controlled_run import ControlledRun
from trainer.protocol.events import Event, EventKind, read_events
from trainer.protocol.heartbeat import Heartbeat
from trainer.protocol.run_dir import AttemptDir

METRICS_TAIL = 16 * 1024  # bytes at the end of the metrics file that always contain a whole line


@dataclass(frozen=True, kw_only=True)
class KnownProgress:
    """Latest trained step, its loss, and the last step that a user's own program reported (0: none).

    `saved`: the newest checkpoint according to the heartbeat, because ranks' commit events may be lost (0: unknown).
    """

    step: int
    loss: float | None = None
    total: int = 0
    saved: int = 0


def progress(place: AttemptDir) -> KnownProgress | None:
    """Return the newest trained step and its loss, from the last metrics line or else from the heartbeat."""
    line, heartbeat = last_line(place.metrics), None
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        heartbeat = Heartbeat.read(place.heartbeat)
    # A full disk accepts no more lines, but the heartbeat is overwritten in place.
    newer = heartbeat.step or 0 if heartbeat is not None and heartbeat.saves_failing else 0
    saved = heartbeat.saved_step if heartbeat is not None else 0
    if line is not None and isinstance(line.get("step"), int) and line["step"] >= newer:
        loss = None
        with suppress(KeyError, TypeError, ValueError):  # an invalid value
            loss = number(line["loss"]) if line.get("loss") is not None else None
        return KnownProgress(step=line["step"], loss=loss, saved=saved)
    # Step 0 means that no rank has reported its step yet, not that the run has restarted.
    if heartbeat is None or not heartbeat.step:
        return None
    return KnownProgress(step=heartbeat.step, loss=heartbeat.loss, total=heartbeat.total_steps, saved=saved)


def last_line(path: Path) -> dict[str, Any] | None:
    """Return the last whole line of a JSON Lines file; None if it has none."""
    try:
        with open_regular(path) as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - METRICS_TAIL))
            block = stream.read(METRICS_TAIL)
        lines = block[: block.rfind(b"\n") + 1].splitlines()
        found = json.loads(lines[-1]) if lines else None
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True, kw_only=True)
class NewEvents:
    """Events read from one file, up to the offset `end`."""

    name: str
    events: list[Event]
    end: int


@dataclass(frozen=True, kw_only=True)
class TierPaths:
    """Tier paths, resolved before the registry is locked, so that no transaction waits for a mount."""

    first_tier: str  # tier in which checkpoints are committed; empty for the run's own folder
    real: Mapping[str, str]

    def same(self, tier: str, other: str) -> bool:
        return self.real.get(tier, tier) == self.real.get(other, other)


def event_files(place: AttemptDir) -> list[Path]:
    """Return the existing event files."""
    return sorted(place.events.glob("*.jsonl")) if place.events.is_dir() else []


def read_new_events(view: ControlledRun, path: Path, cursors: Mapping[str, int]) -> NewEvents | None:
    """Return the new events of one file. Foreign entries are skipped; `collect_evidence` reports them."""
    name = str(path.relative_to(view.folder.path))
    offset = cursors.get(name, 0)
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
    return None if end == offset else NewEvents(name=name, events=events, end=end)


def tiers_mentioned(store: Store, view: ControlledRun, fresh: Sequence[NewEvents]) -> set[str]:
    """Return every tier that these events or the run's rows may mention."""
    named = {str(event.data.get("tier") or "") for one in fresh for event in one.events}
    known = {row.tier for row in store.checkpoints(view.run.name)} | {row.tier for row in store.copies(view.run.name)}
    return (named | known | {str(view.folder.checkpoints)}) - {""}


def resolve_paths(view: ControlledRun, node: str, tiers: Iterable[str]) -> TierPaths:
    """Resolve the real paths of the tiers."""
    return TierPaths(first_tier=_first_tier(view, node), real={tier: _real_path(tier) for tier in tiers})


def first_node(fresh: Sequence[NewEvents]) -> str:
    """Return the first node of the attempt whose start event is among the new events, or `unknown`."""
    events = (event for one in fresh for event in one.events)
    nodes = (event.data.get("nodes") for event in events if event.kind == EventKind.ATTEMPT_STARTED)
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
