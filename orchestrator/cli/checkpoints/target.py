"""Checkpoints named on a command line: `RUN@STEP`, a folder or a URL. They are pinned while a command reads them."""

import shlex
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpointing.storage.storage_errors import error_words
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.access.run_folder import existing_folder
from orchestrator.cli.checkpoints.tiers import Tier, own_and_others, own_checkpoints, read_config, visible_tiers
from orchestrator.cli.runs.status import restore_test_again
from orchestrator.errors import ConfigError, NotFound
from orchestrator.states import Trust
from trainer.protocol.run_dir import RunDir

if TYPE_CHECKING:
    from checkpointing.tiers.catalog import Entry
    from orchestrator.registry.records import Run
    from orchestrator.run_dirs.inheritable_checkpoints import OwnCheckpoints


@dataclass(frozen=True, kw_only=True)
class BestCheckpoints:
    """The metric of a run's checkpoints by name, and the names of the best ones, best first."""

    metric: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    names: tuple[str, ...] = ()


def best_checkpoints(
    place: RunDir, tiers: Collection[Tier], checkpoints: "OwnCheckpoints", bad: Collection[str] = ()
) -> BestCheckpoints:
    """Read the metric from all readable manifests of the run. `bad` checkpoints are never the best.

    Reads nothing if the run has no `checkpoint.best.metric`.
    """
    config = read_config(place)
    if config is None or not config.checkpoint.best.metric:
        return BestCheckpoints()
    from checkpointing.retention.policy import Policy, best_names
    from checkpointing.verification.verdicts import known_bad

    policy = Policy.from_config(config.checkpoint.keep, config.checkpoint)
    entries: dict[str, Entry] = {}
    numbers: dict[str, float] = {}
    refused = set(bad)
    own = next(iter(tiers)).storage
    for tier in tiers:
        try:
            refused.update(known_bad(own, tier.catalog.place, tier.storage))
            for entry in own_and_others(tier, place, checkpoints)[0]:
                entries.setdefault(entry.name, entry)
                if entry.name not in numbers and (number := _number(tier, entry.name, policy.metric)) is not None:
                    numbers[entry.name] = number
        except OSError:
            continue  # `orch ckpt ls` reports the unreadable tier
    trusted = [entry for name, entry in sorted(entries.items(), reverse=True) if name not in refused]
    return BestCheckpoints(metric=policy.metric, numbers=numbers, names=best_names(trusted, policy, numbers))


def _number(tier: Tier, name: str, metric: str) -> float | None:
    from checkpointing.retention.policy import read_metric
    from checkpointing.verification.verify import read_sealed

    manifest, _ = read_sealed(tier.storage, name)
    return None if manifest is None else read_metric(manifest, metric)


def name_of_best(run: "Run") -> str:
    """Return the name of a run's best checkpoint. Raises ConfigError if no metric is set, NotFound without a value."""
    place = RunDir(Path(run.run_dir))
    with open_store(readonly=True) as store:
        bad = [row.name for row in store.checkpoints(run.name) if row.trust in (Trust.CORRUPT, Trust.SUSPECT)]
        own = own_checkpoints(store, run)
    found = best_checkpoints(place, visible_tiers(place), own, bad)
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


if TYPE_CHECKING:
    from checkpointing.storage.backends import Storage
    from orchestrator.registry.records import Checkpoint, Run
    from orchestrator.registry.store import Store

Warn = Callable[[str, str], None]
"""Warning callback with the signature of `Screen.warn`: a code and a message."""

WAYS_TO_STORES = "credentials come from the environment; s3:// places need: pip install 'orch[s3]'"
WAYS = (
    "write RUN@500, RUN@latest, RUN@all, RUN@best (by checkpoint.best.metric), "
    "or the path or URL of a checkpoint's folder"
)


@dataclass(frozen=True)
class Target:
    """A committed checkpoint (or a folder given as a checkpoint) and its location.

    If not `shared`, it is on a node's own disk, which has only the files that this node's ranks wrote.
    """

    storage: "Storage"
    name: str
    path: str
    tier: str = ""
    shared: bool = True
    run: str | None = None
    run_dir: RunDir | None = field(default=None, compare=False)

    @property
    def step(self) -> int | None:
        from checkpointing.format.commit import parse_name

        parts = parse_name(self.name)
        return parts.step if parts else None

    @property
    def config_file(self) -> Path | None:
        """Config file of the attempt that saved it; None if its run's folder is unknown."""
        from checkpointing.format.commit import parse_name

        parts = parse_name(self.name)
        return self.run_dir.attempt_config(parts.attempt) if self.run_dir is not None and parts is not None else None

    @property
    def run_config_file(self) -> Path | None:
        """Config file of its run (the attempt that saved it may have been smaller); None if the folder is unknown."""
        from checkpointing.format.commit import parse_name

        parts = parse_name(self.name)
        return (
            self.run_dir.attempt_run_config(parts.attempt) if self.run_dir is not None and parts is not None else None
        )

    @property
    def config(self) -> Any:
        """Configuration of its run (`JobConfig`); None if unknown."""
        return None if self.run_dir is None else read_config(self.run_dir)


