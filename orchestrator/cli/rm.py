"""`orch rm`: remove ended runs with their folders, copies and registry rows.

Order: record the intent in the registry (so that the run is not resumed), delete the copies in other tiers, rename
the folder, delete it, delete the rows. If the command is killed, running it again finishes the removal.
"""

import os
import shlex
import shutil
import stat
import sys
from collections.abc import Iterator
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
from orchestrator.controller.ownership import never_submitted
from orchestrator.errors import ConfigError, NotFound, OrchError, Precondition
from orchestrator.registry.records import Attempt, Run
from orchestrator.registry.store import Store
from orchestrator.registry.user_writes import Removal, require_removable
from orchestrator.run_dirs.inheritable_checkpoints import OwnCheckpoints
from orchestrator.run_dirs.other_registry import find_other_registry
from orchestrator.run_dirs.reader_pins import remove_dead_readers
from orchestrator.run_dirs.run_folder import name_in_folder
from orchestrator.states import Trust
from trainer.protocol.run_dir import RunDir

SHOWN = 3
"""Maximum number of pinned checkpoints that a refusal names."""


@dataclass(frozen=True, kw_only=True)
class TierCopies:
    """A run's checkpoints in a tier outside its folder; `left` describes what stays in the tier, and why."""

    tier: Tier
    names: tuple[str, ...] = ()
    bytes: int = 0
    left: str = ""

    @property
    def place(self) -> str:
        return self.tier.catalog.place


@dataclass(frozen=True, kw_only=True)
class RemovalPlan:
    """Plan for removing a run. `folder` now holds its files, or is None if there is nothing to delete."""

    run: Run
    first: Attempt
    folder: Path | None
    bytes: int = 0
    copies: tuple[TierCopies, ...] = ()
    left: tuple[str, ...] = ()  # kept items, each with the reason
    tests: tuple["RemovalPlan", ...] = ()  # restore tests that are removed with the run

    @property
    def all_bytes(self) -> int:
        """Total bytes that the removal frees."""
        return self.bytes + sum(item.bytes for item in self.copies) + sum(test.all_bytes for test in self.tests)

    def lines(self) -> Iterator[str]:
        """Describe what would be removed and what would stay."""
        yield f"{self.run.name}  {self.run.state}  {self.run.reason}".rstrip()
        if self.folder is not None:
            yield f"  folder  {self.folder} ({size(self.bytes)})"
        yield from (f"  copies  {item.place}: {len(item.names)} ({size(item.bytes)})" for item in self.copies)
        yield from (f"  test    {test.run.name} ({size(test.all_bytes)})" for test in self.tests)
        yield from (f"  stays   {words}" for words in self.left)

    def to_json(self, *, removed: bool) -> dict[str, Any]:
        copies = [{"tier": item.place, "checkpoints": list(item.names), "bytes": item.bytes} for item in self.copies]
        return {
            "run": self.run.name, "state": str(self.run.state), "removed": removed, "folder": self.run.run_dir,
            "bytes": self.all_bytes, "copies": copies, "restore_tests": [test.run.name for test in self.tests],
            "left": list(self.left),
        }  # fmt: skip


RM_JSON = "list of {run, state, removed, folder, bytes, copies: [{tier, checkpoints, bytes}], restore_tests, left}"


@click.command(cls=Verb, json_data=RM_JSON)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation. Required without a terminal.")
@click.option("--keep-copies", is_flag=True, help="Keep copies of checkpoints in other tiers.")
@click.option(
    "--forget", is_flag=True,
    help="Remove only the registry rows and touch no files, for a folder that is gone or not the run's.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print what would be removed; remove nothing.")
