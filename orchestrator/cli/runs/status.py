"""`orch status` and `orch` alone: the newest runs and the next commands, without an ORM or torch."""

import time
from collections.abc import Sequence
from typing import Any

import click

from orchestrator.cli.access.run_folder import (
    START,
    TAKE_OVER,
    controller_state,
    has_moved,
    warn_of_lost_checkpoint,
    warn_of_missing,
    where_to_type,
)
from orchestrator.cli.access.slurm_environment import silence_reason
from orchestrator.cli.runs.config_changes import warn_of_edited_config
from orchestrator.cli.runs.tags import check_tags, warn_of_unknown_tags
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
from orchestrator.home import registry_path
from orchestrator.registry.lease import displayed_state, holder_host
from orchestrator.registry.records import Lease
from orchestrator.run_view import RunView, find_run, newest_runs, runs_by_name, summarize_test
from orchestrator.states import LIVE_RUNS, RunState

RECENT = 7 * 86400.0
"""Seconds for which a failed run or a bad restore test is listed as needing attention."""
_MOST_NAMED = 3
"""Maximum number of runs that a warning names."""
STATUS_JSON = """
list of {run, state, step, total_steps, loss, attempts, generations, job_id, cluster, slurm_cluster, nodes, tags,
last_checkpoint: {step, trust, age_s} | null, restore_test: {step, layout, verdict, ended_at} | null, reason,
updated_at, eta_s, expected_start: {at, age_s, source} | null, after, sweep: {name, limit, point, base} | null};
cluster is slurm or local; slurm_cluster is null for local runs and while it is unknown;
restore_test is the newest finished one; eta_s is null while the run is not training or has just started;
expected_start is the scheduler's estimate for a waiting job; after is the run that must succeed first, null once it
has been removed
"""


@click.command(cls=Verb, json_data=STATUS_JSON)
@click.argument("runs", metavar="[RUN ...]", nargs=-1)
@click.option("-a", "--all", "all_", is_flag=True, help="List every run and restore test, not only the newest 50.")
@click.option(
    "-n", "limit", type=click.IntRange(1), metavar="N", default=50, show_default=True, help="How many runs to list."
)
@click.option(
    "--state", "states", type=click.Choice(RunState, case_sensitive=False), multiple=True, metavar="STATE",
    help="List only runs in this state; repeatable.",
)  # fmt: skip
@click.option(
    "-t", "--tag", "tags", multiple=True, metavar="NAME",
    help="List only runs with this tag; if repeated, only runs with all of the tags.",
)  # fmt: skip
@click.option("--sweep", metavar="NAME", help="List the runs of this sweep with their values and validation.")
@click.option("-w", "--watch", is_flag=True, help="Redraw every 2 seconds until Ctrl-C.")
@click.pass_obj
def status(
    screen: Screen, runs: tuple[str, ...], all_: bool, limit: int, states: tuple[RunState, ...], tags: tuple[str, ...],
    sweep: str | None, watch: bool,
) -> None:  # fmt: skip
    """List the newest runs: state, step, loss, last checkpoint, reason.

    It reads only the registry, changes nothing, and prints how old its information is. Restore tests are listed only
    with --all or by name. WHY gives the reason for the state. For a job in the queue it gives Slurm's reason, and
    what to do if that does not clear by itself.

    With RUN it also warns if the folder of the newest checkpoint is gone, and if the run's `config.json` was
    edited, which has no effect: use `orch resume RUN KEY=VALUE`.
    """
    chosen, tags = frozenset(states) or None, check_tags(tags)
    if watch:
        screen.if_interrupted = lambda: ""  # users normally exit with Ctrl-C
    warn_of_unknown_tags(screen, tags)
    while True:
        if runs:
            named = [find_run(name) for name in dict.fromkeys(runs)]
            views = [view for view in named if (chosen is None or view.state in chosen) and {*tags} <= {*view.tags}]
        elif sweep is not None:
            from orchestrator.cli.runs.sweep_table import find_sweep  # reads the runs' files

            views = find_sweep(sweep, chosen, tags)
        else:
            views = newest_runs(None if all_ else limit, chosen, tests=all_, tags=tags)
        if watch:
            screen.clear_screen()
        for view in views if runs else ():
            if has_moved(view):
                warn_of_missing(screen, view.run, view.run_dir)
            warn_of_lost_checkpoint(screen, view)
            warn_of_edited_config(screen, view)
        _show(screen, views, sweep)
        for view in views if runs else ():
            say_last_lines(screen, view)
        if not watch:
            return
        screen.flush()
        time.sleep(2.0)


def _show(screen: Screen, views: Sequence[RunView], sweep: str | None) -> None:
    warn_without_controller(screen, views)
    if sweep is not None:
        from orchestrator.cli.runs.sweep_table import show_sweep

        show_sweep(screen, sweep, views)
        return
    if not screen.json:
        status_table(screen, views)
    warn_of_bad_tests(screen, views)
    warn_of_undelivered(screen, views)
    warn_of_budgets(screen)
    if screen.json:
        screen.data("status", [view.to_json() for view in views])
    else:
        screen.note(_footer(views))