def find(words: str, warn: Warn) -> list[Target]:
    """Return the checkpoints that match `words`, for each the nearest complete copy first.

    Raises NotFound or ConfigError. An unreadable tier is reported to `warn`; its OSError is raised if no other tier
    has a checkpoint.
    """
    if is_location(words):
        return [locate_target(words)]
    name, mark, step = words.partition("@") if not words.startswith("@") else _after_last(words)
    if mark and not step:
        raise ConfigError("no step is given after the @", where=words, hint=f"{name}@latest is the newest; or {WAYS}")
    try:
        run = known_run(name)
    except NotFound:
        if not mark and Path(name).is_dir():
            return [locate_target(words)]  # a folder in the current directory, typed without a slash
        before, colon, number = name.rpartition(":")
        if not (colon and number.isdigit()):
            raise
        raise NotFound(f"no run {name}", hint=f"did you mean {before}@{number}?") from None
    if (order := run.identity.get("restore_test")) is not None:
        raise NotFound(
            f"{run.name} is a restore test: it has no checkpoint of its own",
            where=f"it restores {order['run']}@{order['step']}",
            hint=f"write {order['run']}@{order['step']}; to restore it again: {restore_test_again(order)}",
        )
    listed = listing(run, existing_folder(run.name, run.run_dir), warn)
    if not listed:
        raise NotFound(f"{run.name} has no committed checkpoint", where=run.run_dir, hint=f"orch show {run.name}")
    if step == "all":
        return listed
    if step in ("", "latest"):
        return [target for target in listed if target.name == listed[0].name]
    if step == "best":
        best = name_of_best(run)
        return [target for target in listed if target.name == best]
    return _of_step(run.name, run.run_dir, words, step, listed)


def find_one(words: str, warn: Warn) -> Target:
    """Return the nearest complete copy of the checkpoint that matches `words`."""
    return find(words, warn)[0]


def known_run(name: str) -> "Run":
    """Return the run by name, beginning of a name, or `@last`. Raises NotFound."""
    with open_store(readonly=True) as store:
        return store.run(name)


def is_location(words: str) -> bool:
    """Return whether this is a path or URL. Run names contain no slash."""
    return "/" in words or words in (".", "..") or words.startswith("~")


def locate_target(words: str) -> Target:
    """Return the checkpoint at a folder's path or URL, with the run whose folder contains it."""
    from checkpointing.format.commit import parse_name
    from checkpointing.storage.backends import LocalStorage, open_storage, without_secrets

    if "://" in words and not words.startswith("file://"):
        above, _, name = words.rstrip("/").rpartition("/")
        try:
            target = Target(open_storage(above), name, words.rstrip("/"))
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{without_secrets(words)} cannot be read: {error}", hint=WAYS_TO_STORES) from error
    else:
        path = Path(words.removeprefix("file://")).expanduser().absolute()
        path = path.resolve() if path.name in ("", "..") else path
        if not path.is_dir():
            raise NotFound(f"there is no folder {words}", hint=WAYS)
        target = Target(LocalStorage(path.parent), path.name, str(path), run_dir=_run_above(path))
    if parse_name(target.name) is None:
        raise _no_checkpoint(target, words)
    return target


def _no_checkpoint(target: Target, words: str) -> ConfigError:
    """Return an error that describes a folder other than a checkpoint's, with what to name instead."""
    unlike = ConfigError(f"`{target.name}` is not the name of a checkpoint's folder", where=words, hint=WAYS)
    if "://" in words and not words.startswith("file://"):
        return unlike
    folder = Path(target.path)
    if RunDir(folder).config.exists() and RunDir(folder).checkpoints.is_dir():
        return ConfigError(f"{words} is a run's folder, and no checkpoint's", where=target.path, hint=_of_run(folder))
    if is_export(folder):
        hint = f"`orch ckpt import {shlex.quote(words)} CONFIG` begins a run with its weights"
        return ExportGiven(f"{words} has exported weights, and is no checkpoint of a run", where=target.path, hint=hint)
    return unlike


class ExportGiven(ConfigError):
    """Error for exported weights given where a run's checkpoint is needed."""


def is_export(folder: Path) -> bool:
    """Return whether a folder contains weights that `orch ckpt import` accepts."""
    return any(folder.glob("*.safetensors")) or (folder / "checkpoint.pt").exists()


def _of_run(folder: Path) -> str:
    """Return a hint that names the newest checkpoint of a run, by the registry or by its folder."""
    from checkpointing.format.commit import parse_name

    try:
        known = known_run(folder.name)
    except NotFound:
        known = None
    if known is not None and Path(known.run_dir) == folder:
        return f"write {folder.name}, or {folder.name}@latest"
    there = [place for place in RunDir(folder).checkpoints.iterdir() if parse_name(place.name) is not None]
    newest = max(there, key=lambda place: parse_name(place.name) or (), default=None)
    return f"write {shlex.quote(str(newest))}" if newest is not None else "it has no checkpoint"


def _run_above(folder: Path) -> RunDir | None:
    place = RunDir(folder.parent.parent)
    return place if folder.parent == place.checkpoints and place.config.exists() else None


