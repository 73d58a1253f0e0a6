"""`orch status`: the newest runs, with the next commands; without an ORM or torch."""

import time
from collections.abc import Mapping
from typing import Any

import click

from orchestrator.cli.access.registry import open_store, require_registry
from orchestrator.cli.access.run_folder import (
    START,
    TAKE_OVER,
    controller_state,
    warn_of_lost_checkpoint,
    warn_of_moved,
    where_to_start,
)
from orchestrator.cli.access.slurm_environment import silence_reason
from orchestrator.cli.runs.config_changes import warn_of_edited_config
from orchestrator.cli.runs.notified import warn_of_untold
from orchestrator.cli.runs.tags import check_tags, unknown_tags
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import (
    Column,
    Screen,
    as_text,
    count,
    decimal,
    host_list,
    iso,
    plain,
    progress,
    shorten_text,
    span,
)
from orchestrator.errors import ConfigError, NotFound
from orchestrator.home import registry_path
from orchestrator.registry.lease import displayed_state, holder_host, host_name
from orchestrator.registry.records import Lease
from orchestrator.states import LIVE_RUNS, RunState

Row = Mapping[str, Any]
"""A run's row as `orch status` reads it."""

_WITHOUT_LOG = frozenset({
    "submit_rejected", "submit_deferred", "submission_lost", "cancelled", "preempted", "time_limit", "job_lost",
})  # fmt: skip
"""Failures without logs of ranks or agents; their reason is all that is known."""


def has_first_error(failure: Mapping[str, Any] | None) -> bool:
    """Return whether `orch logs RUN --rank first-error` adds to this failure of the newest attempt."""
    return failure is not None and failure["kind"] not in _WITHOUT_LOG


def look_closer(row: Row) -> list[str]:
    """Return the commands that show why a run ended."""
    run = row["run"]
    more = f"orch logs {run} --rank first-error" if has_first_error(row["failure"]) else f"orch events {run}"
    return [f"orch show {run}", more]


def continue_command(row: Row) -> str:
    """Return the command that continues a run or repeats a restore test; empty for a live run or if none exists."""
    run, test = row["run"], row["test_of"]
    if row["state"] in LIVE_RUNS:
        return ""
    if test is not None:
        return restore_test_again(test)
    if row["state"] == RunState.SUCCEEDED:
        # A user's own program decides itself when it ends.
        return f"orch resume {run} train.steps={2 * row['total_steps']}" if row["total_steps"] else ""
    return f"orch resume {run}"


def restore_test_again(order: Mapping[str, Any]) -> str:
    """Return the command for another test with the settings of this order from `Run.identity`."""
    return f"orch ckpt restore-test {order['run']}@{order['step']} --layout {order['layout']}"


def after_end(row: Row) -> str:
    """Return a hint for a command that needs a live job, for a run without one."""
    command = continue_command(row)
    if row["state"] == RunState.SUCCEEDED and row["test_of"] is None:
        more = f"   train on:  {command}" if command else ""
        return f"it has finished:  orch show {row['run']}{more}"
    return f"{'test again' if row['test_of'] else 'go on with it'}:  {command}"


KEYS = (
    "run", "state", "step", "total_steps", "loss", "attempts", "generations", "job_id", "cluster", "nodes",
    "last_checkpoint", "reason", "updated_at", "last_lines", "slurm_cluster", "restore_test",
    "tags", "eta_s",
)  # fmt: skip
"""Promised keys of a run in `orch status --json`, checked by the golden test."""
RECENT = 7 * 86400.0
"""Seconds for which a failed run or a bad restore test is listed as needing attention."""


STATUS_JSON = """
list of {run, state, step, total_steps, loss, attempts, generations, job_id, cluster, slurm_cluster, nodes, tags,
last_checkpoint: {step, trust, age_s} | null, restore_test: {step, layout, verdict, ended_at} | null, reason,
updated_at, eta_s}; cluster is slurm or local; slurm_cluster is null for local runs and while it is unknown;
restore_test is the newest finished one; eta_s is null while the run does not train or has just started
"""


