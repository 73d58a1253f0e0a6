"""`orch ckpt ls`, `pin` and `unpin`."""

import os
import time
from pathlib import Path
from typing import Any

import click

from checkpointing.format.commit import parse_name
from checkpointing.retention import garbage
from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.storage_errors import error_words
from checkpointing.verification.verdicts import RESTORE_TESTED, read_verdicts
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.access.run_folder import existing_folder, warn_of_missing
from orchestrator.cli.checkpoints.target import Target, find, is_location, known_run, locate_target, split_target
from orchestrator.cli.checkpoints.tiers import Tier, best_checkpoints, own_checkpoints, read_config, visible_tiers
from orchestrator.cli.restore_tests import by_checkpoint, layouts_in_words
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Column, Screen, count, decimal, iso, size, span
from orchestrator.errors import ConfigError, NotFound
from orchestrator.registry.records import RestoreTest
from orchestrator.run_dirs.inheritable_checkpoints import OwnCheckpoints
from orchestrator.run_dirs.reader_pins import remove_dead_readers
from orchestrator.states import Trust
from trainer.protocol.run_dir import RunDir

Row = dict[str, Any]


@click.command("pin", cls=Verb)
@click.argument("target", metavar="RUN[@STEP]")
@click.option("--note", default="", help="Reason, shown by `orch ckpt ls`.")
@click.pass_obj
def pin(screen: Screen, target: str, note: str) -> None:
    """Keep a checkpoint on every tier regardless of retention, until `orch ckpt unpin`.

    Commands and restore tests that read a checkpoint remove only their own pins.
    """
    copies = find(target, screen.warn)
    found, note = copies[0], " ".join(note.split())
    garbage.pin(_pins(found, target), found.name, note, time.time())
    # Retention may have deleted it before the pin was written.
    if not any(copy.is_there for copy in copies if copy.name == found.name):
        garbage.remove_pin(_pins(found, target), found.name, "")
        raise NotFound(f"{found.name} has just been deleted", where=found.path, hint="pin a newer checkpoint")
    answer = {"name": found.name, "path": found.path, "pinned": True, "note": note}
    screen.answer("ckpt.pin", answer, f"{found.name}: pinned{f' ({note})' if note else ''}")


@click.command("unpin", cls=Verb)
@click.argument("target", metavar="RUN@STEP")
@click.pass_obj
def unpin(screen: Screen, target: str) -> None:
    """Make a checkpoint subject to retention again.

    It removes every pin, including pins on deleted checkpoints and those left by commands that were killed on another
    host. The exit code is 3 if the checkpoint is not pinned.
    """
    storage, names = _find_pins(target)
    if not names:
        hint = f"`orch ckpt ls {target.rpartition('@')[0] or 'RUN'}` shows the pinned checkpoints"
        raise NotFound(f"{target} is not pinned", hint=hint)
    for name in names:
        garbage.unpin(storage, name)
    answer = [{"name": name, "pinned": False} for name in names]
    screen.answer("ckpt.unpin", answer, "\n".join(f"{name}: no longer pinned" for name in names))


def _pins(target: Target, words: str) -> LocalStorage:
    if target.pins is None:
        raise ConfigError("only a checkpoint of a run can be pinned", where=words, hint="write RUN@STEP")
    return target.pins


def _find_pins(words: str) -> tuple[LocalStorage, list[str]]:
    """Return the storage and the names of the matching pins, including pins of deleted checkpoints."""
    if is_location(words):
        target = locate_target(words)
        storage, step = _pins(target, words), target.name
    else:
        name, step = split_target(words)
        if not step:
            raise ConfigError("no checkpoint is given", where=words, hint="write RUN@STEP")
        known = known_run(name)
        storage = LocalStorage(existing_folder(known.name, known.run_dir).checkpoints)
        remove_dead_readers(storage)
    pinned = {name: parts for name in garbage.pinned_names(storage) if (parts := parse_name(name))}
    return storage, sorted(name for name, parts in pinned.items() if step in (name, str(parts.step)))


_NOT_RESUMED = (Trust.CORRUPT, Trust.SUSPECT, Trust.DELETED, Trust.WRITING)
_NAMED = 5
"""Maximum number of lost checkpoints named in a warning."""


