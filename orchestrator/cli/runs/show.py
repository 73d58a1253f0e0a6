"""`orch show`: one run in full."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from checkpointing.config import MEMORY
from checkpointing.storage.durable import dump_line
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.access.run_folder import has_moved, warn_of_missing
from orchestrator.cli.runs.config_changes import config_changes, describe_code, short_digests
from orchestrator.cli.runs.node_setup import read_node_setup
from orchestrator.cli.runs.priority import priority_words
from orchestrator.cli.runs.show_tables import (
    compared_table,
    describe_own_test,
    find_proven_checkpoint,
    incident_tables,
    incidents_json,
    restore_tests_json,
    say_restore_tests,
)
from orchestrator.cli.runs.status import (
    describe_start,
    say_last_lines,
    warn_of_bad_tests,
    warn_of_undelivered,
    warn_without_controller,
)
from orchestrator.cli.runs.training_figures import describe_figures, figures_of_run
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Column, Screen, count, decimal, host_list, iso, progress, size, span
from orchestrator.recovery.elastic_policy import size_words
from orchestrator.recovery.retry_policy import drill_words
from orchestrator.registry.records import (
    Attempt,
    Checkpoint,
    CheckpointCopy,
    Generation,
    Notice,
    RestoreTest,
    Run,
    Transition,
)
from orchestrator.run_view import RunView, find_run
from trainer.protocol.run_dir import RunDir

SHOW_JSON = """
as status, with {config_digest, config_changes: [{attempt, key, before, now}], code, env, data, run_dir, priority,
created_at, transitions, is_restore_test, attempts: [{attempt, state, job_id, sluid, restarts, nodes, excluded,
started_at, ended_at, resumed_from, last_step, generations, generation_list, config_digest, smaller_world: {nodes,
spare_nodes, of, of_spare_nodes, reason, base} | null, failure: {kind, reason, rank, node, evidence} | null, decision:
{action, reason} | null}], checkpoints: [{step, trust, bytes, path, attempt, seconds, stall, tier, copies: [{tier,
path, bytes, copied_at}], pin, pinned}], incidents: [{time, attempt, generation, name, kind, rank, node, phase, step,
reason, waiting, detected, withdrawn, observed, evidence, evidence_there, done}], stragglers: [{..., rank, node,
section, ratio, step, steps, gpu_hours, over}], skipped: [{..., step, position, reason}], restart_differs: [{..., step,
restored, reason}], incomplete: [{..., step, reason}], code_recorded: [{..., digest}], code_changes: [{..., digest,
reason, accepted}], spares: [{..., name, instead, reason}], unfit: [{..., node, reason}], unreadable: [{..., unread,
reason}], restore_tests (as restore-tests history), proven: {step, checkpoint, layouts, ended_at} | null, figures:
{steps, tokens_per_s_per_rank, tflops_per_rank, mfu, shares, exposed, memory} | null, setup: {staged, variables, cores:
{rank: cores}, binding, network: {network, devices, gpudirect, version} | null, watched: {instrumented, frameworks,
reason} | null}, notified: {state, delivered, failed, tries, at, next_at} | null}; seconds is how long a save took,
stall how long training waited for it; tier is empty for the run's own folder; a generation's tier is memory after a
restart in place; unreadable lists events that are damaged or from another version; proven is the newest checkpoint
that still exists and was restored
"""


@click.command(cls=Verb, json_data=SHOW_JSON)
@click.argument("run")
@click.option("--history", is_flag=True, help="Print every change of state with its reason (same as -v).")
@click.pass_obj
def show(screen: Screen, run: str, history: bool) -> None:
    """Show one run in full: attempts, decisions, incidents, checkpoints, their restore tests, code, data.

    FROM is the step at which an attempt began, or from which a generation resumed. Narrow terminals omit START and
    END; `orch events RUN` has the times. Speed, MFU and the shares of a step's time are medians over the newest
    steps, at most 100; the other figures are from the newest step that has them (docs/watching.md).
    """
    with open_store(readonly=True) as store:
        found = store.run(run)
        attempts, generations = store.attempts(found.name), store.generations(found.name)
        checkpoints, transitions = store.checkpoints(found.name), store.transitions(found.name)
        copies, notices = store.copies(found.name), store.notices(found.name)
        changes = config_changes(store, found, attempts)
        tests, own_test = store.restore_tests(found.name), store.restore_test(found.name)
    proven = find_proven_checkpoint(tests, checkpoints, copies)
    kept = _existing_checkpoints(checkpoints, copies, _pins(found))
    incidents = incidents_json(found, notices, generations)
    view = find_run(found.name)
    warn_without_controller(screen, [view])
    warn_of_missing(screen, found.name, found.run_dir)
    warn_of_bad_tests(screen, [view])
    warn_of_undelivered(screen, [view])
    if screen.json:
        document = _document(found, view, attempts, generations, kept, transitions)
        own = {**restore_tests_json(tests, proven, own_test), "notified": _notified_json(view)}
        screen.data("show", {**document, **incidents, "config_changes": changes, **own})
        return
    _head(screen, found, view, own_test, notices)
    for change in changes:
        before, now = dump_line(change["before"]), dump_line(change["now"])
        screen.say(f"changed  from attempt {change['attempt']} on: {change['key']} {before} -> {now}", hang=9)
    for words in filter(None, (size_words(attempt.number, attempt.smaller_world) for attempt in attempts)):
        screen.say(f"size     {words}", hang=9)
    if own_test is not None:
        compared_table(screen, own_test)
    screen.say("")
    attempt_table(screen, attempts, generations, known=found.reason)
    say_last_lines(screen, view)
    incident_tables(screen, incidents)
    screen.say("" if kept else "\nno checkpoint")
    screen.table(CHECKPOINTS, kept, aligned=True)
    if tests or (checkpoints and own_test is None):
        say_restore_tests(screen, found.name, tests, proven)
    if history or screen.verbose:
        screen.say("")
        for move in transitions:
            subject = f"{move.kind} {move.subject}".strip()
            screen.say(f"{screen.when(move.time)}  {subject}: {move.before or 'new'} -> {move.after}  {move.reason}")
    _say_next(screen, view)


def _pick(record: object, *names: str) -> dict[str, Any]:
    """Return attributes of a record as plain JSON data; names that end in `_at` are times."""
    found = {name: getattr(record, name) for name in names}
    return {name: iso(value) if name.endswith("_at") else value for name, value in found.items()}


def _document(
    run: Run, view: RunView, attempts: Sequence[Attempt], generations: Sequence[Generation],
    kept: Sequence[dict[str, Any]], transitions: Sequence[Transition],
) -> dict[str, Any]:  # fmt: skip
    """Return the stable keys of `orch show --json`, followed by the others."""
    moves = ("kind", "subject", "before", "after", "reason")
    return {
        **view.to_json(),
        "config_digest": run.config_digest,
        **{key: run.identity.get(key) for key in ("code", "env")},
        "attempts": [attempt_json(attempt, generations) for attempt in attempts],
        "checkpoints": kept,
        **{key: run.identity.get(key) for key in ("data", "imported")},
        "run_dir": run.run_dir,
        "priority": run.identity.get("priority", 0),
        "figures": asdict(figures) if (figures := figures_of_run(RunDir(Path(run.run_dir)))) else None,
        "setup": read_node_setup(RunDir(Path(run.run_dir))).to_json(),
        "created_at": iso(run.created_at),
        "transitions": [{**_pick(move, *moves), "time": iso(move.time)} for move in transitions],
    }


def attempt_json(attempt: Attempt, generations: Sequence[Generation]) -> dict[str, Any]:
    """Return an attempt as plain JSON data."""
    names = (
        "state",
        "job_id",
        "sluid",
        "restarts",
        "nodes",
        "excluded",
        "started_at",
        "ended_at",
        "resumed_from",
        "last_step",
    )
    return {
        "attempt": attempt.number,
        **_pick(attempt, *names, "generations"),
        "failure": _failure_json(attempt.failure),
        **_pick(attempt, "decision", "reason", "job_state", "config_digest", "smaller_world"),
        "slurm_cluster": None if attempt.scheduler.startswith("local@") else attempt.scheduler or None,
        "generation_list": [
            {
                "generation": item.number,
                **_pick(item, "started_at", "ended_at", "resumed_from", "tier", "last_step", "reason"),
                "failure": _failure_json(item.failure),
            }
            for item in generations
            if item.attempt == attempt.number
        ],
    }


def _failure_json(failure: dict[str, Any] | None) -> dict[str, Any] | None:
    keys = ("kind", "reason", "rank", "node", "evidence")
    return None if failure is None else {**{key: failure.get(key) for key in keys}, **failure}


def _notified_json(view: RunView) -> dict[str, Any] | None:
    """Return the newest message of a run; None if none was sent."""
    newest = view.notified.get("newest")
    if not newest:
        return None
    kept = {key: newest[key] for key in ("state", "delivered", "failed", "tries")}
    return {**kept, "at": iso(newest["at"]), "next_at": iso(newest["next_at"] or None)}


def _pins(run: Run) -> dict[str, str]:
    """Return the notes of pinned checkpoints, keyed by name; empty while the run's folder is not visible."""
    from checkpointing.retention.garbage import read_pins
    from checkpointing.storage.backends import LocalStorage
    from orchestrator.run_dirs.reader_pins import remove_dead_readers

    storage = LocalStorage(RunDir(Path(run.run_dir)).checkpoints)
    remove_dead_readers(storage)
    try:
        return {name: pin.note for name, pin in read_pins(storage).items()}
    except OSError:
        return {}


