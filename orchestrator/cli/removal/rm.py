"""`orch rm`: removal of ended runs, with their folders, copies and registry rows.

Order: record the intent in the registry (so that the run is not resumed), delete the copies in further tiers, rename
the folder, delete it, delete the rows. After a kill the same command finishes the removal.
"""

import os
import shlex
import shutil
import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from checkpointing.format.commit import parse_name
from checkpointing.retention.garbage import delete, pinned_names
from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.durable import NotAFile, fsync_dir, read_json
from checkpointing.storage.storage_errors import error_words
from orchestrator import failpoints
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.checkpoints.tiers import Tier, visible_tiers
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen, size
from orchestrator.controller.reconciler.ownership import never_submitted
from orchestrator.errors import ConfigError, NotFound, OrchError, Precondition
from orchestrator.registry.operations.removal_writes import Removal, require_removable
from orchestrator.registry.records import Attempt, Run
from orchestrator.registry.store import Store
from orchestrator.run_dirs.inheritable_checkpoints import OwnCheckpoints
from orchestrator.run_dirs.other_registry import find_other_registry
from orchestrator.run_dirs.reader_pins import remove_dead_readers
from orchestrator.run_dirs.run_folder import name_in_folder
from orchestrator.states import Trust
from trainer.protocol.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class TierCopies:
    """A run's checkpoints in one further tier; `left` describes what stays there, with the reason."""

    tier: Tier
    names: tuple[str, ...] = ()
    bytes: int = 0
    left: str = ""

    @property
    def place(self) -> str:
        return self.tier.catalog.place


def find_copies(folder: RunDir, own: OwnCheckpoints, *, keep: bool) -> list[TierCopies]:
    """Return the run's checkpoints in tiers outside its folder; with `keep`, all of them stay."""
    outside = [tier for tier in visible_tiers(folder) if not tier.is_within(folder)]
    return [_find_tier_copies(tier, own, keep) for tier in outside]


def _find_tier_copies(tier: Tier, checkpoints: OwnCheckpoints, keep: bool) -> TierCopies:
    try:
        names = tier.catalog.names()
        if keep:
            return TierCopies(tier=tier, left=f"{len(names)} checkpoints (--keep-copies)" if names else "")
        own = tuple(name for name in names if _is_deletable(tier, name, checkpoints))
        size = sum(length or 0 for name in own for length in tier.storage.list(name).values())
    except OSError as error:
        return TierCopies(tier=tier, left=f"it cannot be read from here: {error_words(error)}")
    others = f"{len(names) - len(own)} checkpoints of another run" if len(own) < len(names) else ""
    apart = "" if tier.shared else "what other nodes have on their own disks"
    return TierCopies(tier=tier, names=own, bytes=size, left="; ".join(filter(None, (others, apart))))


def _is_deletable(tier: Tier, name: str, own: OwnCheckpoints) -> bool:
    """Return whether the run's own attempts wrote it. An inherited checkpoint may be another run's; a link stays."""
    if not own.has_written(name):
        return False
    local = isinstance(tier.storage, LocalStorage)
    return not (local and any(os.path.islink(place) for place in (tier.catalog.root, tier.catalog.root / name)))


def delete_copies(copies: TierCopies) -> None:
    """Delete the copies, and the run's folder in that tier once it is empty. Raises OSError."""
    for name in copies.names:
        delete(copies.tier.storage, name, lambda: True)
    storage = copies.tier.storage
    if copies.names and isinstance(storage, LocalStorage) and not storage.list(""):
        storage.delete("")


def aside(run: Run, first: Attempt) -> Path:
    """Return the unique name of the run's folder during its deletion."""
    folder = Path(run.run_dir)
    return folder.with_name(f".{run.name}.{first.nonce}.removed")


