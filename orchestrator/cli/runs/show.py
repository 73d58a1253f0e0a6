"""`orch show`: one run in full."""

import time
from pathlib import Path
from typing import Any

import click

from checkpointing.config import MEMORY
from checkpointing.storage.durable import dump_line
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.access.run_folder import has_moved, warn_of_missing
from orchestrator.cli.restore_tests import reason_beside_tests
from orchestrator.cli.runs.config_changes import code_words, config_changes, short_digests
from orchestrator.cli.runs.notified import notified_json, notified_words, warn_of_untold
from orchestrator.cli.runs.show_tables import (
    compared_table,
    find_proven_checkpoint,
    incident_tables,
    incidents_json,
    own_lines,
    restore_tests_json,
    say_restore_tests,
)
from orchestrator.cli.runs.status import (
    continue_command,
    look_closer,
    one_row,
    public,
    say_last_lines,
    warn_of_bad_tests,
    warn_without_controller,
)
from orchestrator.cli.runs.training_figures import figures_json, figures_of_run, figures_words
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Column, Screen, count, decimal, host_list, iso, progress, size, span
from orchestrator.home import registry_path
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
from orchestrator.states import LIVE_RUNS
from trainer.protocol.run_dir import RunDir

SHOW_JSON = """
as status, with {config_digest, config_changes: [{attempt, key, before, now}], code, env, data, run_dir, created_at,
transitions, is_restore_test, attempts: [{attempt, state, job_id, nodes, excluded, started_at, ended_at, resumed_from,
last_step, generations, generation_list, config_digest, smaller_world: {nodes, spare_nodes, of, of_spare_nodes,
reason, base} | null, failure: {kind, reason, rank, node, evidence} | null, decision: {action, reason} | null}],
checkpoints: [{step, trust, bytes, path, attempt, seconds, stall, tier, copies: [{tier, path, bytes, copied_at}], pin,
pinned}], incidents: [{time, attempt, generation, name, kind, rank, node, phase, step, reason, waiting, detected,
withdrawn, evidence, evidence_there, done}], stragglers: [{..., rank, node, section, ratio, step, steps, gpu_hours,
over}], skipped: [{..., step, position, reason}], restart_differs: [{..., step,
restored, reason}], incomplete: [{..., step, reason}], code_recorded: [{..., digest}], code_changes: [{..., digest,
reason, accepted}], spares: [{..., name, instead, reason}], unfit: [{..., node,
reason}], unreadable: [{..., unread, reason}], restore_tests (as restore-tests history), proven: {step, checkpoint,
layouts, ended_at} | null, figures: {steps, tokens_per_s_per_rank, tflops_per_rank, mfu, shares, exposed, memory} |
null, notified: {state, delivered, failed, tries, at, next_at} | null}; seconds is the time of a save, stall how long
training waited for it; tier is empty for the run's own folder; the tier of a generation is memory after a restart in
place; unreadable are damaged events or those of another version; proven is the newest checkpoint that exists and was
restored
"""


@click.command(cls=Verb, json_data=SHOW_JSON)
@click.argument("run")
@click.option("--history", is_flag=True, help="Print every change of state with its reason (as -v).")
@click.pass_obj
def show(screen: Screen, run: str, history: bool) -> None:
    """Show one run in full: attempts, decisions, incidents, checkpoints, their restore tests, code, data.

    FROM is the step that an attempt began from, or that a generation resumed from. Narrow terminals omit START and
    END; `orch events RUN` has the times. Speed, MFU, shares of a step and memory are medians of the newest steps,
    at most 100 (docs/watching.md).
    """
    with open_store(readonly=True) as store:
        found = store.run(run)
        attempts, generations = store.attempts(found.name), store.generations(found.name)
        checkpoints, transitions = store.checkpoints(found.name), store.transitions(found.name)
        copies, notices = store.copies(found.name), store.notices(found.name)
        changes = config_changes(store, found, attempts)
        tests, own_test = store.restore_tests(found.name), store.restore_test(found.name)
    proven, kept = (
        find_proven_checkpoint(tests, checkpoints, copies),
        _existing_checkpoints(checkpoints, copies, _pins(found)),
    )
    row = one_row(found.name)
    warn_without_controller(screen, [row])
    warn_of_missing(screen, found.name, found.run_dir)
    warn_of_bad_tests(screen, [row])
    warn_of_untold(screen, [row])
    if screen.json:
        document = _document(found, row, attempts, generations, kept, transitions)
        more = {**incidents_json(found, notices, generations), "config_changes": changes}
        own = {**restore_tests_json(tests, proven, own_test), "notified": notified_json(row)}
        screen.data("show", {**document, **more, **own})
        return
    _head(screen, found, row, own_test, notices)
    for change in changes:
        before, now = dump_line(change["before"]), dump_line(change["now"])
        screen.say(f"changed  from attempt {change['attempt']} on: {change['key']} {before} -> {now}", hang=9)
    for words in filter(None, (size_words(attempt.number, attempt.smaller_world) for attempt in attempts)):
        screen.say(f"size     {words}", hang=9)
    if own_test is not None:
        compared_table(screen, own_test)
    screen.say("")
    attempt_table(screen, attempts, generations, said=found.reason)
    say_last_lines(screen, found.name, attempts[-1].failure if attempts else None)
    incident_tables(screen, incidents_json(found, notices, generations))
    _checkpoint_table(screen, kept)
    if tests or (checkpoints and own_test is None):
        say_restore_tests(screen, found.name, tests, proven)
    if history or screen.verbose:
        _history(screen, transitions)
    _next(screen, row)