@click.pass_obj
def rm(screen: Screen, runs: tuple[str, ...], yes: bool, keep_copies: bool, forget: bool, dry_run: bool) -> int:
    """Remove runs that are over: folder, checkpoints, registry rows, and their restore tests.

    RUN is a full name. Copies in other tiers are deleted too, if this machine can reach them. The command lists
    what it leaves: unreachable tiers, disks of other nodes, checkpoints that your own program wrote elsewhere. The
    number of a removed run may be reused.

    It refuses to remove (exit code 4) a live run, a pinned checkpoint, a run with a restore test in progress, a folder
    that may not be the run's own or contains another run's folder, and a run that another registry has continued
    (`orch db rebuild -h`). If it is killed, run it again; until it finishes, the run cannot be resumed.
    """
    with open_store() as store:
        plans, refused = _plan_all(screen, store, runs, keep_copies=keep_copies, forget=forget)
        options = [*(["--keep-copies"] if keep_copies else []), *(["--forget"] if forget else [])]
        if plans and not (dry_run or yes or _is_confirmed(screen, plans, options)):
            screen.note("nothing was removed")
            return 0
        done = [] if dry_run else [plan.run.name for plan in plans if _try_remove(screen, store, plan)]
    if screen.json:
        screen.data("rm", [plan.to_json(removed=plan.run.name in done) for plan in plans])
    else:
        _show(screen, plans, done, dry_run)
    failed = not dry_run and len(done) < len(plans)
    return refused.exit_code if refused else Precondition.exit_code if failed else 0


def _show(screen: Screen, plans: list[RemovalPlan], done: list[str], dry_run: bool) -> None:
    for plan in plans:
        if dry_run:
            screen.say("\n".join(plan.lines()))
        elif plan.run.name in done:
            tests = f", with {len(plan.tests)} restore test{'s' if len(plan.tests) > 1 else ''}" if plan.tests else ""
            screen.say(f"{plan.run.name}: removed{tests}, {size(plan.all_bytes)} freed")
            for words in plan.left:
                screen.note(f"  left  {words}")
    if dry_run:
        screen.note("nothing was removed")


def _plan_all(
    screen: Screen, store: Store, names: tuple[str, ...], *, keep_copies: bool, forget: bool
) -> tuple[list[RemovalPlan], OrchError | None]:
    """Return the possible removals and the first refusal. Raises the refusal if no removal is possible."""
    plans: list[RemovalPlan] = []
    refusals: list[OrchError] = []
    for name in dict.fromkeys(names):
        try:
            run = store.run(name)
            if run.name != name:
                raise NotFound(f"no run {name}", hint=f"rm needs the full name; did you mean {run.name}?")
            plans.append(plan_removal(store, run, keep_copies=keep_copies, forget=forget))
        except FileNotFoundError:
            hint = "`orch status` shows whether another command has removed it"
            refusals.append(Precondition(f"files of {name} are disappearing during the count", where=name, hint=hint))
        except OrchError as error:
            refusals.append(error)
    for refusal in refusals if len(names) > 1 else ():
        screen.warn(type(refusal).__name__, f"{refusal.what}; {refusal.hint}")
    if not plans:
        raise refusals[0]
    along = {test.run.name for plan in plans for test in plan.tests}
    return [plan for plan in plans if plan.run.name not in along], refusals[0] if refusals else None


def _is_confirmed(screen: Screen, plans: list[RemovalPlan], options: list[str]) -> bool:
    """Ask for confirmation. Raises ConfigError if stdin is not a terminal."""
    if not sys.stdin.isatty():
        hint = " ".join(["orch rm", *(plan.run.name for plan in plans), *options, "-y"])
        raise ConfigError("the removal cannot be confirmed", where="stdin is not a terminal", hint=hint)
    for plan in plans:
        screen.note("\n".join(plan.lines()))
    return click.confirm("Remove permanently?", err=True)


def plan_removal(store: Store, run: Run, *, keep_copies: bool, forget: bool) -> RemovalPlan:
    """Plan the removal without changing anything. Raises Precondition for a run that is live, foreign or pinned.

    `keep_copies` keeps copies in other tiers; `forget` keeps every file.
    """
    tests = [store.run(test.test) for test in store.restore_tests(run.name) if test.ended_at is not None]
    under_way = [test.test for test in store.restore_tests(run.name, going_on=True)]
    attempts = store.attempts(run.name)
    require_removable(run, attempts, under_way)
    folder = None if forget else own_folder(run, attempts[0], submitted=not never_submitted(attempts))
    copies: tuple[TierCopies, ...] = ()
    if folder is not None and folder == Path(run.run_dir):
        if (other := find_other_registry(run, attempts, store.path)) is not None:
            raise _foreign_folder(run, other.what, other.hint)
        _refuse_pins(run, RunDir(folder))
        own, outside = OwnCheckpoints.from_rows(run, attempts), visible_tiers(RunDir(folder))
        copies = tuple(_find_copies(tier, own, keep_copies) for tier in outside if not tier.is_within(RunDir(folder)))
    left = [f"{item.place}: {item.left}" for item in copies if item.left]
    return RemovalPlan(
        run=run,
        first=attempts[0],
        folder=folder,
        bytes=bytes_below(run, folder) if folder is not None else 0,
        copies=tuple(item for item in copies if item.names),
        left=(f"{run.run_dir}: no file was touched (--forget)",) if forget else (*left, *_own_copies(store, run)),
        tests=tuple(plan_removal(store, test, keep_copies=keep_copies, forget=forget) for test in tests),
    )


