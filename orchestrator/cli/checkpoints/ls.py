"""`orch ckpt ls`, `pin` and `unpin`."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from checkpointing.storage.storage_errors import error_words
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.access.run_folder import existing_folder, warn_of_missing
from orchestrator.cli.checkpoints.target import Target, best_checkpoints, find, is_location, known_run, locate_target
from orchestrator.cli.checkpoints.tested_layouts import BY_A_TEST, by_checkpoint, layouts_in_words, reason_beside_tests
from orchestrator.cli.checkpoints.tiers import (
    Tier,
    is_command,
    keeps_on_nodes,
    own_and_others,
    own_checkpoints,
    visible_tiers,
)
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Column, Screen, count, decimal, iso, size, span
from orchestrator.errors import ConfigError, NotFound
from orchestrator.registry.records import RestoreTest
from trainer.protocol.run_dir import RunDir

if TYPE_CHECKING:
    from checkpointing.storage.backends import Storage
    from orchestrator.run_dirs.inheritable_checkpoints import OwnCheckpoints


@click.command("pin", cls=Verb)
@click.argument("target", metavar="RUN[@STEP]")
@click.option("--note", default="", help="Why you keep it; `orch ckpt ls` shows it.")
@click.pass_obj
def pin(screen: Screen, target: str, note: str) -> None:
    """Keep a checkpoint on every tier regardless of retention, until `orch ckpt unpin`.

    Commands and restore tests that read a checkpoint remove only their own pins.
    """
    from checkpointing.retention import garbage

    copies = find(target, screen.warn)
    found, note = copies[0], " ".join(note.split())
    garbage.pin(_pins(found, target), found.name, note, time.time())
    # Retention may have deleted it before the pin was written.
    if not any(_is_there(copy) for copy in copies if copy.name == found.name):
        garbage.remove_pin(_pins(found, target), found.name, "")
        raise NotFound(f"{found.name} was deleted at this very moment", where=found.path, hint="pin a newer one")
    screen.say(f"{found.name}: pinned{f' ({note})' if note else ''}")
    if screen.json:
        screen.data("ckpt.pin", {"name": found.name, "path": found.path, "pinned": True, "note": note})


@click.command("unpin", cls=Verb)
@click.argument("target", metavar="RUN@STEP")
@click.pass_obj
def unpin(screen: Screen, target: str) -> None:
    """Return a checkpoint to retention.

    It removes every pin, also that of a deleted checkpoint and those of commands that were killed on another host.
    The exit code is 3 if the checkpoint is not pinned.
    """
    from checkpointing.retention import garbage

    storage, names = _find_pins(target)
    if not names:
        raise NotFound(
            f"{target} is not pinned", hint=f"`orch ckpt ls {target.rpartition('@')[0] or 'RUN'}` shows what is"
        )
    for name in names:
        garbage.unpin(storage, name)
        screen.say(f"{name}: no longer pinned")
    if screen.json:
        screen.data("ckpt.unpin", [{"name": name, "pinned": False} for name in names])


def _pins(target: Target, words: str) -> "Storage":
    from checkpointing.storage.backends import LocalStorage

    if target.run_dir is None:
        raise ConfigError("only a checkpoint of a run can be pinned", where=words, hint="write RUN@STEP")
    return LocalStorage(target.run_dir.checkpoints)


def _is_there(target: Target) -> bool:
    from checkpointing.tiers.catalog import Catalog

    return Catalog(target.path.rpartition("/")[0], target.storage).is_committed(target.name)


def _find_pins(words: str) -> "tuple[Storage, list[str]]":
    """Return the storage and names of the matching pins, including pins of deleted checkpoints."""
    from checkpointing.format.commit import parse_name
    from checkpointing.retention.garbage import pinned_names
    from checkpointing.storage.backends import LocalStorage
    from orchestrator.run_dirs.reader_pins import remove_dead_readers

    if is_location(words):
        target = locate_target(words)
        storage = _pins(target, words)
        return storage, [name for name in pinned_names(storage) if name == target.name]
    run, mark, step = words.rpartition("@")
    if not mark or not run:
        raise ConfigError("say which checkpoint", where=words, hint="write RUN@STEP")
    known = known_run(run)
    storage = LocalStorage(existing_folder(known.name, known.run_dir).checkpoints)
    remove_dead_readers(storage)
    parsed = {name: parts for name in pinned_names(storage) if (parts := parse_name(name))}
    return storage, sorted(name for name, parts in parsed.items() if step in (name, str(parts.step)))


_NOT_RESUMED = ("CORRUPT", "SUSPECT", "DELETED", "WRITING")
_NAMED = 5
"""Maximum number of lost checkpoints named in a warning."""


LS_JSON = """
list of {step, trust, bytes, path, attempt, name, committed_at, reason, tiers, verified: [{tier, ok, level, at,
reason}], pin, pinned, restore_tests: [{test, layout, verdict, reason, begun_at, ended_at}], best, metric: {name:
number} | null}
"""


@click.command("ls", cls=Verb, json_data=LS_JSON)
@click.argument("run")
@click.option("-a", "--all", "everything", is_flag=True, help="List deleted ones too.")
@click.pass_obj
def ls(screen: Screen, run: str, everything: bool) -> None:
    """List the checkpoints of a run, newest first, with the trust in each.

    TRUST is WRITING, COMMITTED, VERIFIED, RESTORED (a run has resumed from it, or a restore test has restored it),
    SUSPECT, CORRUPT or DELETED. BEST is the number that `checkpoint.best` compares, VERIFIED the result of `orch
    ckpt verify`. TESTED names the layouts on which a restore test has restored it. A checkpoint that was removed
    from every tier by hand is listed as `gone`, with a warning.
    """
    from checkpointing.retention.garbage import read_pins
    from orchestrator.run_dirs.reader_pins import remove_dead_readers

    now = time.time()
    found = known_run(run)
    with open_store(readonly=True) as store:
        rows = {row.name: _row(row, now) for row in store.checkpoints(found.name)}
        tests = by_checkpoint(store.restore_tests(found.name))
        own = own_checkpoints(store, found)
    place = RunDir(Path(found.run_dir))
    warn_of_missing(screen, found.name, found.run_dir)
    tiers = visible_tiers(place)
    visible = Path(found.run_dir).is_dir()  # if not, the warning above covers it, and the folder's content is unknown
    of_command = is_command(place)
    if of_command:
        _add_own_places(rows)
    if _add_places(screen, rows, place, own) and visible and not keeps_on_nodes(place):
        _mark_gone(screen, found.name, rows, of_command=of_command)
    _add_verdicts(rows, tiers)
    remove_dead_readers(tiers[0].storage)
    pins = read_pins(tiers[0].storage)
    bad = [name for name, row in rows.items() if row["trust"] in ("CORRUPT", "SUSPECT")]
    best = best_checkpoints(place, tiers, own, bad)
    for name, row in rows.items():
        row["pin"] = pins[name].note if name in pins else None
        row["pinned"] = name in pins
        row["restore_tests"] = [_test_json(test) for test in tests.get(name, ())]
        row["best"] = name in best.names
        row["metric"] = {best.metric: best.numbers[name]} if name in best.numbers else None
        row["tested"] = layouts_in_words(tests.get(name, ()))
    kept = [row for row in rows.values() if everything or row["trust"] != "DELETED"]
    _show(screen, sorted(kept, key=lambda row: (row["step"], row["attempt"], row["name"]), reverse=True))
    if not kept and not screen.json:
        is_test = "restore_test" in found.identity
        screen.note(f"{found.name} {'is a restore test, and saves nothing' if is_test else 'has no checkpoint yet'}")


def _row(row: Any, now: float) -> dict[str, Any]:
    return {
        "step": row.step, "trust": str(row.trust), "bytes": row.bytes, "path": row.path, "attempt": row.attempt,
        "name": row.name, "committed_at": iso(row.committed_at), "reason": row.reason, "tiers": [], "verified": [],
        "age": now - row.committed_at,
    }  # fmt: skip


def _add_places(screen: Screen, rows: dict[str, dict[str, Any]], place: RunDir, own: "OwnCheckpoints") -> bool:
    """Add the tiers of each checkpoint, and a row for each one on disk that is not in the registry yet.

    Returns whether every tier could be read. Checkpoints of another run of this name are only counted.
    """
    now, answered = time.time(), True
    for tier in visible_tiers(place):
        try:
            entries, others = own_and_others(tier, place, own)
        except OSError as error:
            screen.warn("TierUnreadable", f"tier {tier.label} cannot be read: {error_words(error)}")
            answered = False
            continue
        for entry in entries:
            fresh = {
                "step": entry.step, "trust": "COMMITTED", "bytes": entry.bytes,
                "path": f"{tier.catalog.place}/{entry.name}", "attempt": entry.attempt, "name": entry.name,
                "committed_at": iso(entry.committed_at), "reason": "not yet in the registry", "tiers": [],
                "verified": [], "age": now - entry.committed_at,
            }  # fmt: skip
            rows.setdefault(entry.name, fresh)["tiers"].append(tier.label)
        if others:
            screen.note(f"{tier.label}: left out, {len(others)} of another run with the name {place.name}")
    return answered


def _add_own_places(rows: dict[str, dict[str, Any]]) -> None:
    """Add the place of each checkpoint of a `command:`: its path in the registry."""
    for row in rows.values():
        if os.path.lexists(row["path"]):
            row["tiers"].append(os.path.dirname(row["path"]))


def _mark_gone(screen: Screen, run: str, rows: dict[str, dict[str, Any]], *, of_command: bool) -> None:
    """Mark checkpoints as gone that no tier has and that orch did not delete."""
    gone = [row for row in rows.values() if not row["tiers"] and row["trust"] != "DELETED"]
    for row in gone:
        what = f"gone: there is no {row['path']}" if of_command else "gone: no tier has it"
        row["reason"] = f"{what}{'; ' if row['reason'] else ''}{row['reason']}"
    if gone:
        steps = ", ".join(str(row["step"]) for row in sorted(gone, key=lambda row: row["step"])[:_NAMED])
        more = f" and {len(gone) - _NAMED} more" if len(gone) > _NAMED else ""
        who = "the folder of the command does not have" if of_command else "no tier has"
        words = f"{who} these checkpoints of {run} any more: {steps}{more}"
        screen.warn("checkpoints_gone", words if of_command else f"{words}; {_describe_resume(rows, gone)}")


def _describe_resume(rows: dict[str, dict[str, Any]], gone: list[dict[str, Any]]) -> str:
    """Describe the checkpoint that a resume loads. Not for a `command:`, whose program chooses it."""
    left = [row["step"] for row in rows.values() if row["tiers"] and row["trust"] not in _NOT_RESUMED]
    if left:
        return f"a resume goes back to step {max(left)}"
    if any(row["tiers"] and row["trust"] != "DELETED" for row in rows.values()):
        return "a resume tries the remaining ones, which may be damaged"
    if all(row["trust"] in _NOT_RESUMED for row in gone):
        return "none is left: a resume begins at step 0"
    return "none is left: a resume fails as `storage` until one of them is put back"


def _add_verdicts(rows: dict[str, dict[str, Any]], tiers: list[Tier]) -> None:
    """Add the results of `orch ckpt verify` for existing copies."""
    from checkpointing.verification.verdicts import read_verdicts

    labels = {tier.catalog.place: tier.label for tier in tiers}
    for verdict in sorted(read_verdicts(tiers[0].storage), key=lambda verdict: verdict.at):
        row, tier = rows.get(verdict.name), labels.get(verdict.place)
        if row is not None and tier in row["tiers"]:
            told = {"tier": tier, "ok": verdict.ok, "level": verdict.level, "at": iso(verdict.at)}
            row["verified"].append({**told, "reason": verdict.reason})


def _test_json(test: RestoreTest) -> dict[str, Any]:
    return {
        "test": test.test, "layout": test.layout, "verdict": test.verdict or None, "reason": test.reason,
        "begun_at": iso(test.begun_at), "ended_at": iso(test.ended_at),
    }  # fmt: skip


def _best(row: dict[str, Any]) -> str:
    """Return the metric in words, such as `val_loss 2.2500 best`."""
    numbers = " ".join(f"{name} {decimal(value)}" for name, value in (row["metric"] or {}).items())
    return f"{numbers} best" if row["best"] else numbers


def _summarize_verifications(row: dict[str, Any]) -> str:
    """Return the bad copies, or else the newest verification."""
    from checkpointing.verification.verdicts import RESTORE_TESTED

    bad = [f"INVALID on {found['tier']}" for found in row["verified"] if not found["ok"]]
    levels = [found["level"] for found in row["verified"] if found["ok"]]
    good = "" if not levels else "restored" if levels[-1] == RESTORE_TESTED else f"level {levels[-1]}"
    return ", ".join(bad) or good


def _show(screen: Screen, rows: list[dict[str, Any]]) -> None:
    if screen.json:
        screen.data("ckpt.ls", [{key: row[key] for key in row if key not in ("age", "tested")} for row in rows])
        return
    columns = [
        Column("STEP", "step", count, right=True),
        Column("AGE", "age", span) if screen.terminal else Column("COMMITTED_AT", "committed_at"),
        Column("SIZE", "bytes", size, right=True),
        Column("TRUST", "trust"),
        Column("ATT", "attempt", right=True, drop_order=1),
        Column("TIERS", "tiers", drop_order=2),
        Column("NAME", "name", drop_order=3),
        Column("BEST", "best_words"),
        Column("PIN", "pin_words", wraps=True),
        Column("VERIFIED", "found", wraps=True),
        Column("TESTED", "tested", wraps=True),
        Column("WHY", "reason"),
    ]
    shown = [{**row, "pin_words": (row["pin"] or "pinned") if row["pinned"] else ""} for row in rows]
    shown = [{**row, "best_words": _best(row)} for row in shown]
    shown = [
        {**row, "found": _summarize_verifications(row)} | (_without_tests(row) if screen.terminal else {})
        for row in shown
    ]
    screen.table(columns, shown)


def _without_tests(row: dict[str, Any]) -> dict[str, Any]:
    """Return cells that do not repeat TESTED: the pin of a running test, and a reason without the test's prefix."""
    pin, reason = row["pin_words"], row["reason"]
    under_way = any(test["ended_at"] is None for test in row["restore_tests"])
    return {
        "pin_words": BY_A_TEST.strip() if under_way and pin.startswith(BY_A_TEST) else pin,
        "reason": reason_beside_tests(row["trust"], reason) if row["tested"] else reason,
    }
