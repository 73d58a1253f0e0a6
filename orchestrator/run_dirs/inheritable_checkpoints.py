"""A run's checkpoints that are visible from this machine."""

import errno
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from checkpointing.config import CheckpointConfig
from checkpointing.format.commit import parse_name
from checkpointing.storage.backends import without_secrets
from checkpointing.tiers.catalog import Entry
from checkpointing.tiers.tier import ResolvedTier, absent_paths, resolve_tiers
from orchestrator.registry.records import Attempt, Checkpoint, CheckpointCopy, Run
from orchestrator.states import Trust
from trainer.protocol.run_dir import RunDir

log = logging.getLogger("orch.controller")

_NOT_AGAIN = frozenset({Trust.SUSPECT, Trust.CORRUPT, Trust.DELETED})


def shared_places(config: CheckpointConfig, folder: RunDir) -> tuple[ResolvedTier, ...]:
    """Return the tiers that all nodes and this machine share; the run's own folder if the tiers cannot be opened."""
    if config.tiers:
        try:
            found = resolve_tiers(config, folder.checkpoints, folder.name, "this-machine")
            return tuple(place for place in found if place.shared)
        except (ImportError, ValueError, OSError) as error:
            log.warning("%s: cannot read its tiers: %s", folder.name, error)
    return resolve_tiers(CheckpointConfig(), folder.checkpoints, folder.name, "this-machine")


def look(places: Sequence[ResolvedTier]) -> tuple[list[Entry], dict[str, OSError]]:
    """Return every visible committed checkpoint once, newest first, and the unreadable tiers by path."""
    found: dict[str, Entry] = {}
    unread: dict[str, OSError] = {}
    for place in reversed(places):
        try:
            found |= {entry.name: entry for entry in place.catalog.committed_entries()}
        except OSError as error:
            unread[place.path] = error
    newest_first = sorted(found.values(), key=lambda entry: (entry.step, entry.attempt, entry.name), reverse=True)
    return newest_first, unread


@dataclass(frozen=True, kw_only=True)
class OwnCheckpoints:
    """Names of the checkpoints that a run's attempts wrote, or that were imported at its start.

    A tier outside the run's folder may hold checkpoints of a run with the same name in another registry.
    """

    writers: frozenset[tuple[int, str]]
    begun: str = ""

    @classmethod
    def from_rows(cls, run: Run, attempts: Iterable[Attempt]) -> "OwnCheckpoints":
        begun = PurePath(str((run.identity.get("imported") or {}).get("checkpoint", ""))).name
        return cls(writers=frozenset((attempt.number, attempt.nonce) for attempt in attempts), begun=begun)

    def has_written(self, name: str) -> bool:
        parts = parse_name(name)
        return parts is not None and (parts.attempt, parts.nonce) in self.writers

    def __contains__(self, name: str) -> bool:
        return name == self.begun or self.has_written(name)


def of_run(seen: Iterable[Entry], run: Run, attempts: Iterable[Attempt]) -> list[Entry]:
    """Return the entries of this run's checkpoints; an imported checkpoint counts as written by attempt 0."""
    own = OwnCheckpoints.from_rows(run, attempts)
    seen = list(seen)
    written = [entry for entry in seen if own.has_written(entry.name)]
    return written + [replace(entry, attempt=0) for entry in seen if entry.name == own.begun]


def expected_names(
    places: Iterable[ResolvedTier], known: Iterable[Checkpoint], copies: Iterable[CheckpointCopy]
) -> set[str]:
    """Return the names that the registry expects in these tiers."""
    paths = {"", *(place.path for place in places)}
    places_of: list[Checkpoint | CheckpointCopy] = [*known, *copies]
    return {item.name for item in places_of if item.tier in paths}


@dataclass(frozen=True, kw_only=True)
class RunCheckpoints:
    """A run's checkpoints in shared tiers: visible entries, and names that the registry expects in them.

    `unread` maps the paths of unreadable tiers to the errors. `newest_is_unread`: one of them may hold the newest
    checkpoint.
    """

    seen: tuple[Entry, ...] = ()
    expected: frozenset[str] = frozenset()
    unread: Mapping[str, OSError] = field(default_factory=dict)
    newest_is_unread: bool = False


