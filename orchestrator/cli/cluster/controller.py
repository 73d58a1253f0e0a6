"""`orch controller`: start, stop, and inspect the controller."""

import logging
import sys
import time
from dataclasses import asdict, is_dataclass
from functools import reduce
from typing import Any

import click

from orchestrator.cli.access.run_folder import START, TAKE_OVER, controller_state
from orchestrator.cli.access.slurm_environment import silence_reason
from orchestrator.cli.cluster import crontab
from orchestrator.cli.terminal.argument_types import Seconds
from orchestrator.cli.terminal.command_classes import Noun
from orchestrator.cli.terminal.render import Screen, iso, span
from orchestrator.controller import service
from orchestrator.controller.reconcile import TickReport
from orchestrator.controller.service import Health
from orchestrator.errors import Precondition, SlurmUnreachable
from orchestrator.home import controller_log, registry_path
from orchestrator.registry import fast_queries
from orchestrator.registry.lease import LEASE_TTL
from orchestrator.scheduler.available_schedulers import kinds, lease_key, resolve
from orchestrator.states import LIVE_RUNS
from trainer.protocol.config_sections.scheduler_kinds import choices

ALIVE_WITHIN = 30.0
"""Seconds within which a new controller must acquire the lease."""
LOOK_EVERY = 0.1


def start_controller(screen: Screen, kind: str) -> tuple[bool, Health]:
    """Start a controller for this kind of scheduler unless one is alive. Raises Precondition if none comes up.

    Returns whether this command started it, and its health.
    """
    started = service.ensure_running(registry_path(), kind)
    screen.if_interrupted = lambda: "interrupted: `orch controller status` shows whether the controller has started"
    key = lease_key(kind)
    before = controller_state(key)
    if before.stalled:
        screen.note(f"{before.reason}: the new one waits until the old lease has expired, a minute at most")
    deadline = time.monotonic() + ALIVE_WITHIN + (LEASE_TTL if before.stalled or before.once else 0.0)
    while not controller_state(key).stays:
        if time.monotonic() >= deadline:
            what = f"the controller was started, but did not take the lease within {ALIVE_WITHIN:.0f} s"
            hint = "see that file for the reason; `orch controller run` runs one in the foreground"
            raise Precondition(what, where=str(controller_log()), hint=hint)
        time.sleep(LOOK_EVERY)
    return started, service.status(registry_path(), key)


@click.group(cls=Noun)
def controller() -> None:
    """Start, stop, inspect or install the controller, the process that restarts runs.

    `orch submit`, `orch resume` and `orch cancel` start a controller if none is alive. It exits when nothing is left
    to do. If it is killed, `orch controller start` starts another. Each controller serves one cluster: the Slurm
    cluster that its host can reach, or the local jobs on its host.
    """


@controller.command("run")
@click.option("--idle-exit", type=Seconds(min=0), metavar="SECONDS", help="Exit after this time without live runs.")
@click.option("--cluster", type=click.Choice(choices()), default="auto", help="Which runs to serve.")
@click.pass_obj
def run(screen: Screen, idle_exit: float | None, cluster: str) -> None:
    """Run a controller in the foreground until Ctrl-C (`orch submit` starts one automatically).

    It serves the Slurm cluster that this host can reach; without one, or with `--cluster local`, it serves the local
    jobs on this host.
    """
    # The daemon reports its actions by logging; in the foreground the log goes to the terminal.
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    kind = resolve(cluster)
    screen.if_interrupted = lambda: "interrupted: no controller is running here; the jobs continue"
    screen.note(f"controller for {registry_path()}, {kind}; Ctrl-C ends it, the runs continue")
    service.run_daemon(registry_path(), idle_exit, kind)


START_JSON = "list of {started, alive, host, pid, epoch, renewed_at, ticked_at, log, once, stalled, reason, scheduler}"


@controller.command("start", json_data=START_JSON)
@click.option("--cluster", type=click.Choice(choices()), default="auto", help="Which runs to serve.")
@click.pass_obj
def start(screen: Screen, cluster: str) -> None:
    """Start a controller in the background if none is alive; it exits when nothing is left to do.

    Without `--cluster` it starts one for each reachable cluster with live runs. Without live runs it starts one for
    the cluster of the newest run, or else for the Slurm cluster that this host can reach, or for its local jobs.

    It returns when the controller has taken over; a stalled controller is replaced within a minute. The exit code is 4
    if the controller did not start; its log gives the reason.
    """
    found = [start_controller(screen, kind) for kind in _kinds_to_start(cluster)]
    if screen.json:
        screen.data("controller.start", [{"started": started, **_plain(health)} for started, health in found])
        return
    for started, health in found:
        served = f" for {health.scheduler}" if health.scheduler else ""
        screen.say(f"{'started' if started else 'alive already'}{served}: pid {health.pid} on {health.host}")
    screen.note(f"log {found[0][1].log}")


def _kinds_to_start(cluster: str) -> list[str]:
    if cluster == "auto":
        live = {row["cluster"] for row in fast_queries.newest(registry_path(), None, LIVE_RUNS, tests=True)}
        if served := sorted(live & set(kinds())):
            return served
        newest = fast_queries.newest(registry_path(), 1)
        if newest and newest[0]["cluster"] in kinds():
            return [newest[0]["cluster"]]
    return [resolve(cluster)]


