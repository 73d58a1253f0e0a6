"""Checkpoints on a command line: `RUN@STEP`, a folder or a URL. They are pinned while a command reads them."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpointing.errors import CheckpointError
from checkpointing.format.commit import Name, parse_name
from checkpointing.retention.garbage import remove_pin
from checkpointing.storage.backends import LocalStorage, Storage, open_storage, without_secrets
from checkpointing.storage.storage_errors import error_words
from checkpointing.tiers.catalog import Catalog
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.access.run_folder import existing_folder
from orchestrator.cli.checkpoints.tiers import best_checkpoints, own_checkpoints, read_config, visible_tiers
from orchestrator.errors import ConfigError, NotFound
from orchestrator.run_dirs.reader_pins import pin_for_reading
from orchestrator.run_view import repeat_test_command
from orchestrator.states import Trust
from trainer.protocol.run_dir import RunDir

if TYPE_CHECKING:
    from orchestrator.registry.records import Checkpoint, Run
    from orchestrator.registry.store import Store

Warn = Callable[[str, str], None]
"""Warning callback with the signature of `Screen.warn`: a code and a message."""

WAYS_TO_STORES = "credentials come from the environment; s3:// locations need: pip install 'orch[s3]'"
WAYS = (
    "write RUN@500, RUN@latest, RUN@all, RUN@best (by checkpoint.best.metric), "
    "or the path or URL of a checkpoint's folder"
)


@dataclass(frozen=True)
class Target:
    """A committed checkpoint (or a folder given as a checkpoint) and its location.

    If it is not `shared`, it is on a node's own disk, which has only the files that the node's ranks wrote.
    """

    storage: Storage
    name: str
    path: str
    tier: str = ""
    shared: bool = True
    run: str | None = None
    run_dir: RunDir | None = field(default=None, compare=False)

    @property
    def place(self) -> str:
        """The folder or URL that contains the checkpoint."""
        return self.path.rpartition("/")[0]

    @property
    def parts(self) -> Name | None:
        return parse_name(self.name)

    @property
    def step(self) -> int | None:
        return self.parts.step if self.parts else None

    @property
    def config_file(self) -> Path | None:
        """Config file of the attempt that saved it; None if its run's folder is unknown."""
        return self.run_dir.attempt_config(self.parts.attempt) if self.run_dir and self.parts else None

    @property
    def run_config_file(self) -> Path | None:
        """Config file of its run (the attempt that saved it may have been smaller); None if the folder is unknown."""
        return self.run_dir.attempt_run_config(self.parts.attempt) if self.run_dir and self.parts else None

    @property
    def config(self) -> Any:
        """Configuration of its run (`JobConfig`); None if unknown."""
        return None if self.run_dir is None else read_config(self.run_dir)

    @property
    def is_there(self) -> bool:
        return Catalog(self.place, self.storage).is_committed(self.name)

    @property
    def pins(self) -> LocalStorage | None:
        """Storage that holds the pins of its run's checkpoints; None if it has no run."""
        return None if self.run_dir is None else LocalStorage(self.run_dir.checkpoints)


def split_target(words: str) -> tuple[str, str]:
    """Split RUN[@STEP] into run and step; the step is empty if absent. Raises ConfigError for `RUN@`."""
    name, mark, step = words[1:].partition("@")  # the run may be `@last`
    name = words[:1] + name
    if mark and not step:
        raise ConfigError("no step is given after the @", where=words, hint=f"{name}@latest is the newest; or {WAYS}")
    return name, step


def saving_run(name: str) -> "Run":
    """Look up a run by name, unique prefix, or `@last`. Raises NotFound, and ConfigError for a restore test."""
    run = known_run(name)
    if (order := run.identity.get("restore_test")) is not None:
        tested = f"{order['run']}@{order['step']}"
        hint = f"write {tested}; to restore it again: {repeat_test_command(order)}"
        what = f"{run.name} is a restore test: it has no checkpoint of its own"
        raise ConfigError(what, where=f"it restores {tested}", hint=hint)
    return run


def find(words: str, warn: Warn) -> list[Target]:
    """Return the checkpoints that match `words`, with the nearest complete copy of each one first.

    Raises NotFound or ConfigError. An unreadable tier is reported to `warn`; its OSError is raised if no other tier
    has a checkpoint.
    """
    if is_location(words):
        return [locate_target(words)]
    name, step = split_target(words)
    try:
        run = saving_run(name)
    except NotFound:
        if not step and Path(name).is_dir():
            return [locate_target(words)]  # a folder in the current directory, typed without a slash
        raise
    listed = listing(run, existing_folder(run.name, run.run_dir), warn)
    if not listed:
        raise NotFound(f"{run.name} has no committed checkpoint", where=run.run_dir, hint=f"orch show {run.name}")
    return listed if step == "all" else _select_step(run, words, step, listed)


def _select_step(run: "Run", words: str, step: str, listed: list[Target]) -> list[Target]:
    if step in ("", "latest", "best"):
        name = _name_of_best(run) if step == "best" else listed[0].name
        return [target for target in listed if target.name == name]
    if not (step.isdigit() or step.startswith("step-")):
        raise ConfigError(f"`{step}` is not a step", where=words, hint=WAYS)
    same = [target for target in listed if step == target.name or (step.isdigit() and int(step) == target.step)]
    if not same:
        steps = ", ".join(str(found) for found in list(dict.fromkeys(target.step for target in listed))[:8])
        what = f"step {step}" if step.isdigit() else step
        raise NotFound(f"{run.name} has no checkpoint of {what}", where=run.run_dir, hint=f"available steps: {steps}")
    return same