def _document(
    run: Run, row: dict[str, Any], attempts: list[Attempt], generations: list[Generation],
    kept: list[dict[str, Any]], transitions: list[Transition],
) -> dict[str, Any]:  # fmt: skip
    """Return the promised keys of `orch show --json`, followed by further ones."""
    identity = run.identity
    return {
        **public([row])[0],
        "config_digest": run.config_digest,
        "code": identity.get("code"),
        "env": identity.get("env"),
        "attempts": [attempt_json(attempt, generations) for attempt in attempts],
        "checkpoints": kept,
        "data": identity.get("data"),
        "imported": identity.get("imported"),
        "run_dir": run.run_dir,
        "figures": figures_json(figures_of_run(RunDir(Path(run.run_dir)))),
        "created_at": iso(run.created_at),
        "transitions": [
            {
                "kind": move.kind, "subject": move.subject, "before": move.before, "after": move.after,
                "reason": move.reason, "time": iso(move.time),
            }
            for move in transitions
        ],
    }  # fmt: skip


FAILURE_KEYS = ("kind", "reason", "rank", "node", "evidence")


def attempt_json(attempt: Attempt, generations: list[Generation]) -> dict[str, Any]:
    """Return an attempt as plain JSON data."""
    return {
        "attempt": attempt.number,
        "state": str(attempt.state),
        "job_id": attempt.job_id,
        "nodes": list(attempt.nodes),
        "excluded": list(attempt.excluded),
        "started_at": iso(attempt.started_at),
        "ended_at": iso(attempt.ended_at),
        "resumed_from": attempt.resumed_from,
        "last_step": attempt.last_step,
        "generations": attempt.generations,
        "failure": _failure(attempt.failure),
        "decision": attempt.decision,
        "reason": attempt.reason,
        "job_state": attempt.job_state,
        "config_digest": attempt.config_digest,
        "smaller_world": attempt.smaller_world,
        "slurm_cluster": None if attempt.scheduler.startswith("local@") else attempt.scheduler or None,
        "generation_list": [
            {
                "generation": item.number, "started_at": iso(item.started_at), "ended_at": iso(item.ended_at),
                "resumed_from": item.resumed_from, "tier": item.tier, "last_step": item.last_step,
                "reason": item.reason, "failure": _failure(item.failure),
            }
            for item in generations
            if item.attempt == attempt.number
        ],
    }  # fmt: skip


def _failure(failure: dict[str, Any] | None) -> dict[str, Any] | None:
    if failure is None:
        return None
    return {**{key: failure.get(key) for key in FAILURE_KEYS}, **failure}


def _pins(run: Run) -> dict[str, str]:
    """Return the notes of pinned checkpoints by name; empty while the run's folder is not visible."""
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
    checkpoints: list[Checkpoint], copies: list[CheckpointCopy], pins: dict[str, str]
) -> list[dict[str, Any]]:
    """Return the checkpoints that still exist, if only as copies."""
    places: dict[str, list[CheckpointCopy]] = {}
    for copy in copies:
        places.setdefault(copy.name, []).append(copy)
    return [
        {
            **checkpoint_json(item),
            "copies": [copy_json(copy) for copy in places.get(item.name, ())],
            "pin": pins.get(item.name),
            "pinned": item.name in pins,
        }  # fmt: skip
        for item in checkpoints
        if item.trust != "DELETED" or item.name in places
    ]