@controller.command("tick")
@click.pass_obj
def tick(screen: Screen) -> int:
    """Make one pass over the runs of this host and its Slurm cluster; do nothing if a controller is alive.

    It is meant for cron. It replaces a stalled controller once its lease has expired, which takes a minute at most, or
    reports why it cannot (exit code 4). The exit code is 5 if a scheduler did not answer; its runs are then unchanged.
    """
    screen.if_interrupted = lambda: "interrupted: the next pass continues where this one stopped"
    report, stalled = _pass()
    if stalled:
        screen.warn("controller_stalled", f"{stalled}: nothing was done for its runs; {TAKE_OVER}")
    if screen.json:
        screen.data("controller.tick", {"acted": report is not None, "report": _plain(report)})
    elif report is None and not stalled:
        screen.note("another controller holds the lease and is active")
    elif report is not None:
        screen.say(f"{report.live} live runs")
        silent = (f"{kind} does not answer: nothing is assumed" for kind in report.unreachable)
        for line in (*report.actions, *report.errors, *silent):
            screen.say(f"  {line}")
    if report is not None and report.unreachable:
        return SlurmUnreachable.exit_code
    return Precondition.exit_code if stalled else 0


def _pass() -> tuple[TickReport | None, str]:
    """Run a pass for each kind of scheduler here and merge the reports; None if controllers are alive for all of them.

    Also returns why a scheduler has no working controller; empty if all have one.
    """
    reports = {kind: service.tick_once(registry_path(), kind) for kind in kinds()}
    acted = [report for report in reports.values() if report is not None]
    states = [controller_state(lease_key(kind)) for kind, report in reports.items() if report is None]
    idle = [state.reason for state in states if not state.alive]
    return reduce(lambda first, second: first.plus(second), acted) if acted else None, "; ".join(idle)


STATUS_JSON = """
the newest controller, and under controllers all of them, each with silence: the reason why Slurm does not answer it
"""


@controller.command("status", json_data=STATUS_JSON)
@click.pass_obj
def status(screen: Screen) -> None:
    """List the controllers, their clusters, and the time of their last pass.

    A controller is stalled if it was stopped by a signal or has not renewed its lease for a minute. If its Slurm
    does not answer, the reason is printed.
    """
    health, every = service.status(registry_path()), service.statuses(registry_path())
    unanswered = {held.scheduler: silence_reason(held) for held in fast_queries.leases(registry_path())}
    if screen.json:
        controllers = [{**_plain(one), "silence": unanswered.get(one.scheduler, "")} for one in every]
        screen.data("controller.status", {**_plain(health), "controllers": controllers})
        return
    for one in every or [health]:
        looked = f"last pass {span(time.time() - one.ticked_at)} ago" if one.ticked_at else "no pass yet"
        of = f" for {one.scheduler}" if one.scheduler else ""
        if one.alive:
            silence = unanswered.get(one.scheduler)
            trouble = f"; gets no answer from Slurm: {silence}" if silence else ""
            screen.say(f"alive{of}: pid {one.pid} on {one.host}, {looked}{trouble}")
        elif one.stalled:
            screen.say(f"{one.reason}{of}, {looked}; {TAKE_OVER}")
        else:
            start = "`orch controller start` or the next `orch submit` there starts one"
            screen.say(f"no controller{of} is running ({looked}); {start}")
    screen.note(f"log {health.log}")


@controller.command("stop")
@click.pass_obj
def stop(screen: Screen) -> None:
    """Stop this host's controllers; runs continue, but nothing restarts them until a controller is started again.

    The exit code is 4 if the controller runs on another host.
    """
    stopped = service.stop(registry_path())
    text = f"stopped; {START}, and so does the next `orch submit`" if stopped else "none is running"
    screen.answer("controller.stop", {"stopped": _plain(stopped)}, text)


@controller.command("install")
@click.option("--via", type=click.Choice(["cron", "scrontab"]), required=True, help="Table of scheduled jobs to use.")
@click.option("--every", type=click.IntRange(1, 59), default=1, show_default=True, metavar="MINUTES", help="How often.")
@click.option("--print", "only_print", is_flag=True, help="Only print the line.")
@click.option("--remove", is_flag=True, help="Remove the line.")
@click.pass_obj
def install(screen: Screen, via: str, every: int, only_print: bool, remove: bool) -> None:
    """Let cron (or Slurm's scrontab) run `orch controller tick`, so that runs survive a reboot of the login node.

    It prints its lines and writes them into your table; the next call replaces them. These passes also begin
    restore tests that are due. The exit code is 4 if this host has no such table.
    """
    lines = crontab.lines(via, every)
    before = [] if only_print else crontab.read(via)
    after = crontab.without(before) + ([] if remove else lines)
    changed = not only_print and after != before
    if changed:
        crontab.write(via, after)
    if screen.json:
        screen.data("controller.install", {"via": via, "lines": lines, "changed": changed})
        return
    screen.raw("\n".join(lines))
    outcome = f"{via}: {('removed' if remove else 'installed') if changed else 'nothing to change'}"
    screen.note(f"to install it:  orch controller install --via {via}" if only_print else outcome)


def _plain(value: Any) -> Any:
    fields = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    if isinstance(fields, dict):
        return {key: iso(item) if key.endswith("_at") and item else _plain(item) for key, item in fields.items()}
    if isinstance(fields, (list, tuple, set, frozenset)):
        return [_plain(item) for item in fields]
    return fields