@click.command(cls=Verb, json_data=STATUS_JSON)
@click.argument("runs", metavar="[RUN ...]", nargs=-1)
@click.option(
    "-a", "--all", "everything", is_flag=True, help="List every run and restore test, not only the newest 50."
)
@click.option(
    "-n", "limit", type=click.IntRange(1), metavar="N", default=50, show_default=True, help="How many runs to list."
)
@click.option("--state", "states", multiple=True, metavar="STATE", help="List only runs in this state; repeatable.")
@click.option(
    "-t",
    "--tag",
    "tags",
    multiple=True,
    metavar="NAME",
    help="List only runs with this tag (with all of several); repeatable.",
)
@click.option("-w", "--watch", is_flag=True, help="Redraw every 2 seconds until Ctrl-C.")
@click.pass_obj
def status(
    screen: Screen, runs: tuple[str, ...], everything: bool, limit: int, states: tuple[str, ...],
    tags: tuple[str, ...], watch: bool,
) -> None:  # fmt: skip
    """List the newest runs: state, step, loss, last checkpoint, reason.

    It reads only the registry, changes nothing, and prints how old its information is. Runs that are restore tests
    are listed with --all or by their names. WHY has the reason of the state; for a job in the queue it has Slurm's
    reason, and what to type if that does not clear by itself.

    With RUN it also warns if the folder of the newest checkpoint is gone, and if the run's `config.json` was
    edited: that changes nothing, `orch resume RUN KEY=VALUE` does.
    """
    chosen, tags = _states(states), check_tags(tags)
    if watch:
        screen.if_interrupted = lambda: ""  # the usual way to leave
    for what, offer in unknown_tags(tags) if tags else ():
        screen.warn("no_such_tag", f"{what}; {offer}")
    while True:
        rows = _rows(runs, None if everything else limit, chosen, tags)
        if watch:
            screen.clear_screen()
        if runs:
            for row in rows:
                warn_of_moved(screen, row)
                warn_of_lost_checkpoint(screen, row)
                warn_of_edited_config(screen, row)
        _show(screen, rows)
        if runs:
            for row in rows:
                say_last_lines(screen, row["run"], row["failure"])
        if not watch:
            return
        screen.flush()
        time.sleep(2.0)


def overview(screen: Screen) -> None:
    """Print live runs and runs that need attention, for `orch` without a verb."""
    rows = _rows((), 200, frozenset({*LIVE_RUNS, RunState.HELD, RunState.FAILED}))
    warn_of_untold(screen, rows)
    running = [row for row in rows if row["state"] in LIVE_RUNS]
    stuck = [row for row in rows if row["state"] == RunState.HELD]
    stuck += [row for row in rows if row["state"] == RunState.FAILED and row["age_s"] < RECENT]
    bad = _found_bad(rows)
    if screen.json:
        told = [{"run": row["run"], **_test_json(row["bad_test"]), "reason": row["bad_test"]["reason"]} for row in bad]
        screen.data("overview", {"running": public(running), "needs_you": public(stuck), "bad_restore_tests": told})
        return
    warn_without_controller(screen, running)
    status_table(screen, running)
    screen.note(_footer(running))
    for row in stuck:
        next_step = f"orch rm {row['run']}" if row["removal"] else continue_command(row)
        words = [*look_closer(row), *([next_step] if next_step else [])]
        _say_need(screen, f"{row['run']} is {row['state']}: {row['reason']}", *words)
    for row in _waiting_for_ever(running):
        _say_need(screen, f"{row['run']} is {row['state']}: {row['reason']}")
    for row in bad:
        run = row["run"]
        _say_need(screen, bad_test_words(row), f"orch restore-tests history {run}", f"orch ckpt ls {run}")
    if not (rows or bad):
        screen.note(
            "nothing runs. `orch submit tiny-gpt` starts a run, `orch demo` shows one, `orch -h` lists the verbs."
        )