def _existing_checkpoints(
    checkpoints: Sequence[Checkpoint], copies: Sequence[CheckpointCopy], pins: Mapping[str, str]
) -> list[dict[str, Any]]:
    """Return the checkpoints that still exist, even if only as copies."""
    places: dict[str, list[dict[str, Any]]] = {}
    for copy in copies:
        places.setdefault(copy.name, []).append(_pick(copy, "tier", "path", "bytes", "copied_at"))
    names = ("step", "trust", "bytes", "path", "attempt", "name", "committed_at", "reason", "tier", "seconds", "stall")
    return [
        {
            **_pick(item, *names), "copies": places.get(item.name, []), "pin": pins.get(item.name),
            "pinned": item.name in pins,
        }
        for item in checkpoints
        if item.trust != "DELETED" or item.name in places
    ]  # fmt: skip


def _head(screen: Screen, run: Run, view: RunView, own_test: RestoreTest | None, notices: Sequence[Notice]) -> None:
    identity, message = run.identity, view.notified.get("newest") or {}
    delivered = ", ".join(message.get("delivered", ()))
    lines = {
        "run": f"{run.name}  {run.state}" + (f"  {run.reason}" if run.reason else ""),
        **(describe_own_test(own_test) if own_test else {}),
        "step": f"{progress(run.step, run.total_steps, ' of ')}   loss {decimal(view.loss)}",
        **describe_figures(figures_of_run(RunDir(Path(run.run_dir)))),
        **read_node_setup(RunDir(Path(run.run_dir))).describe(),
        "starts": f"expected {start}" if (start := describe_start(screen, view)) else "",
        "after": f"{view.after}, which has been removed" if view.after_removed else view.after,
        "sweep": " ".join([run.sweep["name"], *map("=".join, run.sweep["point"].items())]) if run.sweep else "",
        "created": f"{screen.when(run.created_at)}   updated {span(view.age_s)} ago",
        "tags": ", ".join(run.tags),
        "priority": priority_words(run.identity["priority"]) if run.identity.get("priority") else "",
        "config": run.config_digest[:12],
        "code": describe_code(identity.get("code") or {}, notices),
        "env": _describe_identity(identity.get("env") or {}),
        "data": _describe_identity(identity.get("data") or {}),
        "message": f"{message['state']} sent by {delivered}" if delivered else "",
        "begins": _describe_beginning(identity.get("imported")),
        "cluster": run.scheduler or run.cluster,
        "folder": run.run_dir,
    }
    for name, text in lines.items():
        if text:
            screen.say(f"{name:<8} {text}", hang=9)