def _find_copies(tier: Tier, own: OwnCheckpoints, keep: bool) -> TierCopies:
    """Return the run's checkpoints in a tier outside its folder; with `keep`, they all stay."""
    try:
        names = tier.catalog.names()
        if keep:
            return TierCopies(tier=tier, left=f"{len(names)} checkpoints (--keep-copies)" if names else "")
        mine = tuple(name for name in names if _is_deletable(tier, name, own))
        size = sum(length or 0 for name in mine for length in tier.storage.list(name).values())
    except OSError as error:
        return TierCopies(tier=tier, left=f"it cannot be read from here: {error_words(error)}")
    others = f"{len(names) - len(mine)} checkpoints of another run" if len(mine) < len(names) else ""
    elsewhere = "" if tier.shared else "copies on the disks of other nodes"
    return TierCopies(tier=tier, names=mine, bytes=size, left="; ".join(filter(None, (others, elsewhere))))


def _is_deletable(tier: Tier, name: str, own: OwnCheckpoints) -> bool:
    """Return whether the run's own attempts wrote this checkpoint, and it is not a link."""
    if not own.has_written(name):
        return False
    local = isinstance(tier.storage, LocalStorage)
    return not (local and any(os.path.islink(place) for place in (tier.catalog.root, tier.catalog.root / name)))


def _deletion_path(run: Run, first: Attempt) -> Path:
    """Return the unique path to which the run's folder is renamed before it is deleted."""
    folder = Path(run.run_dir)
    return folder.with_name(f".{run.name}.{first.nonce}.removed")


def own_folder(run: Run, first: Attempt, *, submitted: bool) -> Path | None:
    """Return the folder that now has the run's files, or None if they are gone or never existed.

    Raises Precondition for a folder that is not provably this run's, or that cannot be read.
    """
    renamed, folder = _deletion_path(run, first), Path(run.run_dir)
    # Only `orch rm` renames folders, and a half-deleted folder may have lost its run.json.
    if _is_own_folder(run, renamed):
        return renamed
    if _is_own_folder(run, folder):
        _require_owner(run, folder, first)
        return folder
    if submitted and run.removal != Removal.SET_ASIDE:
        raise _foreign_folder(run, f"the folder of {run.name} is missing", "mount its file system")
    return None


