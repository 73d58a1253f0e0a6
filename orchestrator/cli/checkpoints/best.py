"""Which checkpoint of a run is the best by `checkpoint.best`, as retention chooses it."""

from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.cli.access.registry import open_store
from orchestrator.cli.checkpoints.tiers import Tier, read_config, tiers_of
from orchestrator.errors import ConfigError, NotFound
from orchestrator.states import Trust
from trainer.contract.run_dir import RunDir

if TYPE_CHECKING:
    from checkpointing.tiers.catalog import Entry
    from orchestrator.registry.records import Run


@dataclass(frozen=True, kw_only=True)
class BestCheckpoints:
    """The numbers of a run's checkpoints by name, and the names of the best ones, the best first."""

    metric: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    names: tuple[str, ...] = ()


def best_checkpoints(place: RunDir, tiers: Collection[Tier], bad: Collection[str] = ()) -> BestCheckpoints:
    """Read the manifests of all checkpoints that can be read here; `bad` ones are never the best.

    Nothing is read of a run that has no `checkpoint.best.metric`.
    """
    config = read_config(place)
    if config is None or not config.checkpoint.best.metric:
        return BestCheckpoints()
    from checkpointing.retention.policy import Policy, best_names
    from checkpointing.verification.verdicts import known_bad

    policy = Policy.of(config.checkpoint.keep, config.checkpoint)
    entries: dict[str, Entry] = {}
    numbers: dict[str, float] = {}
    refused = set(bad)
    own = next(iter(tiers)).storage
    for tier in tiers:
        try:
            refused.update(known_bad(own, tier.catalog.place, tier.storage))
            for entry in tier.catalog.committed():
                entries.setdefault(entry.name, entry)
                if entry.name not in numbers and (number := _number(tier, entry.name, policy.metric)) is not None:
                    numbers[entry.name] = number
        except OSError:
            continue  # `orch ckpt ls` says which tier cannot be read
    trusted = [entry for name, entry in sorted(entries.items(), reverse=True) if name not in refused]
    return BestCheckpoints(metric=policy.metric, numbers=numbers, names=best_names(trusted, policy, numbers))


def _number(tier: Tier, name: str, metric: str) -> float | None:
    from checkpointing.retention.policy import metric_of
    from checkpointing.verification.verify import read_sealed

    manifest, _ = read_sealed(tier.storage, name)
    return None if manifest is None else metric_of(manifest, metric)


def name_of_best(run: "Run") -> str:
    """The name of the best checkpoint of a run; raises ConfigError where none is chosen, NotFound where none is yet."""
    place = RunDir(Path(run.run_dir))
    with open_store(readonly=True) as store:
        bad = [row.name for row in store.checkpoints(run.name) if row.trust in (Trust.CORRUPT, Trust.SUSPECT)]
    found = best_checkpoints(place, tiers_of(place), bad)
    if not found.metric:
        raise ConfigError(
            f"{run.name} has no checkpoint.best.metric: nobody says which checkpoint is the best",
            where=run.run_dir,
            hint=f"`orch ckpt ls {run.name}` lists them all",
        )
    if not found.names:
        raise NotFound(
            f"no checkpoint of {run.name} has the number {found.metric} yet",
            where=run.run_dir,
            hint=f"`orch ckpt ls {run.name}` lists those that are there",
        )
    return found.names[0]