def _describe_beginning(imported: Any) -> str:
    """Describe the checkpoint or weights that a run began with; empty if it began from scratch."""
    if not isinstance(imported, dict):
        return ""
    how = "and its optimizer state" if imported.get("optimizer") else "with a fresh optimizer"
    skipped = len(imported.get("skipped", ()))
    left_out = f"; skips {skipped} of its batches, as that run does" if skipped else ""
    return f"at step {imported.get('step')} from {imported.get('source')} {how}{left_out}"


def _describe_identity(fields: Any) -> str:
    """Return an identity's one-line values. Packages, variables and diffs are only in --json."""
    if not isinstance(fields, dict):
        return short_digests(fields)
    short = {key: value for key, value in fields.items() if value is not None and not isinstance(value, (dict, list))}
    return "  ".join(f"{key} {short_digests(value)}" for key, value in short.items() if "\n" not in str(value))


def attempt_table(
    screen: Screen, attempts: Sequence[Attempt], generations: Sequence[Generation], known: str = ""
) -> None:  # fmt: skip
    """Print every attempt, followed by its generations.

    A reason is omitted if the attempt's row already shows it. The newest attempt's reasons are also omitted if they
    are in `known`, which the command has already printed.
    """
    rows = []
    for attempt in attempts:
        above = known if attempt is attempts[-1] else ""
        row = _attempt_row(screen, attempt, above)
        above = f"{above}\n{row['failure']}"
        decision = attempt.decision or {}
        why = decision.get("reason", "")
        row["decision"] = f"{decision['action']}: {why}" if why not in above else decision.get("action", "")
        mine = [_generation_row(screen, item, attempt) for item in generations if item.attempt == attempt.number]
        rows += [row, *(one | {"failure": ""} if one["failure"] in above else one for one in mine)]
    screen.table(ATTEMPTS, rows, aligned=True)