def _is_own_folder(run: Run, folder: Path) -> bool:
    """Return whether the folder exists and belongs to this user. Raises Precondition if anything else has its name."""
    try:
        found = os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(run, error, folder, "make sure that you may enter the folders above it") from error
    if not stat.S_ISDIR(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "not a folder"
        raise _foreign_folder(run, f"{folder} is {what}: orch created a folder there", "remove it yourself")
    if found.st_uid != os.geteuid():
        raise _foreign_folder(run, f"{folder} belongs to another user (uid {found.st_uid})", "ask its owner")
    return True


def _unreadable(run: Run, error: OSError, place: Path, remedy: str) -> Precondition:
    # The hint does not offer --forget, because the folder may be the run's own.
    what = f"the folder of {run.name} cannot be read: {error.strerror or error}"
    hint = f"{remedy}, then run the same command again" if isinstance(error, PermissionError) else "orch doctor"
    return Precondition(what, where=str(place), hint=hint)


def _require_owner(run: Run, folder: Path, first: Attempt) -> None:
    try:
        owner = read_json(RunDir(folder).run)
    except (FileNotFoundError, NotADirectoryError, NotAFile, ValueError):
        owner = None
    except OSError as error:
        raise _unreadable(run, error, RunDir(folder).run, f"chmod u+rwx {shlex.quote(str(folder))}") from error
    if not isinstance(owner, dict) or (owner.get("name"), owner.get("nonce")) != (run.name, first.nonce):
        raise _foreign_folder(run, f"the folder may not belong to {run.name}", "check its run.json")


def _foreign_folder(run: Run, what: str, remedy: str) -> Precondition:
    hint = f"{remedy}; to forget the run without touching any file: orch rm {run.name} --forget"
    return Precondition(what, where=run.run_dir, hint=hint)


def bytes_below(run: Run, folder: Path) -> int:
    """Return the bytes that deleting a run's folder frees. Files with other hard links do not count.

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
        hint = f"rm deletes everything in the folder: first `orch rm {inner}`, or keep both"
        raise Precondition(f"the folder of {inner} is inside that of {run.name}", where=str(place), hint=hint)


def _refuse_pins(run: Run, folder: RunDir) -> None:
    storage = LocalStorage(folder.checkpoints)
    remove_dead_readers(storage)
    pinned = [] if run.removal else pinned_names(storage)  # a removal in progress has already passed this check
    there = {name for tier in visible_tiers(folder) for name in pinned if tier.catalog.is_committed(name)}
    steps = sorted({parts.step for name in there if (parts := parse_name(name))})
    if not steps:
        return
    words = ", ".join(map(str, steps[:SHOWN])) + (", ..." if len(steps) > SHOWN else "")
    what = f"{run.name} has pinned checkpoints: step{'' if len(steps) == 1 else 's'} {words}"
    unpin = "; ".join(f"orch ckpt unpin {run.name}@{step}" for step in steps[:SHOWN])
    raise Precondition(what, where=str(folder.checkpoints), hint=f"{unpin}; then run the same command again")


def _own_copies(store: Store, run: Run) -> list[str]:
    """Describe checkpoints written by the user's own program, which orch knows but never deletes."""
    rows = [row for row in store.checkpoints(run.name) if row.trust is not Trust.DELETED]
    places = dict.fromkeys(str(Path(row.path).parent) for row in rows if parse_name(row.name) is None)
    inside = f"{Path(run.run_dir)}/"
    return [f"{place}: the program's own checkpoints" for place in places if not f"{place}/".startswith(inside)]


def _try_remove(screen: Screen, store: Store, plan: RemovalPlan) -> bool:
    """Remove one run and its restore tests; return False, after a warning, if that fails."""
    try:
        for each in (*plan.tests, plan):
            remove(store, each)
    except NotFound:
        screen.note(f"{plan.run.name}: another command has just removed it")
    except OrchError as error:
        screen.warn(type(error).__name__, f"{error.what}; {error.hint}")
        return False
    except (OSError, ImportError) as error:
        place = getattr(error, "filename", None) or plan.folder
        what = f"{plan.run.name}: {place}: {getattr(error, 'strerror', None) or error}"
        screen.warn("NotRemoved", f"{what}; run the same command again to finish")
        return False
    return True


def remove(store: Store, plan: RemovalPlan) -> None:
    """Remove one run, or finish a removal that was killed. Raises OSError, Precondition."""
    run = plan.run.name
    store.begin_removal(run)
    failpoints.reach("rm_begun")
    for copies in plan.copies:
        storage = copies.tier.storage
        for name in copies.names:
            delete(storage, name, lambda: True)
        if isinstance(storage, LocalStorage) and not storage.list(""):
            storage.delete("")
    failpoints.reach("rm_copies")
    if plan.folder is not None:
        # A half-deleted folder must never be found under the run's name.
        renamed = _deletion_path(plan.run, plan.first)
        if plan.folder != renamed:
            os.rename(plan.folder, renamed)
            fsync_dir(renamed.parent)
        failpoints.reach("rm_renamed")
        store.note_set_aside(run)
        failpoints.reach("rm_set_aside")
        shutil.rmtree(renamed)  # links are deleted, their targets are not
        fsync_dir(renamed.parent)
    failpoints.reach("rm_deleted")
    store.delete_run(run)