def own_folder(run: Run, first: Attempt, *, submitted: bool) -> Path | None:
    """Return the folder that has the run's files now; None if they are gone or never existed.

    Raises Precondition for a folder that is not provably this run's, or that cannot be read.
    """
    renamed, folder = aside(run, first), Path(run.run_dir)
    if _is_there(run, renamed):
        # Only `orch rm` creates this name, and a half-deleted folder may have lost its run.json.
        _require_own_folder(run, renamed)
        return renamed
    if _is_there(run, folder):
        _require_own_folder(run, folder)
        _require_owner(run, folder, first)
        return folder
    if submitted and run.removal != Removal.SET_ASIDE:
        raise foreign_folder(run, f"the folder of {run.name} is not there", "mount its file system")
    return None


def _is_there(run: Run, folder: Path) -> bool:
    try:
        os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(run, error, folder, "see that you may enter the folders above it") from error
    return True


def _unreadable(run: Run, error: OSError, place: Path, cure: str) -> Precondition:
    """Return the refusal for an unreadable folder, without --forget as a remedy: it may well be the run's own."""
    what = f"the folder of {run.name} cannot be read: {error.strerror or error}"
    hint = f"{cure}, then type the same command again" if isinstance(error, PermissionError) else "orch doctor"
    return Precondition(what, where=str(place), hint=hint)


def _require_own_folder(run: Run, folder: Path) -> None:
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no folder"
        raise foreign_folder(run, f"{folder} is {what}: orch made a folder there", "remove it yourself")
    if found.st_uid != os.geteuid():
        raise foreign_folder(run, f"{folder} belongs to another user (uid {found.st_uid})", "ask its owner")


def _require_owner(run: Run, folder: Path, first: Attempt) -> None:
    try:
        owner = read_json(RunDir(folder).run)
    except (FileNotFoundError, NotADirectoryError, NotAFile, ValueError):
        owner = None
    except OSError as error:
        raise _unreadable(run, error, RunDir(folder).run, f"chmod u+rwx {shlex.quote(str(folder))}") from error
    if not isinstance(owner, dict) or (owner.get("name"), owner.get("nonce")) != (run.name, first.nonce):
        raise foreign_folder(run, f"the folder is not known to be that of {run.name}", "look at its run.json")


def foreign_folder(run: Run, what: str, cure: str) -> Precondition:
    """Return the refusal to delete a folder that is not exclusively this run's."""
    hint = f"{cure}; to forget the run and touch no file: orch rm {run.name} --forget"
    return Precondition(what, where=run.run_dir, hint=hint)


def set_aside(run: Run, first: Attempt, folder: Path) -> Path:
    """Rename the folder, so that a half-deleted one is never found under the run's name. Raises OSError."""
    renamed = aside(run, first)
    if folder != renamed:
        os.rename(folder, renamed)
        fsync_dir(renamed.parent)
    return renamed


def delete_tree(folder: Path) -> None:
    """Delete a folder and its contents; links are deleted, their targets are not. Raises OSError."""
    shutil.rmtree(folder)
    fsync_dir(folder.parent)


def bytes_below(run: Run, folder: Path) -> int:
    """Return the bytes that deleting a run's folder frees. Files with further hard links do not count.

    Raises Precondition if another run's folder is inside, except in the copy of the code.
    """
    code, run_json = RunDir(folder).code, RunDir(folder).run
    total, places = 0, [folder]
    while places:
        place = places.pop()
        with os.scandir(place) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    places.append(Path(entry.path))
                    continue
                if entry.name == run_json.name and place != folder and not place.is_relative_to(code):
                    _refuse_inner_run(run, place)
                found = entry.stat(follow_symlinks=False)
                total += found.st_size if found.st_nlink == 1 else 0
    return total


def _refuse_inner_run(run: Run, place: Path) -> None:
    if inner := name_in_folder(place):
        hint = f"rm deletes all that is in the folder: `orch rm {inner}` first, or keep both"
        raise Precondition(f"the folder of {inner} is inside that of {run.name}", where=str(place), hint=hint)


SHOWN = 3
"""Maximum number of pinned checkpoints that a refusal names."""


@dataclass(frozen=True)
class RemovalOptions:
    """Files to keep: copies in further tiers, or with `forget`, every file."""

    keep_copies: bool = False
    forget: bool = False