def _say_need(screen: Screen, why: str, *commands: str) -> None:
    """Print a reason for attention, and the commands that the reason does not already include."""
    screen.say(f"needs you: {shorten_text(plain(why))}", hang=11)
    named = [command for command in commands if command not in why]
    beside = "   ".join(named)
    for line in [beside] if len(beside) + 11 <= screen.width else named:
        screen.say(f"           {line}")


def _waiting_for_ever(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs with a queued job that Slurm will never start in its present form."""
    queued = [row for row in rows if row["state"] == RunState.QUEUED]
    if not queued:
        return []
    # Imports scheduler modules, so only if a job is queued.
    from orchestrator.scheduler.slurm.refusals import STAYS

    return [row for row in queued if STAYS in row["reason"]]


def _found_bad(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the runs whose newest tested checkpoint is bad, among `rows` and recent findings."""
    from orchestrator.registry import fast_queries

    since = time.time() - RECENT
    others = set(fast_queries.found_bad(registry_path(), since)) - {row["run"] for row in rows}
    found = [*rows, *map(_with_ages, fast_queries.runs_by_name(registry_path(), sorted(others)) if others else ())]
    going_on = {*LIVE_RUNS, RunState.HELD}
    bad = [row for row in found if row["bad_test"]]
    return [row for row in bad if row["state"] in going_on or row["bad_test"]["ended_at"] >= since]


def _states(words: tuple[str, ...]) -> frozenset[RunState] | None:
    known = [str(state) for state in RunState]
    for word in words:
        if word.upper() not in known:
            raise ConfigError(
                f"no such state: {word}", where="command line: --state", hint=f"one of {', '.join(known)}"
            )
    return frozenset(RunState(word.upper()) for word in words) or None


def _rows(
    names: tuple[str, ...], limit: int | None, states: frozenset[RunState] | None, tags: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    from orchestrator.registry import fast_queries

    if not names:
        found = fast_queries.newest(registry_path(), limit, states, tests=limit is None, tags=tags)
        return [_with_ages(row) for row in found]
    try:
        rows = [one_row(name) for name in dict.fromkeys(names)]
    except NotFound as error:
        if meant := [name for name in names if name.upper() in set(RunState)]:
            hint = f"`orch status --state {meant[0].upper()}` lists the runs in that state"
            raise NotFound(error.what, where=error.where, hint=hint) from error
        raise
    return [row for row in rows if (states is None or row["state"] in states) and {*tags} <= {*row["tags"]}]


def rows_with_tags(tags: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return the rows of all runs with all of these tags, newest first."""
    return _rows((), None, None, check_tags(tags))


def one_row(name: str) -> dict[str, Any]:
    """Return the row of a run by name, unique beginning of a name, or `@last`. Raises NotFound with similar names."""
    from orchestrator.registry import fast_queries

    require_registry(registry_path())
    rows = (
        fast_queries.newest(registry_path(), 1)
        if name == "@last"
        else fast_queries.runs_by_name(registry_path(), [name])
    )
    if not rows:
        with open_store(readonly=True) as store:  # slower: needed for beginnings of names and for similar names
            rows = fast_queries.runs_by_name(registry_path(), [store.run(name).name])
    return _with_ages(rows[0])


def _with_ages(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with ages in seconds."""
    now = time.time()
    last = row["last_checkpoint"]
    if last is not None:
        last = {"step": last["step"], "trust": last["trust"], "age_s": round(max(0.0, now - last["committed_at"]), 3)}
    lines = list((row["failure"] or {}).get("lines", ()))
    age = max(0.0, now - row["updated_at"])
    return {**row, "last_checkpoint": last, "age_s": age, "last_lines": lines, "eta_s": _eta(row, now)}


_START_SECONDS = 600.0
"""Seconds after which the start of a generation (imports, compilation) is a small part of its time."""


def _eta(row: dict[str, Any], now: float) -> float | None:
    """Return the seconds until the last step at the speed of the newest generation.

    None if the run is not training, has no known end, or may have spent most of its time starting.
    """
    since, left = row["speed_since"], row["total_steps"] - row["step"]
    if row["state"] != RunState.RUNNING or since is None or left <= 0 or row["step"] <= since["step"]:
        return None
    if not since["saved"] and row["updated_at"] - since["at"] < _START_SECONDS:
        return None
    seconds = (row["updated_at"] - since["at"]) / (row["step"] - since["step"])
    ends = row["updated_at"] + left * seconds
    return round(ends - now, 1) if seconds > 0 and ends > now else None


def public(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the promised keys of each run, in the promised order."""
    return [
        {**{key: row[key] for key in KEYS}, "updated_at": iso(row["updated_at"])}
        | {"restore_test": row["restore_test"] and _test_json(row["restore_test"])}
        for row in rows
    ]


def _test_json(test: dict[str, Any]) -> dict[str, Any]:
    return {**{key: test[key] for key in ("step", "layout", "verdict")}, "ended_at": iso(test["ended_at"])}


def _show(screen: Screen, rows: list[dict[str, Any]]) -> None:
    warn_without_controller(screen, rows)
    if screen.json:
        _warn_of_rows(screen, rows)
        screen.data("status", public(rows))
        return
    status_table(screen, rows)
    _warn_of_rows(screen, rows)
    screen.note(_footer(rows))


def _warn_of_rows(screen: Screen, rows: list[dict[str, Any]]) -> None:
    warn_of_bad_tests(screen, rows)
    warn_of_untold(screen, rows)


def bad_test_words(row: dict[str, Any]) -> str:
    """Describe the bad restore test of a run's newest tested checkpoint."""
    test = row["bad_test"]
    what = f"{row['run']}: restore test of step {count(test['step'])} on {test['layout']}: {test['verdict']}"
    return f"{what}, {test['reason']}" if test["reason"] else what


def warn_of_bad_tests(screen: Screen, rows: list[dict[str, Any]]) -> None:
    """Print one warning for each run whose newest tested checkpoint is bad."""
    for row in rows:
        if row["bad_test"]:
            words = f"{bad_test_words(row)}; orch restore-tests history {row['run']}"
            screen.warn("bad_restore_test", words)


def status_table(screen: Screen, rows: list[dict[str, Any]], *, aligned: bool = False) -> None:
    """Print the table of `orch status`."""
    several = len({row["slurm_cluster"] for row in rows}) > 1
    table = [*TABLE[:-1], SLURM_CLUSTER, TABLE[-1]] if several else TABLE
    screen.table(table if screen.terminal or aligned else TSV, [_flat(row) for row in rows], aligned=aligned)


def say_last_lines(screen: Screen, run: str, failure: dict[str, Any] | None) -> None:
    """Print the last lines of the rank that failed first, for a run of a user's own program."""
    lines = (failure or {}).get("lines", ())
    if failure is None or not lines or screen.json:
        return
    say = screen.say if screen.terminal else screen.note  # on stdout, nothing follows a table for programs
    say(f"\nlast lines of rank {failure.get('rank')} of {run}, on {failure.get('node')}:")
    for line in lines:
        say(f"  {plain(str(line))}")


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row with combined columns for display."""
    last = row["last_checkpoint"]
    restarts = f"{row['attempts']}" + (f".{row['generations']}" if row["generations"] else "")
    return {
        **row,
        "step": row["step"] or None if not row["total_steps"] else row["step"],  # a command's step may be unknown
        "total_steps": row["total_steps"] or None,
        "progress": progress(row["step"], row["total_steps"]),
        "saved": f"{count(last['step'])} {last['trust']}" if last else "-",
        "saved_age": last["age_s"] if last else None,
        "saved_step": last["step"] if last else None,
        "saved_trust": last["trust"] if last else None,
        "tries": restarts,
        "updated": iso(row["updated_at"]),
    }


TABLE = [
    Column("RUN", "run"),
    Column("STATE", "state"),
    Column("STEP", "progress", right=True),
    Column("LOSS", "loss", decimal, right=True, drop_order=2),
    Column("SAVED", "saved_age", lambda age: "-" if age is None else f"{span(age)} ago", right=True),
    Column("ETA", "eta_s", span, right=True, drop_order=10),
    Column("CHECKPOINT", "saved", drop_order=3),
    Column("ATT.GEN", "tries", right=True, drop_order=4),
    Column("JOB", "job_id", drop_order=6),
    Column("NODES", "nodes", lambda names: host_list(names or ()) or "-", drop_order=7),
    Column("UPDATED", "age_s", lambda age: f"{span(age)} ago", right=True, drop_order=5),
    Column("TAGS", "tags", ", ".join, drop_order=8),
    Column("WHY", "reason", lambda reason: shorten_text(as_text(reason))),
]
TSV = [
    Column("RUN", "run"),
    Column("STATE", "state"),
    Column("STEP", "step"),
    Column("TOTAL_STEPS", "total_steps"),
    Column("LOSS", "loss"),
    Column("ATTEMPTS", "attempts"),
    Column("GENERATIONS", "generations"),
    Column("JOB_ID", "job_id"),
    Column("CLUSTER", "cluster"),
    Column("NODES", "nodes"),
    Column("CHECKPOINT_STEP", "saved_step"),
    Column("CHECKPOINT_TRUST", "saved_trust"),
    Column("UPDATED_AT", "updated"),
    Column("REASON", "reason"),
    Column("SLURM_CLUSTER", "slurm_cluster"),
    Column("TAGS", "tags"),
    Column("ETA_S", "eta_s"),
]
SLURM_CLUSTER = Column("CLUSTER", "slurm_cluster", lambda name: name or "local", drop_order=9)
"""Column shown if the runs are on several clusters."""


def warn_without_controller(screen: Screen, rows: list[dict[str, Any]]) -> None:
    """Warn of every cluster with live runs but a stalled or missing controller; other controllers skip those runs."""
    live = {row["scheduler"]: row["cluster"] for row in rows if row["state"] in LIVE_RUNS}
    for scheduler, kind in sorted(live.items()):
        state = controller_state(time.time(), scheduler)
        if state.alive:
            continue
        if state.stalled:
            screen.warn("controller_stalled", f"{state.reason}: nothing is restarted meanwhile; {TAKE_OVER}")
            continue
        place = where_to_start(scheduler, kind, here=host_name())
        screen.warn(
            "no_controller",
            f"no controller{f' of {scheduler}' if scheduler else ''} runs: jobs go on, but nothing is restarted and "
            f"this information is not updated; {START}{f' {place}' if place else ''}",
        )


def _footer(rows: list[dict[str, Any]]) -> str:
    from orchestrator.registry import fast_queries

    now, found = time.time(), fast_queries.leases(registry_path())
    listed = {row["scheduler"] for row in rows} | {held.scheduler for held in found if displayed_state(held, now).alive}
    several = len(listed) > 1
    words = [_controller(held, now, several) for held in found if held.scheduler in listed] if several else []
    word = "; ".join(words) or (_controller(found[0], now, False) if found else "controller none")
    return f"{len(rows)} run{'' if len(rows) == 1 else 's'} · {word} · registry {registry_path()}"


def _controller(lease: Lease, now: float, named: bool) -> str:
    """Describe whether the holder of a lease is alive, and when it last looked."""
    of = f" of {lease.scheduler}" if named and lease.scheduler else ""
    looked = f"looked {span(now - lease.ticked_at)} ago" if lease.ticked_at else "has not looked yet"
    state = displayed_state(lease, now)
    if state.stalled:
        return f"{state.reason}{of}, {looked}"
    if state.alive and silence_reason(lease):
        return f"controller{of} gets no answer from Slurm ({looked}, {holder_host(lease.holder)})"
    if state.alive:
        return f"controller{of} ok ({looked}, {holder_host(lease.holder)})"
    return f"controller{of} none ({looked})"