def find_checkpoints(
    config: CheckpointConfig,
    folder: RunDir,
    run: Run,
    earlier: Sequence[Attempt],
    known: Sequence[Checkpoint],
    copies: Sequence[CheckpointCopy],
) -> RunCheckpoints:
    """Return the checkpoints of earlier attempts. If the run starts from scratch, no tier is read."""
    begun = bool(run.identity.get("imported"))
    if not earlier and not begun:
        return RunCheckpoints()
    places = shared_places(config, folder)
    entries, unread = look(places)
    seen, names = of_run(entries, run, earlier), expected_names(places, known, copies)
    trusted = [row for row in known if row.name in names and row.trust not in _NOT_AGAIN]
    newest = max(trusted, key=lambda row: (row.step, row.attempt, row.name), default=None)
    unread |= _find_absent(places, newest, copies)
    in_sight = {entry.name for entry in seen}
    if newest is not None:
        hidden = newest.name not in in_sight
    else:  # only a run that has never trained certainly has no checkpoint
        hidden = not in_sight and (begun or any(attempt.last_step for attempt in earlier))
    return RunCheckpoints(
        seen=tuple(seen),
        expected=frozenset(names),
        unread={without_secrets(path): error for path, error in unread.items()},
        newest_is_unread=bool(unread) and hidden,
    )


def _find_absent(
    places: Iterable[ResolvedTier], newest: Checkpoint | None, copies: Iterable[CheckpointCopy]
) -> dict[str, OSError]:
    """Return, keyed by path, the tiers whose folder is missing although the newest checkpoint should be there."""
    if newest is None:
        return {}
    holders = {newest.tier, *(copy.tier for copy in copies if copy.name == newest.name)}
    error = FileNotFoundError(errno.ENOENT, "its folder does not exist")
    return {path: error for path in absent_paths(places) if path in holders}


@dataclass(frozen=True, kw_only=True)
class Inheritance:
    """Checkpoint names for an attempt's launch token, newest first.

    If one of `checkpoints` is missing, a fault is reported. Those in `perhaps` are newer but not visible: they are
    probably on local disks of nodes that the next job may be given again. Those in `corrupt` are visible but never
    loaded; if nothing else is left, the attempt fails instead of starting at step 0.
    """

    checkpoints: tuple[str, ...]
    perhaps: tuple[str, ...] = ()
    corrupt: tuple[str, ...] = ()


def inheritable(
    seen: Iterable[Entry], known: Iterable[Checkpoint], attempt: int, expected: Collection[str] = ()
) -> Inheritance:
    """Return the checkpoints that the attempt may load from earlier ones.

    Visible entries count even if the registry has recorded their deletion. Corrupt entries do not count, and suspect
    ones only if nothing older is left. If there is no entry, the `expected` names are returned, because a run must not
    restart from scratch merely because the list is empty.
    """
    rows = {item.name: item for item in known if item.attempt < attempt}
    earlier = [entry for entry in seen if entry.attempt < attempt]
    good = [entry for entry in earlier if _trust(rows, entry.name) is not Trust.CORRUPT]
    sound = [entry.step for entry in good if _trust(rows, entry.name) is not Trust.SUSPECT]
    kept = [
        entry
        for entry in good
        if _trust(rows, entry.name) is not Trust.SUSPECT or not any(step < entry.step for step in sound)
    ]
    newest = max((entry.step for entry in kept), default=-1)
    in_sight = {entry.name for entry in earlier}
    hidden = [
        item
        for item in sorted(rows.values(), key=lambda item: (item.step, item.attempt, item.name), reverse=True)
        if item.step > newest and item.name not in in_sight and item.trust not in _NOT_AGAIN
    ]
    missed = [item.name for item in hidden if not kept and item.name in expected]
    return Inheritance(
        checkpoints=(*(entry.name for entry in kept), *missed),
        perhaps=tuple(item.name for item in hidden if item.name not in missed),
        corrupt=tuple(entry.name for entry in earlier if _trust(rows, entry.name) is Trust.CORRUPT),
    )


def _trust(rows: Mapping[str, Checkpoint], name: str) -> Trust:
    return rows[name].trust if name in rows else Trust.COMMITTED