@dataclass(frozen=True, kw_only=True)
class RemovalPlan:
    """A run that may be removed. `folder` has its files now; None if there is nothing to delete."""

    run: Run
    first: Attempt
    folder: Path | None
    bytes: int = 0
    copies: tuple[TierCopies, ...] = ()
    left: tuple[str, ...] = ()  # kept items, each with the reason
    tests: tuple["RemovalPlan", ...] = ()  # its restore tests, which are removed with it

    @property
    def all_bytes(self) -> int:
        """Bytes freed in total."""
        return self.bytes + sum(item.bytes for item in self.copies) + sum(test.all_bytes for test in self.tests)


def plan_removal(store: Store, run: Run, choice: RemovalOptions) -> RemovalPlan:
    """Plan the removal without changing anything. Raises Precondition for a run that is live, foreign or has pins."""
    tests = [store.run(test.test) for test in store.restore_tests(run.name) if test.ended_at is not None]
    under_way = [test.test for test in store.restore_tests(run.name, going_on=True)]
    attempts = store.attempts(run.name)
    require_removable(run, attempts, under_way)
    if choice.forget:
        return RemovalPlan(
            run=run, first=attempts[0], folder=None, left=(f"{run.run_dir}: no file was touched (--forget)",),
            tests=tuple(plan_removal(store, test, choice) for test in tests),
        )  # fmt: skip
    folder = own_folder(run, attempts[0], submitted=not never_submitted(attempts))
    copies: tuple[TierCopies, ...] = ()
    if folder is not None and folder == Path(run.run_dir):
        if (other := find_other_registry(run, attempts, store.path)) is not None:
            raise foreign_folder(run, other.what, other.hint)
        _refuse_pins(run, RunDir(folder))
        own = OwnCheckpoints.from_rows(run, attempts)
        copies = tuple(find_copies(RunDir(folder), own, keep=choice.keep_copies))
    left = [f"{item.place}: {item.left}" for item in copies if item.left]
    return RemovalPlan(
        run=run,
        first=attempts[0],
        folder=folder,
        bytes=bytes_below(run, folder) if folder is not None else 0,
        copies=tuple(item for item in copies if item.names),
        left=(*left, *_own_programs(store, run)),
        tests=tuple(plan_removal(store, test, choice) for test in tests),
    )


def _refuse_pins(run: Run, folder: RunDir) -> None:
    """Raise Precondition if a pinned checkpoint exists."""
    storage = LocalStorage(folder.checkpoints)
    remove_dead_readers(storage)
    pinned = pinned_names(storage)
    if run.removal or not pinned:
        return  # a begun removal has passed this check
    there = {name for tier in visible_tiers(folder) for name in pinned if tier.catalog.is_committed(name)}
    steps = sorted({parts.step for name in there if (parts := parse_name(name))})
    if not steps:
        return
    words = ", ".join(map(str, steps[:SHOWN])) + (", ..." if len(steps) > SHOWN else "")
    unpin = "; ".join(f"orch ckpt unpin {run.name}@{step}" for step in steps[:SHOWN])
    raise Precondition(
        f"{run.name} has pinned checkpoints: step{'' if len(steps) == 1 else 's'} {words}",
        where=str(folder.checkpoints),
        hint=f"{unpin}; then the same again",
    )


def _own_programs(store: Store, run: Run) -> list[str]:
    """Describe checkpoints written by the user's own program, which orch knows but never deletes."""
    rows = [row for row in store.checkpoints(run.name) if row.trust is not Trust.DELETED]
    places = dict.fromkeys(str(Path(row.path).parent) for row in rows if parse_name(row.name) is None)
    inside = f"{Path(run.run_dir)}/"
    return [f"{place}: the program's own checkpoints" for place in places if not f"{place}/".startswith(inside)]


OTHER_WITHIN = 5.0
"""Seconds to wait for another command to finish its removal."""


RM_JSON = "list of {run, state, removed, folder, bytes, copies: [{tier, checkpoints, bytes}], restore_tests, left}"