def overview(screen: Screen) -> None:
    """Print live runs and runs that need attention, for `orch` without a verb."""
    views = newest_runs(200, {*LIVE_RUNS, RunState.HELD, RunState.FAILED})
    warn_of_undelivered(screen, views)
    running = [view for view in views if view.is_live]
    stuck = [view for view in views if view.state == RunState.HELD]
    stuck += [view for view in views if view.state == RunState.FAILED and view.age_s < RECENT]
    bad = _with_bad_tests(views)
    if screen.json:
        tests = [{"run": run, **summarize_test(test), "reason": test["reason"]} for run, test in bad.items()]
        groups = {"running": running, "needs_you": stuck}
        answer = {key: [view.to_json() for view in group] for key, group in groups.items()}
        screen.data("overview", {**answer, "bad_restore_tests": tests})
        return
    warn_without_controller(screen, running)
    status_table(screen, running)
    screen.note(_footer(running))
    for view in stuck:
        next_step = f"orch rm {view.run}" if view.removal else view.continue_command
        _say_need(screen, view.sentence, *view.look_closer, *filter(None, [next_step]))
    for view in _never_started(running):
        _say_need(screen, view.sentence)
    for run, test in bad.items():
        _say_need(screen, describe_bad_test(run, test), f"orch restore-tests history {run}", f"orch ckpt ls {run}")
    if not (views or bad):
        text = "nothing is running. `orch submit tiny-gpt` starts a run, `orch demo` shows one, `orch -h` lists verbs."
        screen.note(text)


def _say_need(screen: Screen, why: str, *commands: str) -> None:
    """Print why a run needs attention, and any commands that the reason does not mention."""
    screen.say(f"needs you: {shorten_text(plain(why))}", hang=11)
    named = [command for command in commands if command not in why]
    joined = "   ".join(named)
    for line in [joined] if len(joined) + 11 <= screen.width else named:
        screen.say(f"           {line}")


def _never_started(running: Sequence[RunView]) -> list[RunView]:
    """Return the runs with a queued job that Slurm will never start without changes."""
    queued = [view for view in running if view.state == RunState.QUEUED]
    if not queued:
        return []
    from orchestrator.scheduler.slurm.refusals import STAYS  # imports the scheduler, so only if a job is queued

    return [view for view in queued if STAYS in view.reason]


def _with_bad_tests(views: Sequence[RunView]) -> dict[str, Any]:
    """Return bad restore tests, keyed by run: those of `views`, and recent ones of other runs."""
    from orchestrator.registry import fast_queries

    since = time.time() - RECENT
    others = set(fast_queries.found_bad(registry_path(), since)) - {view.run for view in views}
    found = [*views, *(runs_by_name(sorted(others)) if others else ())]
    unfinished = {*LIVE_RUNS, RunState.HELD}
    bad = [(view, view.bad_test) for view in found if view.bad_test]
    return {view.run: test for view, test in bad if view.state in unfinished or test["ended_at"] >= since}


def describe_bad_test(run: str, test: Any) -> str:
    """Describe the bad restore test of a run's newest tested checkpoint."""
    what = f"{run}: restore test of step {count(test['step'])} on {test['layout']}: {test['verdict']}"
    return f"{what}, {test['reason']}" if test["reason"] else what


def warn_of_bad_tests(screen: Screen, views: Sequence[RunView]) -> None:
    """Print one warning for each run whose newest tested checkpoint is bad."""
    for view in views:
        if view.bad_test:
            words = f"{describe_bad_test(view.run, view.bad_test)}; orch restore-tests history {view.run}"
            screen.warn("bad_restore_test", words)


def warn_of_undelivered(screen: Screen, views: Sequence[RunView]) -> None:
    """Print a single warning that covers every run with an undelivered notification."""
    sent = [view for view in views if view.notified.get("newest")]
    if not sent:
        return
    from orchestrator.notifications.delivery import NotificationState

    troubles = {view.run: NotificationState.from_json(dict(view.notified)).trouble for view in sent}
    undelivered = [run for run, trouble in troubles.items() if trouble]
    if len(undelivered) == 1:
        screen.warn("not_notified", f"{undelivered[0]}: {troubles[undelivered[0]]}")
    elif undelivered:
        names = ", ".join(undelivered[:_MOST_NAMED]) + (", ..." if len(undelivered) > _MOST_NAMED else "")
        words = f"some notifications of {len(undelivered)} runs were not delivered: {names}"
        screen.warn("not_notified", f"{words}; `orch show RUN` gives the reason")


def warn_of_budgets(screen: Screen) -> None:
    """Warn about budgets of GPU-hours that are nearly used up."""
    from orchestrator.registry import gpu_hours

    for use in gpu_hours.measure_budgets(registry_path(), gpu_hours.newest_budgets(registry_path()), time.time()):
        if use.share >= gpu_hours.WARN_FROM:
            screen.warn("budget", use.words)