LS_JSON = """
list of {step, trust, bytes, path, attempt, name, committed_at, reason, tiers, verified: [{tier, ok, level, at,
reason}], pin, pinned, restore_tests: [{test, layout, verdict, reason, begun_at, ended_at}], best, metric: {name:
number} | null}
"""


@click.command("ls", cls=Verb, json_data=LS_JSON)
@click.argument("run")
@click.option("-a", "--all", "everything", is_flag=True, help="List deleted checkpoints too.")
@click.pass_obj
def ls(screen: Screen, run: str, everything: bool) -> None:
    """List the checkpoints of a run, newest first, with the trust level of each.

    TRUST is WRITING, COMMITTED, VERIFIED, RESTORED (a run has resumed from it, or a restore test has restored it),
    SUSPECT, CORRUPT or DELETED. BEST is the number that `checkpoint.best` compares, and VERIFIED is the result of `orch
    ckpt verify`. TESTED names the layouts on which a restore test has restored the checkpoint. A checkpoint that was
    removed from every tier by hand is listed as `gone`, with a warning.
    """
    found = known_run(run)
    with open_store(readonly=True) as store:
        rows = {row.name: _row(row, row.trust, row.path, row.reason) for row in store.checkpoints(found.name)}
        tests = by_checkpoint(store.restore_tests(found.name))
        own = own_checkpoints(store, found)
    place = RunDir(Path(found.run_dir))
    warn_of_missing(screen, found.name, found.run_dir)
    tiers, config = visible_tiers(place), read_config(place)
    is_command = config is not None and bool(config.command)
    for row in rows.values() if is_command else ():
        row["tiers"] += [os.path.dirname(row["path"])] if os.path.lexists(row["path"]) else []
    on_nodes = config is not None and any(not tier.shared for tier in config.checkpoint.tiers)
    # Without the folder, its contents are unknown; the warning above says so.
    if _add_places(screen, rows, tiers, place, own) and Path(found.run_dir).is_dir() and not on_nodes:
        _mark_gone(screen, found.name, rows, is_command=is_command)
    _add_verdicts(rows, tiers)
    remove_dead_readers(tiers[0].storage)
    pins = garbage.read_pins(tiers[0].storage)
    bad = [name for name, row in rows.items() if row["trust"] in (Trust.CORRUPT, Trust.SUSPECT)]
    best = best_checkpoints(place, tiers, own, bad)
    for name, row in rows.items():
        row["pin"] = pins[name].note if name in pins else None
        row["pinned"] = name in pins
        row["restore_tests"] = [_test_json(test) for test in tests.get(name, ())]
        row["best"] = name in best.names
        row["metric"] = {best.metric: best.numbers[name]} if name in best.numbers else None
        row["_tested"] = layouts_in_words(tests.get(name, ()))
    kept = [row for row in rows.values() if everything or row["trust"] != Trust.DELETED]
    kept.sort(key=lambda row: (row["step"], row["attempt"], row["name"]), reverse=True)
    why = (
        "is a restore test, and saves nothing"
        if "restore_test" in found.identity
        else "has no checkpoint that orch has seen"
    )
    screen.listing("ckpt.ls", _columns(screen.terminal), list(map(_cells, kept)), empty=f"{found.name} {why}")


def _row(found: Any, trust: str, path: str, reason: str) -> Row:
    return {
        "step": found.step, "trust": str(trust), "bytes": found.bytes, "path": path, "attempt": found.attempt,
        "name": found.name, "committed_at": iso(found.committed_at), "reason": reason, "tiers": [], "verified": [],
        "_age": time.time() - found.committed_at,
    }  # fmt: skip


def _add_places(screen: Screen, rows: dict[str, Row], tiers: list[Tier], place: RunDir, own: OwnCheckpoints) -> bool:
    """Add the tiers of each checkpoint, and a row for each checkpoint on disk that is not in the registry yet.

    Returns whether every tier could be read. Checkpoints of another run with this name are only counted.
    """
    answered = True
    for tier in tiers:
        try:
            entries, others = tier.own_and_others(place, own)
        except OSError as error:
            screen.warn("TierUnreadable", f"tier {tier.label} cannot be read: {error_words(error)}")
            answered = False
            continue
        for entry in entries:
            path = f"{tier.catalog.place}/{entry.name}"
            fresh = _row(entry, Trust.COMMITTED, path, "not yet in the registry")
            rows.setdefault(entry.name, fresh)["tiers"].append(tier.label)
        if others:
            screen.note(f"{tier.label}: checkpoints of another run named {place.name} are left out ({len(others)})")
    return answered