@click.command(cls=Verb, json_data=RM_JSON)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option("-y", "--yes", is_flag=True, help="Do not ask. Needed without a terminal.")
@click.option("--keep-copies", is_flag=True, help="Leave copies of checkpoints in further tiers.")
@click.option(
    "--forget",
    is_flag=True,
    help="Remove only the rows of the registry and touch no file: for a folder that is gone or not the run's.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be removed; remove nothing.")
@click.pass_obj
def rm(screen: Screen, runs: tuple[str, ...], yes: bool, keep_copies: bool, forget: bool, dry_run: bool) -> int:
    """Remove runs that are over: folder, checkpoints, registry rows, and their restore tests.

    RUN is a whole name. Copies in further tiers are deleted too, if this machine reaches them. The command names
    what it leaves: unreachable tiers, disks of other nodes, checkpoints that your own program wrote elsewhere. The
    number of a removed run may be used again.

    It refuses (exit code 4) a live run, a pinned checkpoint, a restore test under way, a folder that may not be the
    run's own or has another run's folder in it, and a run with which another registry has gone on
    (`orch db rebuild -h`). If it is killed, the same command finishes; until then the run cannot be resumed.
    """
    with open_store() as store:
        plans, refused = _plans(screen, store, runs, RemovalOptions(keep_copies, forget))
        if plans and not dry_run and not (yes or _is_confirmed(screen, plans, RemovalOptions(keep_copies, forget))):
            screen.note("nothing was removed")
            return 0
        done = [] if dry_run else [plan.run.name for plan in plans if _is_removed(screen, store, plan)]
    _say(screen, plans, done, dry_run)
    failed = not dry_run and len(done) < len(plans)
    return refused.exit_code if refused else Precondition.exit_code if failed else 0


def _plans(
    screen: Screen, store: Store, names: tuple[str, ...], choice: RemovalOptions
) -> tuple[list[RemovalPlan], OrchError | None]:
    """Return the possible removals and the first refusal. Raises the refusal if no removal is possible."""
    plans: list[RemovalPlan] = []
    refused: OrchError | None = None
    for name in dict.fromkeys(names):
        try:
            run = store.run(name)
            if run.name != name:
                hint = f"rm takes whole names, so that it meets no other run: {run.name}?"
                raise NotFound(f"no run {name}", hint=hint)
            plans.append(plan_removal(store, run, choice))
        except FileNotFoundError:
            error = _removed_meanwhile(store, name)
            refused = refused or error
            if len(names) > 1:
                screen.warn(type(error).__name__, f"{error.what}; {error.hint}")
        except OrchError as error:
            refused = refused or error
            if len(names) > 1:
                screen.warn(type(error).__name__, f"{error.what}; {error.hint}")
    if refused is not None and not plans:
        raise refused
    along = {test.run.name for plan in plans for test in plan.tests}
    return [plan for plan in plans if plan.run.name not in along], refused


def _is_confirmed(screen: Screen, plans: list[RemovalPlan], choice: RemovalOptions) -> bool:
    """Ask for confirmation. Raises ConfigError if stdin is not a terminal."""
    names = " ".join(plan.run.name for plan in plans)
    if not sys.stdin.isatty():
        options = (("--keep-copies", choice.keep_copies), ("--forget", choice.forget))
        given = "".join(f" {option}" for option, is_given in options if is_given)
        hint = f"orch rm {names}{given} -y"
        raise ConfigError("nobody is there to confirm the removal", where="stdin is no terminal", hint=hint)
    for plan in plans:
        for line in _lines(plan):
            screen.note(line)
    return click.confirm("Remove for good?", err=True)