def status_table(screen: Screen, views: Sequence[RunView], *, aligned: bool = False) -> None:
    """Print the table of `orch status`."""
    several = len({view.slurm_cluster for view in views}) > 1
    more = [SLURM_CLUSTER] if several else []
    more += [STARTS] if any(view.expected_start for view in views) else []
    table = [*TABLE[:-1], *more, TABLE[-1]]
    screen.table(
        table if screen.terminal or aligned else TSV, [_cells(screen, view) for view in views], aligned=aligned
    )


def say_last_lines(screen: Screen, view: RunView) -> None:
    """Print the last lines of the rank that failed first, for a run of a user's own program."""
    if view.failure is None or not view.last_lines or screen.json:
        return
    say = screen.say if screen.terminal else screen.note  # nothing may follow a table that programs read
    say(f"\nlast lines of rank {view.failure.get('rank')} of {view.run}, on {view.failure.get('node')}:")
    for line in view.last_lines:
        say(f"  {plain(str(line))}")


def describe_start(screen: Screen, view: RunView) -> str:
    """Return the scheduler's estimate of a waiting job's start, with its age; empty without a current one."""
    start = view.expected_start
    if start is None or view.start_at is None:
        return ""
    return f"{screen.when(view.start_at)} ({start['source']}, {span(start['age_s'])} ago)"


def _cells(screen: Screen, view: RunView) -> dict[str, Any]:
    last = view.last_checkpoint or {}
    return {
        **vars(view),
        "step": view.step or None if not view.total_steps else view.step,  # a command's step may be unknown
        "total_steps": view.total_steps or None,
        "progress": progress(view.step, view.total_steps),
        "saved": f"{count(last['step'])} {last['trust']}" if last else "-",
        "saved_age": last.get("age_s"),
        "saved_step": last.get("step"),
        "saved_trust": last.get("trust"),
        "tries": f"{view.attempts}" + (f".{view.generations}" if view.generations else ""),
        "updated": iso(view.updated_at),
        "age_s": view.age_s,
        "eta_s": view.eta_s,
        "starts": describe_start(screen, view),
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
_TSV_KEYS = {
    "run": "RUN", "state": "STATE", "step": "STEP", "total_steps": "TOTAL_STEPS", "loss": "LOSS",
    "attempts": "ATTEMPTS", "generations": "GENERATIONS", "job_id": "JOB_ID", "cluster": "CLUSTER", "nodes": "NODES",
    "saved_step": "CHECKPOINT_STEP", "saved_trust": "CHECKPOINT_TRUST", "updated": "UPDATED_AT", "reason": "REASON",
    "slurm_cluster": "SLURM_CLUSTER", "tags": "TAGS", "eta_s": "ETA_S",
}  # fmt: skip
TSV = [Column(title, key) for key, title in _TSV_KEYS.items()]
STARTS = Column("EXPECTED START", "starts", drop_order=9)
"""Column shown if the scheduler has estimated when a waiting job starts."""
SLURM_CLUSTER = Column("CLUSTER", "slurm_cluster", lambda name: name or "local", drop_order=9)
"""Column shown if the runs are on several clusters."""


def warn_without_controller(screen: Screen, views: Sequence[RunView]) -> None:
    """Warn about clusters that have live runs but no working controller; other controllers skip those runs."""
    for scheduler in sorted({view.scheduler for view in views if view.is_live}):
        state = controller_state(scheduler)
        if state.stalled:
            screen.warn("controller_stalled", f"{state.reason}: nothing is restarted in the meantime; {TAKE_OVER}")
        elif not state.alive:
            place = where_to_type(scheduler)
            what = (
                f"no controller{f' for {scheduler}' if scheduler else ''} is running: "
                "jobs continue, but nothing is restarted"
            )
            start = f"{START}{f' {place}' if place else ''}"
            screen.warn("no_controller", f"{what}, and this information is not updated; {start}")


def _footer(views: Sequence[RunView]) -> str:
    from orchestrator.registry import fast_queries

    now, found = time.time(), fast_queries.leases(registry_path())
    listed = {view.scheduler for view in views} | {held.scheduler for held in found if displayed_state(held, now).alive}
    shown = [held for held in found if held.scheduler in listed] if len(listed) > 1 else found[:1]
    words = "; ".join(_controller(held, now, len(listed) > 1) for held in shown or found[:1]) or "controller none"
    return f"{len(views)} run{'' if len(views) == 1 else 's'} · {words} · registry {registry_path()}"


def _controller(lease: Lease, now: float, is_named: bool) -> str:
    """Describe whether the holder of a lease is alive, and when its last pass was."""
    of = f" of {lease.scheduler}" if is_named and lease.scheduler else ""
    looked = f"last pass {span(now - lease.ticked_at)} ago" if lease.ticked_at else "no pass yet"
    state = displayed_state(lease, now)
    if state.stalled:
        return f"{state.reason}{of}, {looked}"
    if not state.alive:
        return f"controller{of} none ({looked})"
    answers = "gets no answer from Slurm" if silence_reason(lease) else "ok"
    return f"controller{of} {answers} ({looked}, {holder_host(lease.holder)})"
