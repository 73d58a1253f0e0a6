"""The tiers of a run: from the fastest place for its checkpoints to the most durable one."""

import re
from dataclasses import dataclass
from pathlib import Path

from checkpointing.config import RUN, CheckpointConfig, TierConfig
from checkpointing.errors import TierUnavailable
from checkpointing.storage.backends import Storage, storage_at
from checkpointing.tiers.catalog import Catalog

_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")


@dataclass(frozen=True)
class ResolvedTier:
    """One tier as this node sees it: `path` is the absolute folder or the URL that holds the checkpoints themselves."""

    path: str
    storage: Storage
    catalog: Catalog
    every: int = 0
    keep: int = 3
    shared: bool = True
    bandwidth: float = 0.0  # MiB/s that each rank may write; 0: no limit
    stripes: int = 0  # Lustre stripe count of a new checkpoint's folder; 0: the site's default


@dataclass(frozen=True)
class RunTiers:
    """All tiers of a run, the fastest first; `pins` is the storage of the run's own folder, with pins and verdicts."""

    tiers: tuple[ResolvedTier, ...]
    pins: Storage

    @classmethod
    def single(cls, root: Path | str, storage: Storage | None = None, keep: int = 3) -> "RunTiers":
        """The folder itself as the only tier, on storage of its own kind unless one is passed."""
        path = str(root) if "://" in str(root) else str(Path(root).absolute())
        storage = storage if storage is not None else storage_at(path)
        catalog = Catalog(Path(root), storage)
        return cls((ResolvedTier(path=path, storage=storage, catalog=catalog, keep=keep),), storage)


def resolve_tiers(
    config: CheckpointConfig, run_checkpoints: Path, run_name: str, node_name: str
) -> tuple[ResolvedTier, ...]:
    """The configured tiers, in their order; none configured is the run's own folder alone. Raises as `place_of` does.

    A relative path lies below the run's folder, so that it means the same wherever a command is typed.
    """
    tiers = config.tiers or (TierConfig(keep=config.keep),)
    return tuple(resolve_tier(tier, run_checkpoints, run_name, node_name) for tier in tiers)


def resolve_tier(tier: TierConfig, run_checkpoints: Path, run_name: str, node_name: str) -> ResolvedTier:
    """Resolve one tier without making its folder.

    Raises ValueError for a name that cannot be a folder, TierUnavailable when the library for a URL is missing.
    """
    for name in (run_name, node_name):
        if not _FOLDER.fullmatch(name):
            raise ValueError(f"checkpoint.tiers: {name!r} cannot be the name of a folder")
    path = _root(tier, run_checkpoints, run_name, node_name)
    try:
        storage = storage_at(path)
    except ImportError as error:
        raise TierUnavailable(f"checkpoint.tiers: {tier.path} needs a library that is missing: {error}") from error
    return ResolvedTier(
        path=path,
        storage=storage,
        catalog=Catalog(path, storage),
        every=tier.every,
        keep=tier.keep,
        shared=tier.shared,
        bandwidth=tier.bandwidth,
        stripes=tier.stripes,
    )


def _root(tier: TierConfig, run_checkpoints: Path, run_name: str, node_name: str) -> str:
    if tier.path == RUN:
        if not tier.shared:
            raise ValueError("checkpoint.tiers: `run` is the run's own, shared folder; leave `shared` out")
        return str(run_checkpoints.absolute())
    if "://" in tier.path:
        return f"{tier.path.rstrip('/')}/{run_name}"
    try:
        folder = run_checkpoints.absolute().parent / Path(tier.path).expanduser() / run_name
    except RuntimeError as error:  # a home that nobody knows
        raise ValueError(f"checkpoint.tiers: {tier.path}: {error}; write the whole path") from error
    return str(folder if tier.shared else folder / node_name)