def _is_removed(screen: Screen, store: Store, plan: RemovalPlan) -> bool:
    """Remove one run and its restore tests. Returns False, with a warning, if that fails."""
    try:
        for test in plan.tests:
            remove(store, test)
        remove(store, plan)
    except (FileNotFoundError, NotFound) as error:
        if _is_gone(store, plan):
            screen.note(f"{plan.run.name}: another command removed it just now, too")
            return True
        words = f"{plan.run.name}: {error.what if isinstance(error, OrchError) else error}"
        screen.warn("NotRemoved", f"{words}; the same command finishes what was begun")
        return False
    except (OSError, ImportError) as error:
        words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        place = getattr(error, "filename", None) or plan.folder
        screen.warn("NotRemoved", f"{plan.run.name}: {place}: {words}; the same command finishes what was begun")
        return False
    except OrchError as error:
        screen.warn(type(error).__name__, f"{error.what}; {error.hint}")
        return False
    return True


def _is_gone(store: Store, plan: RemovalPlan) -> bool:
    """Return whether another command has finished the removal, after waiting a while for it."""
    give_up = time.monotonic() + OTHER_WITHIN
    while time.monotonic() < give_up:
        try:
            if store.attempts(store.run(plan.run.name).name)[0].nonce != plan.first.nonce:
                return True  # the name belongs to another run by now
        except NotFound:
            return True
        time.sleep(0.1)
    return False


def _removed_meanwhile(store: Store, name: str) -> OrchError:
    """Return the error for a run whose files disappeared while they were counted."""
    give_up = time.monotonic() + OTHER_WITHIN
    while time.monotonic() < give_up:
        try:
            store.run(name)
        except NotFound:
            return NotFound(f"{name} has just been removed by another command", hint="orch status")
        time.sleep(0.1)
    return Precondition(
        f"files of {name} go away while they are looked at", where=name, hint="`orch status` shows whether it is gone"
    )


def remove(store: Store, plan: RemovalPlan) -> None:
    """Remove one run; continues a removal that was interrupted by a kill. Raises OSError, Precondition."""
    run = plan.run.name
    store.begin_removal(run)
    failpoints.reach("rm_begun")
    for copies in plan.copies:
        delete_copies(copies)
    failpoints.reach("rm_copies")
    if plan.folder is not None:
        renamed = set_aside(plan.run, plan.first, plan.folder)
        failpoints.reach("rm_renamed")
        store.note_set_aside(run)
        failpoints.reach("rm_set_aside")
        delete_tree(renamed)
    failpoints.reach("rm_deleted")
    store.delete_run(run)


def _say(screen: Screen, plans: list[RemovalPlan], done: list[str], dry_run: bool) -> None:
    if screen.json:
        screen.data("rm", [_as_json(plan, plan.run.name in done) for plan in plans])
        return
    for plan in plans:
        if dry_run:
            for line in _lines(plan):
                screen.say(line)
        elif plan.run.name in done:
            tests = f", with {len(plan.tests)} restore test{'s' if len(plan.tests) > 1 else ''}" if plan.tests else ""
            screen.say(f"{plan.run.name}: removed{tests}, {size(plan.all_bytes)} freed")
            for words in plan.left:
                screen.note(f"  left  {words}")
    if dry_run:
        screen.note("nothing was removed")


def _lines(plan: RemovalPlan) -> list[str]:
    """Describe what would be removed and what would stay."""
    lines = [f"{plan.run.name}  {plan.run.state}  {plan.run.reason}".rstrip()]
    if plan.folder is not None:
        lines.append(f"  folder  {plan.folder} ({size(plan.bytes)})")
    lines += [f"  copies  {item.place}: {len(item.names)} ({size(item.bytes)})" for item in plan.copies]
    lines += [f"  test    {test.run.name} ({size(test.all_bytes)})" for test in plan.tests]
    return [*lines, *(f"  stays   {words}" for words in plan.left)]


def _as_json(plan: RemovalPlan, removed: bool) -> dict[str, Any]:
    copies = [{"tier": item.place, "checkpoints": list(item.names), "bytes": item.bytes} for item in plan.copies]
    return {
        "run": plan.run.name, "state": str(plan.run.state), "removed": removed, "folder": plan.run.run_dir,
        "bytes": plan.all_bytes, "copies": copies, "restore_tests": [test.run.name for test in plan.tests],
        "left": list(plan.left),
    }  # fmt: skip