ATTEMPTS = [
    Column("ATT.GEN", "number"),
    Column("STATE", "state"),
    Column("JOB", "job_id", drop_order=2),
    Column("NODES", "nodes", lambda names: host_list(names or ()) or "-", drop_order=3),
    Column("FROM", "resumed_from", count, right=True),
    Column("TO", "last_step", count, right=True),
    Column("START", "start", drop_order=5),
    Column("END", "end", drop_order=4),
    Column("TOOK", "took", span, right=True, drop_order=1),
    Column("ENDED BY", "failure", wraps=True),
    Column("DECISION", "decision", wraps=True),
]


def _attempt_row(screen: Screen, attempt: Attempt, known: str) -> dict[str, Any]:
    failure = attempt.failure or {}
    why = f"{failure['reason']}{drill_words(failure)}" if failure else ""
    return {
        **_pick(attempt, "number", "state", "job_id", "nodes", "resumed_from", "last_step"),
        **_times(screen, attempt.started_at, attempt.ended_at),
        "failure": f"{failure['kind']}{'' if why in known else f': {why}'}" if failure else attempt.reason,
    }


def _generation_row(screen: Screen, item: Generation, attempt: Attempt) -> dict[str, Any]:
    # A killed job may exit before it reports that its ranks have exited.
    unreported = item.ended_at is None and attempt.ended_at is not None
    failure = f"{item.failure['reason']}{drill_words(item.failure)}" if item.failure else ""
    return {
        "number": f"{item.attempt}.{item.number}", "state": "", "job_id": "", "nodes": (),
        **_pick(item, "resumed_from", "last_step"),
        **_times(screen, item.started_at, attempt.ended_at if unreported else item.ended_at),
        "failure": failure or ("with its attempt" if unreported else item.reason),
        "decision": "resumed from memory" if item.tier == MEMORY else "",
    }  # fmt: skip


def _times(screen: Screen, start: float | None, end: float | None) -> dict[str, Any]:
    """Return the table cells for a period, without the year, which `orch events` and --json include."""
    took = None if start is None else (end if end is not None else time.time()) - start
    short = {"start": start, "end": end}
    return {"took": took, **{key: "" if at is None else screen.when(at)[5:] for key, at in short.items()}}


CHECKPOINTS = [
    Column("CHECKPOINT", "step", count, right=True),
    Column("TRUST", "trust"),
    Column("SIZE", "bytes", size, right=True),
    Column("TOOK", "seconds", span, right=True, drop_order=1),
    Column("STALL", "stall", lambda s: "-" if s is None else f"{1000 * s:.0f} ms", right=True, drop_order=1),
    Column("ATT", "attempt", right=True),
    Column("FOLDER", "path", lambda path: Path(path).name),
    Column("PIN", "pin", lambda note: "" if note is None else note or "pinned", wraps=True),
    Column("ALSO IN", "copies", lambda copies: ", ".join(copy["tier"] for copy in copies), wraps=True),
    Column("WHY", "reason"),
]


def _say_next(screen: Screen, view: RunView) -> None:
    more = "" if has_moved(view) else view.continue_command
    if more and view.state in ("HELD", "FAILED"):
        label = "again: " if view.test_of else "go on: "
        screen.note(f"\nwhy:      {view.look_closer[-1]}\n{label}   {more}")
        return
    follow = " -f" if view.is_live else ""
    screen.note(f"\nevents:   orch events {view.run}{follow}" + (f"\ngo on:    {more}" if more else ""))