def _name_of_best(run: "Run") -> str:
    """Return the name of the best checkpoint. Raises ConfigError if no metric is set, NotFound if none has a value."""
    place = RunDir(Path(run.run_dir))
    with open_store(readonly=True) as store:
        bad = [row.name for row in store.checkpoints(run.name) if row.trust in (Trust.CORRUPT, Trust.SUSPECT)]
        own = own_checkpoints(store, run)
    found = best_checkpoints(place, visible_tiers(place), own, bad)
    hint = f"`orch ckpt ls {run.name}` lists its checkpoints"
    if not found.metric:
        what = f"{run.name} has no checkpoint.best.metric, so no checkpoint is the best"
        raise ConfigError(what, where=run.run_dir, hint=hint)
    if not found.names:
        raise NotFound(f"no checkpoint of {run.name} has a value for {found.metric} yet", where=run.run_dir, hint=hint)
    return found.names[0]


def find_one(words: str, warn: Warn) -> Target:
    """Return the nearest complete copy of the checkpoint that matches `words`."""
    return find(words, warn)[0]


def known_run(name: str) -> "Run":
    """Look up a run by name, unique prefix, or `@last`. Raises NotFound."""
    with open_store(readonly=True) as store:
        return store.run(name)


def is_location(words: str) -> bool:
    """Return whether this is a path or URL. Run names contain no slash."""
    return "/" in words or words in (".", "..") or words.startswith("~")


def locate_target(words: str) -> Target:
    """Return the checkpoint at this path or URL, with the run whose folder contains it."""
    if "://" in words and not words.startswith("file://"):
        above, _, name = words.rstrip("/").rpartition("/")
        try:
            target = Target(open_storage(above), name, words.rstrip("/"))
        except (ValueError, ImportError) as error:
            raise ConfigError(f"{without_secrets(words)} cannot be read: {error}", hint=WAYS_TO_STORES) from error
        folder = None
    else:
        folder = Path(words.removeprefix("file://")).expanduser().absolute()
        folder = folder.resolve() if folder.name in ("", "..") else folder
        if not folder.is_dir():
            raise NotFound(f"no such folder: {words}", hint=WAYS)
        above_it = RunDir(folder.parent.parent)
        run_dir = above_it if folder.parent == above_it.checkpoints and above_it.config.exists() else None
        target = Target(LocalStorage(folder.parent), folder.name, str(folder), run_dir=run_dir)
    if target.parts is None:
        if folder is not None and is_export(folder):
            hint = f"`orch ckpt import {shlex.quote(words)} CONFIG` begins a run with its weights"
            raise ConfigError(f"{words} has exported weights, not a run's checkpoint", where=str(folder), hint=hint)
        raise ConfigError(f"`{target.name}` is not the name of a checkpoint's folder", where=words, hint=WAYS)
    return target


def is_export(folder: Path) -> bool:
    """Return whether a folder contains weights that `orch ckpt import` accepts."""
    return any(folder.glob("*.safetensors")) or (folder / "checkpoint.pt").exists()


def listing(run: "Run", place: RunDir, warn: Warn) -> list[Target]:
    """Return all committed checkpoints of a run, newest first, with the nearest complete copy of each one first.

    Checkpoints of another run with this name in a shared tier are left out.
    """
    with open_store(readonly=True) as store:
        own = own_checkpoints(store, run)
    found: dict[str, list[Target]] = {}
    unread: OSError | None = None
    # Shared tiers come first, because a node's own disk may hold only part of a checkpoint.
    for tier in sorted(visible_tiers(place), key=lambda tier: not tier.shared):
        try:
            entries, _ = tier.own_and_others(place, own)
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
    """Return a checkpoint's run and row; each is None if this registry does not have it."""
    if target.run_dir is None:
        return None, None
    try:
        run = store.run(target.run or target.run_dir.name)
    except NotFound:
        return None, None
    if run.run_dir != str(target.run_dir.path):
        return None, None
    return run, next((row for row in store.checkpoints(run.name) if row.name == target.name), None)


def warn_if_doubted(warn: Warn, row: "Checkpoint | None") -> None:
    """Warn about a checkpoint from which the run would not resume."""
    if row is not None and row.trust in (Trust.SUSPECT, Trust.CORRUPT):
        warn(row.trust.lower(), f"{row.name} is {row.trust}{f': {row.reason}' if row.reason else ''}")


@contextmanager
def kept_while_read(*targets: Target) -> Iterator[None]:
    """Pin these checkpoints within the block, each with a separate pin.

    Raises NotFound for a checkpoint that was deleted before the pin was written. A read-only folder cannot hold pins;
    there, a checkpoint that is deleted within the block also raises NotFound.
    """
    of_runs = [target for target in targets if target.run is not None]
    with ExitStack() as pinned:
        for target in of_runs:
            assert target.pins is not None
            with suppress(OSError):
                holder = pin_for_reading(target.pins, target.name)
                pinned.callback(_release, target.pins, target.name, holder)
        require_there(*of_runs)
        try:
            yield
        except (CheckpointError, FileNotFoundError):
            require_there(*of_runs)
            raise


def _release(storage: Storage, name: str, holder: str) -> None:
    with suppress(OSError):
        remove_pin(storage, name, holder)


def require_there(*targets: Target) -> None:
    """Raise NotFound for a checkpoint that no longer exists."""
    for target in targets:
        if not target.is_there:
            hint = f"`orch ckpt ls {target.run}` lists what is left; `orch ckpt pin` keeps one" if target.run else WAYS
            raise NotFound(f"{target.name} no longer exists: it is being deleted", where=target.path, hint=hint)