def listing(run: "Run", place: RunDir, warn: Warn) -> list[Target]:
    """Return all committed checkpoints of a run, newest first; copies are adjacent, the nearest complete one first.

    Checkpoints of another run of this name in a shared tier are left out.
    """
    from checkpointing.format.commit import parse_name

    with open_store(readonly=True) as store:
        own = own_checkpoints(store, run)
    found: dict[str, list[Target]] = {}
    unread: OSError | None = None
    # Shared tiers first: a node's own disk may have only a part.
    for tier in sorted(visible_tiers(place), key=lambda tier: not tier.shared):
        try:
            entries, _ = own_and_others(tier, place, own)
        except OSError as error:
            unread = unread or error
            warn("TierUnreadable", f"{run.name}: tier {tier.label} cannot be read: {error_words(error)}")
            continue
        for entry in entries:
            path = f"{tier.catalog.place}/{entry.name}"
            target = Target(tier.storage, entry.name, path, tier.label, tier.shared, run.name, place)
            found.setdefault(entry.name, []).append(target)
    if unread is not None and not found:
        raise unread
    names = sorted((parts, name) for name in found if (parts := parse_name(name)))
    return [copy for _, name in reversed(names) for copy in found[name]]


def find_registered(store: "Store", target: Target) -> "tuple[Run | None, Checkpoint | None]":
    """Return the run of a checkpoint and its row, each None if this registry does not have it."""
    try:
        run = store.run(target.run or target.run_dir.name) if target.run_dir is not None else None
    except NotFound:
        return None, None
    if run is None or target.run_dir is None or run.run_dir != str(target.run_dir.path):
        return None, None
    return run, next((row for row in store.checkpoints(run.name) if row.name == target.name), None)


def warn_if_doubted(warn: Warn, row: "Checkpoint | None") -> None:
    """Warn of a checkpoint that the run would not resume from."""
    if row is not None and row.trust in (Trust.SUSPECT, Trust.CORRUPT):
        warn(row.trust.lower(), f"{row.name} is {row.trust}{f': {row.reason}' if row.reason else ''}")


def _of_step(run: str, run_dir: str, words: str, step: str, listed: list[Target]) -> list[Target]:
    if step.isdigit():
        same = [target for target in listed if target.step == int(step)]
    elif step.startswith("step-"):
        same = [target for target in listed if target.name == step]
    else:
        newest = step in ("last", "newest", "final", "end")
        hint = f"did you mean {run}@latest?  {WAYS}" if newest else WAYS
        raise ConfigError(f"`{step}` is not a step", where=words, hint=hint)
    if not same:
        steps = ", ".join(str(found) for found in list(dict.fromkeys(target.step for target in listed))[:8])
        what = f"step {step}" if step.isdigit() else step
        raise NotFound(f"{run} has no checkpoint of {what}", where=run_dir, hint=f"there are: {steps}")
    return same


def _after_last(target: str) -> tuple[str, str, str]:
    """Split `@last@500` into the run `@last` and step 500."""
    name, mark, step = target[1:].partition("@")
    return f"@{name}", mark, step


@contextmanager
def kept_while_read(*targets: Target) -> Iterator[None]:
    """Pin these checkpoints within the block, each with a pin of its own.

    Raises NotFound for a checkpoint deleted before the pin was written. In a read-only folder nothing is pinned, and a
    checkpoint deleted during the block raises NotFound, too.
    """
    from checkpointing.errors import CheckpointError

    pinned = [(target, holder) for target in targets if (holder := _pin(target))]
    try:
        require_there(*(target for target in targets if target.run is not None))
        yield
    except (CheckpointError, FileNotFoundError):
        require_there(*(target for target in targets if target.run is not None))
        raise
    finally:
        for target, holder in pinned:
            _unpin(target, holder)


def require_there(*targets: Target) -> None:
    """Raise NotFound for a checkpoint that no longer exists."""
    from checkpointing.tiers.catalog import Catalog

    for target in targets:
        if not Catalog(target.path.rpartition("/")[0], target.storage).is_committed(target.name):
            looks = f"`orch ckpt ls {target.run}` lists what is left; `orch ckpt pin` keeps one" if target.run else WAYS
            raise NotFound(f"{target.name} is not there any more: it is being deleted", where=target.path, hint=looks)


def _pin(target: Target) -> str:
    """Pin the checkpoint for this process; return the pin's holder, or "" if no pin was written."""
    from checkpointing.storage.backends import LocalStorage
    from orchestrator.run_dirs.reader_pins import pin_for_reading

    if target.run is None or target.run_dir is None:
        return ""
    with suppress(OSError):
        return pin_for_reading(LocalStorage(target.run_dir.checkpoints), target.name)
    return ""


def _unpin(target: Target, holder: str) -> None:
    from checkpointing.retention.garbage import remove_pin
    from checkpointing.storage.backends import LocalStorage

    assert target.run_dir is not None
    with suppress(OSError):
        remove_pin(LocalStorage(target.run_dir.checkpoints), target.name, holder)
