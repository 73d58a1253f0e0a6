"""Checkpoint tiers of a run that this machine can see."""

import errno
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from trainer.protocol import config as job_config
from trainer.protocol.run_dir import RunDir

if TYPE_CHECKING:
    from checkpointing.config import TierConfig
    from checkpointing.storage.backends import Storage
    from checkpointing.tiers.catalog import Catalog, Entry
    from checkpointing.tiers.tier import ResolvedTier
    from orchestrator.registry.records import Run
    from orchestrator.registry.store import Store
    from orchestrator.run_dirs.inheritable_checkpoints import OwnCheckpoints


@dataclass(frozen=True)
class Tier:
    """A place where a run keeps checkpoints. `label` is its name for users: `run`, or its path.

    `is_copy_target` is True if jobs copy checkpoints to it from a faster tier, including those of earlier attempts.
    """

    label: str
    catalog: "Catalog"
    shared: bool = True
    is_copy_target: bool = False

    @property
    def storage(self) -> "Storage":
        return self.catalog.storage

    def is_within(self, place: RunDir) -> bool:
        """Return whether it is inside the run's folder, which has no checkpoints of other runs."""
        return self.catalog.root.is_relative_to(place.path)


class UnreachableStorage:
    """Storage of a tier that this machine cannot reach; every call raises OSError."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def _fail(self) -> NoReturn:
        raise OSError(errno.ENOTSUP, self._reason)

    def create(self, path: str) -> NoReturn:
        self._fail()

    def publish(self, path: str, data: bytes) -> None:
        self._fail()

    def open(self, path: str) -> BinaryIO:
        self._fail()

    def list(self, path: str) -> dict[str, int | None]:
        self._fail()

    def delete(self, path: str) -> None:
        self._fail()


def read_config(place: RunDir) -> Any:
    """Return the newest config of a run; None if none can be read."""
    try:
        return job_config.load(place, place.newest_attempt)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def is_command(place: RunDir) -> bool:
    """Return whether the run's ranks are a `command:`, which chooses its own place for checkpoints."""
    config = read_config(place)
    return config is not None and bool(config.command)


def keeps_on_nodes(place: RunDir) -> bool:
    """Return whether a tier is on the nodes' own disks, of which this machine sees at most its own."""
    config = read_config(place)
    return config is not None and any(not tier.shared for tier in config.checkpoint.tiers)


def visible_tiers(place: RunDir) -> list[Tier]:
    """Return every tier of the run that is visible from this machine, the run's own folder first.

    An unreachable tier is included; listing it raises OSError.
    """
    from checkpointing.config import RUN
    from checkpointing.tiers.catalog import Catalog

    config = read_config(place)
    if config is None:
        # Without a config, assume that jobs copy to it.
        return [Tier("run", Catalog(place.checkpoints), is_copy_target=True)]
    said = config.checkpoint.tiers
    found = [Tier("run", Catalog(place.checkpoints), is_copy_target=bool(said) and said[0].path != RUN)]
    for number, tier in enumerate(said):
        if tier.path != RUN:
            found += _configured_tiers(place, tier, is_copy_target=number > 0)
    return found


def own_checkpoints(store: "Store", run: "Run") -> "OwnCheckpoints":
    """Return the set of names of this run's checkpoints, by its attempts in the registry."""
    from orchestrator.run_dirs.inheritable_checkpoints import OwnCheckpoints

    return OwnCheckpoints.from_rows(run, store.attempts(run.name))


def own_and_others(tier: Tier, place: RunDir, own: "OwnCheckpoints") -> "tuple[list[Entry], list[Entry]]":
    """Return this run's committed checkpoints in the tier, and those of other runs of this name. Raises OSError."""
    entries = tier.catalog.committed_entries()
    if tier.is_within(place):
        return entries, []
    return [entry for entry in entries if entry.name in own], [entry for entry in entries if entry.name not in own]


def _configured_tiers(place: RunDir, said: "TierConfig", *, is_copy_target: bool) -> list[Tier]:
    """Return one configured tier as visible from here: of the nodes' own disks only the folders on this machine."""
    from checkpointing.tiers.catalog import Catalog
    from checkpointing.tiers.tier import resolve_tier

    try:
        tier = resolve_tier(said, place.checkpoints, place.name, socket.gethostname())
    except ImportError as error:
        reason = f"a library is missing ({error}); for s3:// places: pip install 'orch[s3]'"
    except ValueError as error:
        reason = str(error)
    else:
        if tier.path == str(place.checkpoints.absolute()):
            return []
        seen = _on_this_machine(tier, said.path)
        return [Tier(label, catalog, tier.shared, is_copy_target) for label, catalog in seen]
    return [Tier(said.path, Catalog(said.path, UnreachableStorage(reason)), said.shared, is_copy_target)]


def _on_this_machine(tier: "ResolvedTier", label: str) -> "list[tuple[str, Catalog]]":
    from checkpointing.tiers.catalog import Catalog

    if tier.shared:
        return [(label, tier.catalog)]
    above = Path(tier.path).parent
    nodes = sorted(os.listdir(above)) if above.is_dir() else []
    return [(f"{label} ({node})", Catalog(above / node)) for node in nodes if (above / node).is_dir()]


def missing_files(storage: "Storage", name: str) -> tuple[frozenset[str], int]:
    """Return the files of a checkpoint that are missing here, and the total number of files. Raises OSError.

    None are reported as missing if the manifest is invalid; verification reports that.
    """
    from checkpointing.verification.verify import read_sealed

    manifest, _ = read_sealed(storage, name)
    if manifest is None:
        return frozenset(), 0
    present = storage.list(name)
    return frozenset(entry.name for entry in manifest.files if entry.name not in present), len(manifest.files)
