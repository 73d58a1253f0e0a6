"""`orch rm`: removes runs that are over, folder and registry rows, so that a kill at any point loses nothing else.

The order: the intent in the registry (nobody goes on with the run), copies in further tiers, the folder renamed, the
folder deleted, the rows. What a kill has left is finished by the same command.
"""

import sys
import time
from typing import Any

import click

from orchestrator.cli.access.registry import open_store
from orchestrator.cli.removal.copies import delete_copies
from orchestrator.cli.removal.plan import Choice, Plan, plan_removal
from orchestrator.cli.removal.run_folder import delete_tree, set_aside
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen, size
from orchestrator.controller import failpoints
from orchestrator.errors import ConfigError, NotFound, OrchError, Precondition
from orchestrator.registry.store import Store

OTHER_WITHIN = 5.0
"""Seconds that another command gets to finish what it removes."""


@click.command(cls=Verb)
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--keep-copies", is_flag=True, help="Leave copies of checkpoints in further tiers.")
@click.option("--forget", is_flag=True, help="Remove only what the registry knows; touch no file.")
@click.option("--dry-run", is_flag=True, help="Print what would be removed; remove nothing.")
@click.pass_obj
def rm(screen: Screen, runs: tuple[str, ...], yes: bool, keep_copies: bool, forget: bool, dry_run: bool) -> int:
    """Remove runs that are over: folder, checkpoints, registry rows, and the restore tests of them.

    A run that lives, or has a pinned checkpoint, is refused. If the command is killed, the same command finishes.
    """
    with open_store() as store:
        plans, refused = _plans(screen, store, runs, Choice(keep_copies, forget))
        if plans and not dry_run and not (yes or _is_confirmed(screen, plans, Choice(keep_copies, forget))):
            screen.note("nothing was removed")
            return 0
        done = [] if dry_run else [plan.run.name for plan in plans if _is_removed(screen, store, plan)]
    _say(screen, plans, done, dry_run)
    failed = not dry_run and len(done) < len(plans)
    return refused.exit_code if refused else Precondition.exit_code if failed else 0


def _plans(screen: Screen, store: Store, names: tuple[str, ...], choice: Choice) -> tuple[list[Plan], OrchError | None]:
    """What may be removed, and the first refusal; raised when there is nothing else."""
    plans: list[Plan] = []
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


def _is_confirmed(screen: Screen, plans: list[Plan], choice: Choice) -> bool:
    """Ask the person; raises ConfigError where nobody can answer."""
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


def _is_removed(screen: Screen, store: Store, plan: Plan) -> bool:
    """Remove one run and its restore tests; False, with a warning, where something stands in the way."""
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


def _is_gone(store: Store, plan: Plan) -> bool:
    """Whether another command finishes the removal; one that is at it gets some time."""
    give_up = time.monotonic() + OTHER_WITHIN
    while time.monotonic() < give_up:
        try:
            if store.attempts(store.run(plan.run.name).name)[0].nonce != plan.first.nonce:
                return True  # the name is another run's by now
        except NotFound:
            return True
        time.sleep(0.1)
    return False


def _removed_meanwhile(store: Store, name: str) -> OrchError:
    """What to say of a run whose files went away while they were counted."""
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


def remove(store: Store, plan: Plan) -> None:
    """Remove one run; repeated after a kill it goes on. Raises OSError, Precondition."""
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


def _say(screen: Screen, plans: list[Plan], done: list[str], dry_run: bool) -> None:
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


def _lines(plan: Plan) -> list[str]:
    """What would go, and what would stay."""
    lines = [f"{plan.run.name}  {plan.run.state}  {plan.run.reason}".rstrip()]
    if plan.folder is not None:
        lines.append(f"  folder  {plan.folder} ({size(plan.bytes)})")
    lines += [f"  copies  {item.place}: {len(item.names)} ({size(item.bytes)})" for item in plan.copies]
    lines += [f"  test    {test.run.name} ({size(test.all_bytes)})" for test in plan.tests]
    return [*lines, *(f"  stays   {words}" for words in plan.left)]


def _as_json(plan: Plan, removed: bool) -> dict[str, Any]:
    copies = [{"tier": item.place, "checkpoints": list(item.names), "bytes": item.bytes} for item in plan.copies]
    return {
        "run": plan.run.name, "state": str(plan.run.state), "removed": removed, "folder": plan.run.run_dir,
        "bytes": plan.all_bytes, "copies": copies, "restore_tests": [test.run.name for test in plan.tests],
        "left": list(plan.left),
    }  # fmt: skip