def copy_json(copy: CheckpointCopy) -> dict[str, Any]:
    """Return a copy in a further tier as plain JSON data."""
    return {"tier": copy.tier, "path": copy.path, "bytes": copy.bytes, "copied_at": iso(copy.copied_at)}


def checkpoint_json(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint as plain JSON data."""
    return {
        "step": checkpoint.step, "trust": str(checkpoint.trust), "bytes": checkpoint.bytes, "path": checkpoint.path,
        "attempt": checkpoint.attempt, "name": checkpoint.name, "committed_at": iso(checkpoint.committed_at),
        "reason": checkpoint.reason, "tier": checkpoint.tier, "seconds": checkpoint.seconds, "stall": checkpoint.stall,
    }  # fmt: skip


def _head(
    screen: Screen, run: Run, row: dict[str, Any], own_test: RestoreTest | None, notices: list[Notice]
) -> None:  # fmt: skip
    code, env = run.identity.get("code") or {}, run.identity.get("env") or {}
    lines = {
        "run": f"{run.name}  {run.state}" + (f"  {run.reason}" if run.reason else ""),
        **(own_lines(own_test) if own_test else {}),
        "step": f"{progress(run.step, run.total_steps, ' of ')}   loss {decimal(row['loss'])}",
        **figures_words(figures_of_run(RunDir(Path(run.run_dir)))),
        "created": f"{screen.when(run.created_at)}   updated {span(row['age_s'])} ago",
        "tags": ", ".join(run.tags),
        "config": run.config_digest[:12] + _compare_command(run),
        "code": code_words(code, notices),
        "env": _words(env),
        "data": _words(run.identity.get("data") or {}),
        "told": notified_words(row),
        "begins": _beginning(run.identity.get("imported")),
        "cluster": run.scheduler or run.cluster,
        "folder": run.run_dir,
    }
    for name, text in lines.items():
        if text:
            screen.say(f"{name:<8} {text}", hang=9)


def _compare_command(run: Run) -> str:
    """Return the command that compares this run with the newest earlier one of its name; empty if they are equal."""
    from orchestrator.registry import fast_queries

    slug = run.name.rpartition("-")[0]
    for row in fast_queries.newest(registry_path(), 200):
        if row["created_at"] < run.created_at and row["run"].rpartition("-")[0] == slug:
            return f"   orch config diff {row['run']} {run.name}" if row["config_digest"] != run.config_digest else ""
    return ""


def _beginning(imported: Any) -> str:
    """Describe the imported beginning of a run; empty if it began from scratch."""
    if not isinstance(imported, dict):
        return ""
    how = "and its optimizer state" if imported.get("optimizer") else "with a fresh optimizer"
    skipped = count(len(imported.get("skipped", ())))
    left_out = "" if skipped == "0" else f"; skips {skipped} of its batches, as that run does"
    return f"at step {imported.get('step')} from {imported.get('source')} {how}{left_out}"


def _words(fields: Any) -> str:
    """Return the values of an identity that fit a line; packages, variables and diffs are only in --json."""
    if not isinstance(fields, dict):
        return short_digests(fields)
    return "  ".join(f"{key} {short_digests(value)}" for key, value in fields.items() if _fits(value))


def _fits(value: Any) -> bool:
    return value is not None and not isinstance(value, (dict, list)) and "\n" not in str(value)


def attempt_table(
    screen: Screen, attempts: list[Attempt], generations: list[Generation], said: str = ""
) -> None:  # fmt: skip
    """Print every attempt, and below it its generations.

    A reason is omitted if the row of its attempt has it, or for the newest attempt, `said` (printed above).
    """
    rows = []
    for attempt in attempts:
        above = said if attempt is attempts[-1] else ""
        row = _attempt_row(attempt, above)
        known = f"{above}\n{row['failure']}"
        rows.append(row | {"decision": _decision(attempt, known)})
        mine = [_generation_row(item, attempt) for item in generations if item.attempt == attempt.number]
        rows += [one | {"failure": ""} if one["failure"] in known else one for one in mine]
    for row in rows:
        row |= {"start": _short_time(screen, row["started_at"]), "end": _short_time(screen, row["ended_at"])}
    screen.table(ATTEMPTS, rows, aligned=True)


def _short_time(screen: Screen, moment: float | None) -> str:
    """Return the time without the year, which `orch events` and --json include."""
    return screen.when(moment)[5:] if moment is not None else ""


def _decision(attempt: Attempt, said: str) -> str:
    decision = attempt.decision or {}
    why = decision.get("reason", "")
    return f"{decision['action']}: {why}" if why not in said else str(decision.get("action", ""))


ATTEMPTS = [
    Column("ATT.GEN", "number"),
    Column("STATE", "state"),
    Column("JOB", "job", drop_order=2),
    Column("NODES", "nodes", lambda names: host_list(names or ()) or "-", drop_order=3),
    Column("FROM", "resumed_from", count, right=True),
    Column("TO", "last_step", count, right=True),
    Column("START", "start", drop_order=5),
    Column("END", "end", drop_order=4),
    Column("TOOK", "took", span, right=True, drop_order=1),
    Column("ENDED BY", "failure", wraps=True),
    Column("DECISION", "decision", wraps=True),
]


def _attempt_row(attempt: Attempt, said: str) -> dict[str, Any]:
    failure = attempt.failure or {}
    why = f"{failure['reason']}{drill_words(failure)}" if failure else ""
    return {
        "number": str(attempt.number),
        "state": str(attempt.state),
        "job": attempt.job_id,
        "nodes": attempt.nodes,
        "resumed_from": attempt.resumed_from,
        "last_step": attempt.last_step,
        "started_at": attempt.started_at,
        "ended_at": attempt.ended_at,
        "took": _took(attempt.started_at, attempt.ended_at),
        "failure": f"{failure['kind']}{'' if why in said else f': {why}'}" if failure else attempt.reason,
    }


def _generation_row(item: Generation, attempt: Attempt) -> dict[str, Any]:
    # A killed job may end before it reports the end of its ranks.
    unreported = item.ended_at is None and attempt.ended_at is not None
    end = attempt.ended_at if unreported else item.ended_at
    return {
        "number": f"{item.attempt}.{item.number}",
        "state": "",
        "job": "",
        "nodes": (),
        "resumed_from": item.resumed_from,
        "last_step": item.last_step,
        "started_at": item.started_at,
        "ended_at": end,
        "took": _took(item.started_at, end),
        "failure": _describe_end(item, unreported),
        "decision": "resumed from memory" if item.tier == MEMORY else "",
    }


def _describe_end(item: Generation, unreported: bool) -> str:
    """Describe the end of a generation."""
    if item.failure:
        return f"{item.failure['reason']}{drill_words(item.failure)}"
    return "with its attempt" if unreported else item.reason


def _took(start: float | None, end: float | None) -> float | None:
    return None if start is None else (end if end is not None else time.time()) - start


def _checkpoint_table(screen: Screen, kept: list[dict[str, Any]]) -> None:
    if not kept:
        screen.say("\nno checkpoint")
        return
    columns = [
        Column("CHECKPOINT", "step", count, right=True),
        Column("TRUST", "trust"),
        Column("SIZE", "bytes", size, right=True),
        Column("TOOK", "seconds", span, right=True, drop_order=1),
        Column("STALL", "stall", _milliseconds, right=True, drop_order=1),
        Column("ATT", "attempt", right=True),
        Column("FOLDER", "path", lambda path: Path(path).name),
        Column("PIN", "pin", _pin_words, wraps=True),
        Column("ALSO IN", "copies", lambda copies: ", ".join(copy["tier"] for copy in copies), wraps=True),
        Column("WHY", "reason"),
    ]
    rows = [{**row, "reason": reason_beside_tests(row["trust"], row["reason"])} for row in kept]
    screen.say("")
    screen.table(columns, rows, aligned=True)


def _pin_words(note: str | None) -> str:
    return "" if note is None else note or "pinned"


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"


def _history(screen: Screen, transitions: list[Transition]) -> None:
    screen.say("")
    for move in transitions:
        subject = f"{move.kind} {move.subject}".strip()
        screen.say(f"{screen.when(move.time)}  {subject}: {move.before or 'new'} -> {move.after}  {move.reason}")


def _next(screen: Screen, row: dict[str, Any]) -> None:
    run, more = row["run"], "" if has_moved(row) else continue_command(row)
    if more and row["state"] in ("HELD", "FAILED"):
        screen.note(f"\nwhy:      {look_closer(row)[-1]}\n{'again: ' if row['test_of'] else 'go on: '}   {more}")
        return
    live = row["state"] in LIVE_RUNS
    screen.note(f"\nevents:   orch events {run}{' -f' if live else ''}" + (f"\ngo on:    {more}" if more else ""))
