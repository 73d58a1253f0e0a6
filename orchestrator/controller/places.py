"""Where the checkpoints of a run lie, as far as this machine can see them."""

import logging
from collections.abc import Iterable

from checkpointing.catalog import Catalog, Entry
from checkpointing.config import CheckpointConfig
from checkpointing.tiers import TierPlace, places
from orchestrator.registry.records import Checkpoint
from orchestrator.states import Trust
from trainer.contract.run_dir import RunDir

log = logging.getLogger("orch.controller")

_REFUSED = frozenset({Trust.CORRUPT, Trust.DELETED})


def shared_places(config: CheckpointConfig, folder: RunDir) -> tuple[TierPlace, ...]:
    """The tiers that every node and this machine see; the run's own folder stands for those that cannot be opened."""
    if config.tiers:
        try:
            found = places(config, folder.checkpoints, folder.name, "this-machine")
            return tuple(place for place in found if place.shared)
        except (ImportError, ValueError, OSError) as error:
            log.warning("%s: its tiers cannot be looked at: %s", folder.name, error)
    return places(CheckpointConfig(), folder.checkpoints, folder.name, "this-machine")


def committed(config: CheckpointConfig, folder: RunDir) -> list[Entry]:
    """Every committed checkpoint that can be seen, once, newest first; raises OSError when a tier cannot be read."""
    catalogs: list[Catalog] = [place.catalog for place in shared_places(config, folder)]
    found = {entry.name: entry for catalog in reversed(catalogs) for entry in catalog.committed()}
    return sorted(found.values(), key=lambda entry: (entry.step, entry.attempt, entry.name), reverse=True)


def inheritable(
    config: CheckpointConfig, seen: Iterable[Entry], known: Iterable[Checkpoint], attempt: int
) -> tuple[str, ...]:
    """Names that the attempt may load, newest first.

    Those of earlier attempts that lie in sight and are not known to be corrupt; a suspect only when nothing older is
    left; and what only the nodes' own disks hold, newer than all of it: the next job may get the same nodes.
    """
    rows = {item.name: item for item in known}
    refused = {name for name, item in rows.items() if item.trust in _REFUSED}
    good = [entry for entry in seen if entry.attempt < attempt and entry.name not in refused]
    doubted = {name for name, item in rows.items() if item.trust is Trust.SUSPECT}
    sound = [entry.step for entry in good if entry.name not in doubted]
    kept = [item for item in good if item.name not in doubted or not any(step < item.step for step in sound)]
    newest = max((entry.step for entry in kept), default=None)
    if newest is None or all(tier.shared for tier in config.tiers):
        return tuple(entry.name for entry in kept)
    in_sight = {entry.name for entry in good}
    own = [
        item
        for item in rows.values()
        if item.attempt < attempt and item.step > newest and item.name not in in_sight | refused | doubted
    ]
    names = [item.name for item in sorted(own, key=lambda item: (item.step, item.attempt, item.name), reverse=True)]
    return (*names, *(entry.name for entry in kept))