def _mark_gone(screen: Screen, run: str, rows: dict[str, Row], *, is_command: bool) -> None:
    """Mark the checkpoints that no tier has although orch did not delete them."""
    gone = [row for row in rows.values() if not row["tiers"] and row["trust"] != Trust.DELETED]
    for row in gone:
        what = f"gone: there is no {row['path']}" if is_command else "gone: no tier has it"
        row["reason"] = f"{what}{'; ' if row['reason'] else ''}{row['reason']}"
    if gone:
        steps = ", ".join(map(str, sorted(row["step"] for row in gone)[:_NAMED]))
        more = f" and {len(gone) - _NAMED} more" if len(gone) > _NAMED else ""
        who = "the command's folder no longer has" if is_command else "no tier still has"
        words = f"{who} these checkpoints of {run}: {steps}{more}"
        screen.warn("checkpoints_gone", words if is_command else f"{words}; {_describe_resume(rows, gone)}")


def _describe_resume(rows: dict[str, Row], gone: list[Row]) -> str:
    """Describe the checkpoint that a resume would load. Not for a `command:` run, whose program chooses it."""
    left = [row["step"] for row in rows.values() if row["tiers"] and row["trust"] not in _NOT_RESUMED]
    if left:
        return f"a resume goes back to step {max(left)}"
    if any(row["tiers"] and row["trust"] != Trust.DELETED for row in rows.values()):
        return "a resume tries the remaining ones, which may be damaged"
    if all(row["trust"] in _NOT_RESUMED for row in gone):
        return "none is left: a resume begins at step 0"
    return "none is left: a resume fails as `storage` until one of them is put back"


def _add_verdicts(rows: dict[str, Row], tiers: list[Tier]) -> None:
    labels = {tier.catalog.place: tier.label for tier in tiers}
    for verdict in sorted(read_verdicts(tiers[0].storage), key=lambda verdict: verdict.at):
        row, tier = rows.get(verdict.name), labels.get(verdict.place)
        if row is not None and tier in row["tiers"]:
            result = {"tier": tier, "ok": verdict.ok, "level": verdict.level, "at": iso(verdict.at)}
            row["verified"].append({**result, "reason": verdict.reason})


def _test_json(test: RestoreTest) -> Row:
    return {
        "test": test.test, "layout": test.layout, "verdict": test.verdict or None, "reason": test.reason,
        "begun_at": iso(test.begun_at), "ended_at": iso(test.ended_at),
    }  # fmt: skip


def _cells(row: Row) -> Row:
    metric = " ".join(f"{name} {decimal(value)}" for name, value in (row["metric"] or {}).items())
    bad = ", ".join(f"INVALID on {found['tier']}" for found in row["verified"] if not found["ok"])
    levels = [found["level"] for found in row["verified"] if found["ok"]]
    good = "" if not levels else "restored" if levels[-1] == RESTORE_TESTED else f"level {levels[-1]}"
    pin = (row["pin"] or "pinned") if row["pinned"] else ""
    return {**row, "_best": f"{metric} best" if row["best"] else metric, "_pin": pin, "_verified": bad or good}


def _columns(terminal: bool) -> list[Column]:
    return [
        Column("STEP", "step", count, right=True),
        Column("AGE", "_age", span) if terminal else Column("COMMITTED_AT", "committed_at"),
        Column("SIZE", "bytes", size, right=True),
        Column("TRUST", "trust"),
        Column("ATT", "attempt", right=True, drop_order=1),
        Column("TIERS", "tiers", drop_order=2),
        Column("NAME", "name", drop_order=3),
        Column("BEST", "_best"),
        Column("PIN", "_pin", wraps=True),
        Column("VERIFIED", "_verified", wraps=True),
        Column("TESTED", "_tested", wraps=True),
        Column("WHY", "reason"),
    ]
