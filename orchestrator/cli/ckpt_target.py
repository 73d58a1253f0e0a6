"""What a command line means by a checkpoint: `RUN@STEP`, a folder, a URL; and all places where a run keeps some."""

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.cli.registry import open_store
from orchestrator.errors import ConfigError, NotFound
from trainer.contract import config as job_config
from trainer.contract.run_dir import RunDir

if TYPE_CHECKING:
    from checkpointing.catalog import Catalog
    from checkpointing.storage import Storage
    from checkpointing.tiers import TierPlace
    from orchestrator.registry.records import Run

WAYS = "write RUN@500, RUN@latest, RUN@all, or the path or URL of a checkpoint's folder"


@dataclass(frozen=True)
class Tier:
    """One place where a run keeps checkpoints; `label` is what people call it: `run`, or its path.

    `fed` tells that jobs copy checkpoints to it from a faster tier, those of earlier attempts too.
    """

    label: str
    catalog: "Catalog"
    shared: bool = True
    fed: bool = False

    @property
    def storage(self) -> "Storage":
        return self.catalog.storage


@dataclass(frozen=True)
class Target:
    """One committed checkpoint (or a folder that is said to be one) and where it lies."""

    storage: "Storage"
    name: str
    path: str
    tier: str = ""
    run: str | None = None
    run_dir: RunDir | None = field(default=None, compare=False)

    @property
    def step(self) -> int | None:
        from checkpointing.commit import parse_name

        parts = parse_name(self.name)
        return parts.step if parts else None

    @property
    def config(self) -> Any:
        """The configuration of the run that it belongs to (`JobConfig`), None where that is not known."""
        return None if self.run_dir is None else read_config(self.run_dir)


def read_config(place: RunDir) -> Any:
    """`config.json` of a run; None when there is none that can be read."""
    try:
        return job_config.load(place.config)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def tiers_of(place: RunDir) -> list[Tier]:
    """Every place where the run keeps checkpoints, as far as this machine can see: the run's own folder first."""
    from checkpointing.catalog import Catalog
    from checkpointing.config import RUN
    from checkpointing.tiers import places

    config = read_config(place)
    if config is None:
        # Nobody knows what its jobs copy where.
        return [Tier("run", Catalog(place.checkpoints), fed=True)]
    said = config.checkpoint.tiers
    found = [Tier("run", Catalog(place.checkpoints), fed=bool(said) and said[0].path != RUN)]
    try:
        configured = places(config.checkpoint, place.checkpoints, place.name, socket.gethostname())
    except ValueError as error:
        raise ConfigError(str(error), where=str(place.config)) from error
    except ImportError as error:
        raise ConfigError(
            f"a tier of {place.name} needs a library that is not here: {error}", where=str(place.config),
            hint="pip install 'orch[s3]' for s3:// places",
        ) from error  # fmt: skip
    for number, (tier, name) in enumerate(zip(configured, said, strict=False)):
        if Path(tier.path) != place.checkpoints.absolute():
            seen = _on_this_machine(tier, name.path)
            found += [Tier(label, catalog, tier.shared, number > 0) for label, catalog in seen]
    return found


def _on_this_machine(tier: "TierPlace", label: str) -> "list[tuple[str, Catalog]]":
    """A tier as it is seen from here: of nodes' own disks those folders that this machine has."""
    from checkpointing.catalog import Catalog

    if tier.shared:
        return [(label, tier.catalog)]
    above = Path(tier.path).parent
    nodes = sorted(os.listdir(above)) if above.is_dir() else []
    return [(f"{label} ({node})", Catalog(above / node)) for node in nodes if (above / node).is_dir()]


def find(words: str) -> list[Target]:
    """The checkpoints that `words` mean, nearest copy first for each; raises NotFound or ConfigError."""
    if is_place(words):
        return [at_place(words)]
    name, _, step = words.partition("@") if not words.startswith("@") else _after_last(words)
    run = known_run(name)
    listed = listing(RunDir(Path(run.run_dir)), run.name)
    if not listed:
        raise NotFound(f"{run.name} has no committed checkpoint", where=run.run_dir, hint=f"orch show {run.name}")
    if step == "all":
        return listed
    if step in ("", "latest"):
        return [target for target in listed if target.name == listed[0].name]
    return _of_step(run.name, run.run_dir, words, step, listed)


def find_one(words: str) -> Target:
    """The one checkpoint that `words` mean, its nearest copy."""
    return find(words)[0]


def known_run(name: str) -> "Run":
    """The run of this name, beginning of a name, or `@last`; raises NotFound."""
    with open_store(readonly=True) as store:
        return store.run(name)


def is_place(words: str) -> bool:
    """Whether this is a path or URL: names of runs have no slash."""
    return "/" in words or words in (".", "..") or words.startswith("~")


def at_place(words: str) -> Target:
    """A checkpoint by its folder's path or URL; of the run whose folder it lies in."""
    from checkpointing.commit import parse_name
    from checkpointing.storage import LocalStorage, storage_at

    if "://" in words and not words.startswith("file://"):
        above, _, name = words.rstrip("/").rpartition("/")
        target = Target(storage_at(above), name, words.rstrip("/"))
    else:
        path = Path(words.removeprefix("file://")).expanduser().absolute()
        path = path.resolve() if path.name in ("", "..") else path
        if not path.is_dir():
            raise NotFound(f"there is no folder {words}", hint=WAYS)
        target = Target(LocalStorage(path.parent), path.name, str(path), run_dir=_run_above(path))
    if parse_name(target.name) is None:
        raise ConfigError(f"`{target.name}` is not the name of a checkpoint's folder", where=words, hint=WAYS)
    return target


def _run_above(folder: Path) -> RunDir | None:
    place = RunDir(folder.parent.parent)
    return place if folder.parent == place.checkpoints and place.config.exists() else None


def listing(place: RunDir, run: str) -> list[Target]:
    """All committed checkpoints of a run, newest first, copies of one checkpoint together, the nearest first."""
    from checkpointing.commit import parse_name

    found: dict[str, list[Target]] = {}
    for tier in tiers_of(place):
        for entry in tier.catalog.committed():
            path = f"{tier.catalog.place}/{entry.name}"
            found.setdefault(entry.name, []).append(Target(tier.storage, entry.name, path, tier.label, run, place))
    names = sorted((parts, name) for name in found if (parts := parse_name(name)))
    return [copy for _, name in reversed(names) for copy in found[name]]


def _of_step(run: str, run_dir: str, words: str, step: str, listed: list[Target]) -> list[Target]:
    if step.isdigit():
        same = [target for target in listed if target.step == int(step)]
    elif step.startswith("step-"):
        same = [target for target in listed if target.name == step]
    else:
        raise ConfigError(f"`{step}` is not a step", where=words, hint=WAYS)
    if not same:
        steps = ", ".join(str(found) for found in list(dict.fromkeys(target.step for target in listed))[:8])
        what = f"step {step}" if step.isdigit() else step
        raise NotFound(f"{run} has no checkpoint of {what}", where=run_dir, hint=f"there are: {steps}")
    return same


def _after_last(target: str) -> tuple[str, str, str]:
    """`@last@500` means step 500 of the last run."""
    name, mark, step = target[1:].partition("@")
    return f"@{name}", mark, step
