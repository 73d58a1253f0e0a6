"""Checkpoint tiers of a run that this machine can see, and the run's best checkpoints."""

import errno
import os
import socket
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from checkpointing.config import RUN, TierConfig
from checkpointing.retention.policy import Policy, best_names, read_metric
from checkpointing.storage.backends import Storage
from checkpointing.tiers.catalog import Catalog, Entry
from checkpointing.tiers.tier import resolve_tier
from checkpointing.verification.verdicts import known_bad
from checkpointing.verification.verify import read_sealed
from orchestrator.run_dirs.inheritable_checkpoints import OwnCheckpoints
from trainer.protocol import config as job_config
from trainer.protocol.run_dir import RunDir

if TYPE_CHECKING:
    from orchestrator.registry.records import Run
    from orchestrator.registry.store import Store


@dataclass(frozen=True)
class Tier:
    """A tier of a run. `label` is its name for users: `run`, or its path.

    `is_copy_target` is True if jobs copy checkpoints to it from a faster tier, including those of earlier attempts.
    """

    label: str
    catalog: Catalog
    shared: bool = True
    is_copy_target: bool = False

    @property
    def storage(self) -> Storage:
        return self.catalog.storage

    def is_within(self, place: RunDir) -> bool:
        """Return whether the tier is inside the run's folder, which has no checkpoints of other runs."""
        return self.catalog.root.is_relative_to(place.path)

    def own_and_others(self, place: RunDir, own: OwnCheckpoints) -> tuple[list[Entry], list[Entry]]:
        """Return this run's committed checkpoints, and those of other runs with this name. Raises OSError."""
        entries = self.catalog.committed_entries()
        if self.is_within(place):
            return entries, []
        return [entry for entry in entries if entry.name in own], [entry for entry in entries if entry.name not in own]


class UnreachableStorage:
    """Storage of a tier that this machine cannot reach; every call raises OSError."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def _fail(self, *_: Any, **__: Any) -> NoReturn:
        raise OSError(errno.ENOTSUP, self._reason)

    create = publish = open = list = delete = _fail


def read_config(place: RunDir) -> Any:
    """Return the newest config of a run; None if none can be read."""
    try:
        return job_config.load(place, place.newest_attempt)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def visible_tiers(place: RunDir) -> list[Tier]:
    """Return every tier of the run that is visible from this machine, the run's own folder first.

    An unreachable tier is included; listing it raises OSError.
    """
    config = read_config(place)
    if config is None:
        # Without a config, assume that jobs copy to it.
        return [Tier("run", Catalog(place.checkpoints), is_copy_target=True)]
    tiers = config.checkpoint.tiers
    found = [Tier("run", Catalog(place.checkpoints), is_copy_target=bool(tiers) and tiers[0].path != RUN)]
    for number, tier in enumerate(tiers):
        if tier.path != RUN:
            found += _locate_tier(place, tier, is_copy_target=number > 0)
    return found


def own_checkpoints(store: "Store", run: "Run") -> OwnCheckpoints:
    """Return the checkpoint names of this run, from its attempts in the registry."""
    return OwnCheckpoints.from_rows(run, store.attempts(run.name))


def _locate_tier(place: RunDir, config: TierConfig, *, is_copy_target: bool) -> list[Tier]:
    """Return one configured tier as seen from here; for node disks, only the folders on this machine."""
    try:
        tier = resolve_tier(config, place.checkpoints, place.name, socket.gethostname())
    except (ImportError, ValueError) as error:
        missing = f"a library is missing ({error}); for s3:// locations: pip install 'orch[s3]'"
        storage = UnreachableStorage(missing if isinstance(error, ImportError) else str(error))
        return [Tier(config.path, Catalog(config.path, storage), config.shared, is_copy_target)]
    if tier.path == str(place.checkpoints.absolute()):
        return []
    if tier.shared:
        return [Tier(config.path, tier.catalog, True, is_copy_target)]
    above = Path(tier.path).parent
    nodes = [node for node in sorted(os.listdir(above)) if (above / node).is_dir()] if above.is_dir() else []
    return [Tier(f"{config.path} ({node})", Catalog(above / node), False, is_copy_target) for node in nodes]


def missing_files(storage: Storage, name: str) -> tuple[frozenset[str], int]:
    """Return the files of a checkpoint that are missing here, and the total number of files. Raises OSError.

    If the manifest is invalid, no file counts as missing; verification reports the manifest.
    """
    manifest, _ = read_sealed(storage, name)
    if manifest is None:
        return frozenset(), 0
    present = storage.list(name)
    return frozenset(entry.name for entry in manifest.files if entry.name not in present), len(manifest.files)


@dataclass(frozen=True, kw_only=True)
class BestCheckpoints:
    """The metric of a run's checkpoints, keyed by name, and the names of the best ones, best first."""

    metric: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    names: tuple[str, ...] = ()


def best_checkpoints(
    place: RunDir, tiers: list[Tier], checkpoints: OwnCheckpoints, bad: Collection[str]
) -> BestCheckpoints:
    """Read the metric from all readable manifests of the run. `bad` checkpoints are never the best.

    Reads nothing if the run has no `checkpoint.best.metric`.
    """
    config = read_config(place)
    if config is None or not config.checkpoint.best.metric:
        return BestCheckpoints()
    policy = Policy.from_config(config.checkpoint.keep, config.checkpoint)
    entries: dict[str, Entry] = {}
    numbers: dict[str, float] = {}
    refused = set(bad)
    for tier in tiers:
        try:
            refused.update(known_bad(tiers[0].storage, tier.catalog.place, tier.storage))
            for entry in tier.own_and_others(place, checkpoints)[0]:
                entries.setdefault(entry.name, entry)
                manifest = None if entry.name in numbers else read_sealed(tier.storage, entry.name)[0]
                if manifest is not None and (number := read_metric(manifest, policy.metric)) is not None:
                    numbers[entry.name] = number
        except OSError:
            continue  # `orch ckpt ls` reports the unreadable tier
    trusted = [entry for name, entry in sorted(entries.items(), reverse=True) if name not in refused]
    return BestCheckpoints(metric=policy.metric, numbers=numbers, names=best_names(trusted, policy, numbers))
