"""`orch controller`: the process that keeps runs going, as a daemon, as one pass, or from cron."""

import logging
import sys
import time
from typing import Any

import click

from orchestrator.cli.options import Noun
from orchestrator.cli.pulse import TAKE_OVER, controller_state
from orchestrator.cli.render import Screen, iso, span
from orchestrator.errors import Precondition, SlurmUnreachable
from orchestrator.home import registry_path


@click.group(cls=Noun)
def controller() -> None:
    """The process that keeps runs going: run it, look at it, install it."""


@controller.command("run")
@click.option("--idle-exit", type=float, default=None, metavar="SECONDS", help="End after so long without live runs.")
@click.pass_obj
def run(screen: Screen, idle_exit: float | None) -> None:
    """Keep runs going until stopped, in the foreground (`orch submit` starts one by itself)."""
    from orchestrator.controller import service

    # The daemon tells what it does by logging; in the foreground that goes to the terminal.
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    screen.note(f"controller for {registry_path()}; Ctrl-C ends it, the runs go on")
    service.run_daemon(registry_path(), idle_exit)


@controller.command("tick")
@click.pass_obj
def tick(screen: Screen) -> int:
    """One pass over all runs, for cron and scrontab; nothing when another controller holds the lease.

    A stalled controller is replaced: this waits until its lease has expired, and says why when it cannot (code 4).
    Exit code 5 when a scheduler gave no answer: what it holds was left as it is.
    """
    from orchestrator.controller import service

    report = service.tick_once(registry_path())
    if screen.json:
        screen.data("controller.tick", {"acted": report is not None, "report": _plain(report)})
    if report is None and not (state := controller_state(time.time())).alive:
        raise Precondition(f"nothing was done: {state.reason}", where=str(registry_path()), hint=TAKE_OVER)
    if screen.json:
        pass
    elif report is None:
        screen.note("another controller holds the lease and acts")
    else:
        screen.say(f"{report.live} live runs")
        for line in (
            *report.actions,
            *report.errors,
            *(f"{kind} does not answer: nothing is assumed" for kind in report.unreachable),
        ):
            screen.say(f"  {line}")
    return SlurmUnreachable.exit_code if report is not None and report.unreachable else 0


@controller.command("status")
@click.pass_obj
def status(screen: Screen) -> None:
    """Whether a controller lives, and when it last looked at the runs."""
    from orchestrator.controller import service

    health = service.status(registry_path())
    if screen.json:
        screen.data("controller.status", _plain(health))
        return
    looked = f"looked at the runs {span(time.time() - health.ticked_at)} ago" if health.ticked_at else "no look yet"
    if health.alive:
        screen.say(f"alive: pid {health.pid} on {health.host}, {looked}")
    elif health.stalled:
        screen.say(f"{health.reason}, {looked}; {TAKE_OVER}")
    else:
        screen.say(f"none lives ({looked}); the next `orch submit` starts one, or `orch controller run`")
    screen.note(f"log {health.log}")


@controller.command("stop")
@click.pass_obj
def stop(screen: Screen) -> None:
    """End the controller; runs go on, but nobody restarts them until one is started again."""
    from orchestrator.controller import service

    stopped = service.stop(registry_path())
    if screen.json:
        screen.data("controller.stop", {"stopped": _plain(stopped)})
    else:
        screen.say(
            "stopped; `orch controller run` or the next `orch submit` starts one" if stopped else "none is running"
        )


@controller.command("install")
@click.option("--via", type=click.Choice(["cron", "scrontab"]), required=True, help="Which table of timed jobs.")
@click.option("--every", type=click.IntRange(1, 59), default=1, show_default=True, metavar="MINUTES", help="How often.")
@click.option("--print", "only_print", is_flag=True, help="Only show the line.")
@click.option("--remove", is_flag=True, help="Take the line out again.")
@click.pass_obj
def install(screen: Screen, via: str, every: int, only_print: bool, remove: bool) -> None:
    """Let cron (or Slurm's scrontab) run `orch controller tick`, so that runs survive a reboot of the login node."""
    from orchestrator.cli import timetable

    lines = timetable.lines(via, every)
    before = [] if only_print else timetable.read(via)
    after = timetable.without(before) + ([] if remove else lines)
    changed = not only_print and after != before
    if screen.json:
        if changed:
            timetable.write(via, after)
        screen.data("controller.install", {"via": via, "lines": lines, "changed": changed})
        return
    for line in lines:
        screen.say(line)
    if changed:
        timetable.write(via, after)
    if only_print:
        screen.note(f"to install it:  orch controller install --via {via}")
    else:
        screen.note(f"{via}: {'removed' if remove else 'installed'}" if changed else f"{via}: nothing to change")


def _plain(value: Any) -> Any:
    """A report as plain JSON data, times as ISO 8601."""
    from dataclasses import asdict, is_dataclass

    fields = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    if isinstance(fields, dict):
        return {key: iso(item) if key.endswith("_at") and item else _plain(item) for key, item in fields.items()}
    if isinstance(fields, (list, tuple, set, frozenset)):
        return [_plain(item) for item in fields]
    return fields
