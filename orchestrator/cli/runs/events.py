"""`orch events`, `orch wait` and the display of a run until its end."""

import shutil
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from orchestrator.cli.access import run_folder
from orchestrator.cli.access.run_folder import START, warn_of_moved
from orchestrator.cli.runs import timeline
from orchestrator.cli.runs.run_reader import EventFeed
from orchestrator.cli.runs.status import after_end, look_closer, one_row, public, warn_without_controller
from orchestrator.cli.runs.timeline import EventDescriber, Repetition, Timeline, TimelineEntry, progress_line
from orchestrator.cli.terminal.argument_types import Seconds
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen, StatusLine, iso, one_line, progress
from orchestrator.errors import ConfigError, Fenced, RunCancelled, RunFailed, WaitTimeout
from orchestrator.home import registry_path
from orchestrator.states import ENDED_RUNS, RunState
from trainer.protocol.events import Event

LOOK_EVERY = 0.5
TICK_EVERY = 2.0
"""Seconds between our own controller passes while no controller is alive."""

_WAITING = frozenset({RunState.CREATED, RunState.QUEUED, RunState.RECOVERING})
"""States in which nothing trains now; the reason explains why."""


def wait_until_end(screen: Screen, run: str, *, timeout: float | None = None, follow: bool = False) -> dict[str, Any]:
    """Wait until the run has ended or is held; return its status row.

    Raises WaitTimeout. Ctrl-C stops the watching, not the run.
    """
    with following(screen, run, follow=follow) as follower:
        return follower.until(is_over, timeout)


@contextmanager
def following(screen: Screen, run: str, *, follow: bool = True) -> "Iterator[RunFollower]":
    """Yield a follower of one run. Ctrl-C stops the watching, not the run, and prints the run's state."""
    screen.if_interrupted = lambda: detach_message(run)
    with screen.ticker() as ticker:
        yield RunFollower(screen, ticker, run, follow)


def detach_message(run: str) -> str:
    """Return the message after Ctrl-C on a watched run: its state, and the commands to type."""
    row = one_row(run)
    if is_over(row):
        return f"interrupted: {run} is {row['state']}\n  orch show {run}"
    commands = [f"orch status {run}", f"orch wait {run}", f"orch cancel {run}"]
    if run_folder.controller_lives(time.time(), row["scheduler"]):
        return "\n  ".join([f"detached: {run} goes on ({row['state']})", *commands])
    said = f"detached: {run} is {row['state']}, but no controller runs, so nothing is started or restarted from now on"
    return "\n  ".join([said, "orch controller start", *commands])


def is_over(row: dict[str, Any]) -> bool:
    """Return whether the run has ended or is held."""
    return row["state"] in ENDED_RUNS or row["state"] == RunState.HELD


class RunFollower:
    """Watcher of one run; `events` has every event seen so far, if they are followed."""

    def __init__(self, screen: Screen, ticker: StatusLine, run: str, follow: bool) -> None:
        self._screen, self._ticker, self._run, self._follow = screen, ticker, run, follow
        self._feed: EventFeed | None = None
        self._describer = EventDescriber()
        self._next_tick = 0.0
        self._unreachable, self._acts = "", False
        self._reasons: set[str] = set()  # waiting reasons already shown
        self.events: list[Event] = []

    def skip_existing(self) -> None:
        """Skip the events so far; they are neither printed nor kept."""
        self._feed = EventFeed(Path(one_row(self._run)["run_dir"]))
        self._feed.skip_existing()

    def until(self, enough: Callable[[dict[str, Any]], bool], timeout: float | None) -> dict[str, Any]:
        """Return the first status row that satisfies `enough`. Raises WaitTimeout."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            row = one_row(self._run)
            self._show(row)
            if enough(row):
                return row
            if deadline is not None and time.monotonic() >= deadline:
                raise WaitTimeout(
                    f"{self._run} is still {row['state']} after {timeout:g} s",
                    where=f"step {progress(row['step'], row['total_steps'], ' of ')}",
                    hint=f"it goes on; wait again with `orch wait {self._run}`",
                )
            self._drive(row)
            rest = LOOK_EVERY if deadline is None else min(LOOK_EVERY, max(0.0, deadline - time.monotonic()))
            time.sleep(rest)

    def _show(self, row: dict[str, Any]) -> None:
        self._say_why_it_waits(row)
        if not self._follow:
            return
        if self._feed is None:
            self._feed = EventFeed(Path(row["run_dir"]))
        fresh = self._feed.poll()
        self.events += fresh
        for event in fresh:
            text = self._describer.describe(event)
            if text is not None:
                self._ticker.print_above(f"{self._screen.when(event.time)}  {text}")
        known = {key: row[key] for key in ("step", "loss")}
        self._ticker.update(progress_line(self._run, row["state"], row["total_steps"], self._feed.latest, **known))

    def _say_why_it_waits(self, row: dict[str, Any]) -> None:
        """Print each reason once, in full."""
        if row["state"] in _WAITING and row["reason"] and row["reason"] not in self._reasons:
            self._reasons.add(row["reason"])
            self._ticker.print_above(f"{self._screen.when(row['updated_at'])}  {row['reason']}")

    def _drive(self, row: dict[str, Any]) -> None:
        """Run a controller pass if no controller is alive, so that the wait can end.

        Raises Precondition if that is impossible from this host.
        """
        if time.monotonic() < self._next_tick or run_folder.controller_lives(time.time(), row["scheduler"]):
            return
        run_folder.locate_run(row).require_answer()
        if not self._acts:
            self._acts = True
            self._ticker.print_above(f"no controller runs: this command acts in its place until it ends; {START}")
        from orchestrator.controller import service  # only without a controller

        try:
            # With a stalled controller, repeated passes watch its lease until it can be taken over.
            report = service.tick_once(registry_path(), row["cluster"], patience=0.0)
            silent = " and ".join(report.unreachable) if report is not None else ""
            if silent and silent != self._unreachable:
                self._screen.note(f"{silent} does not answer; nothing is assumed, asking again")
            self._unreachable = silent
        except Fenced:
            pass  # a controller has become active meanwhile
        self._next_tick = time.monotonic() + TICK_EVERY


def end_error(row: dict[str, Any]) -> RunFailed | RunCancelled | None:
    """Return the error for the run's final state, with the command to type; None if it succeeded."""
    run, state = row["run"], row["state"]
    if state == RunState.SUCCEEDED:
        return None
    why = f"{run} is {state}" + (f": {row['reason']}" if row["reason"] else "")
    if state == RunState.CANCELLED:
        return RunCancelled(why, where=row["run_dir"], hint=after_end(row))
    looks = f"look:  {'   '.join(look_closer(row))}"
    cured = f"orch resume {run} " in row["reason"]  # the reason has the required change, without which it fails again
    return RunFailed(why, where=row["run_dir"], hint=looks if cured else f"{looks}   {after_end(row)}")


@click.command(cls=Verb, json_data="the run's row of status")
@click.argument("run")
@click.option(
    "--timeout", type=Seconds(min=0), default=None, metavar="SECONDS", help="Give up after this time (60, 1m, 2h)."
)
@click.option("--follow", is_flag=True, help="Print events and decisions as they happen.")
@click.pass_obj
def wait(screen: Screen, run: str, timeout: float | None, follow: bool) -> int:
    """Wait until a run ends, and return its result as the exit code.

    0 succeeded, 8 failed or held (with the reason and what to type), 10 cancelled, 124 timeout, 130 detached by
    Ctrl-C. It prints why a job waits in the queue. If no controller is alive, this command does its work.
    """
    row = wait_until_end(screen, one_row(run)["run"], timeout=timeout, follow=follow)
    trouble = end_error(row)
    if screen.json:
        screen.data("wait", public([row])[0])
        return trouble.exit_code if trouble else 0
    if trouble:
        raise trouble
    screen.say(f"{row['run']} succeeded: step {progress(row['step'], row['total_steps'], ' of ')}")
    return 0


POLL = 0.5


EVENTS_JSON = """
list of {time, attempt, generation, source, kind, text, data}, small events included; kind is that of the event, or
transition, decision, request or answer; text is null if only data has the content
"""


@click.command(cls=Verb, json_data=EVENTS_JSON)
@click.argument("run")
@click.option("-f", "--follow", is_flag=True, help="Continue until the run ends.")
@click.option(
    "--since",
    "start",
    default=None,
    metavar="TIME",
    help="Only from then on: 90s, 10m, 2h, 1d, or an ISO time (local, unless it has a zone).",
)
@click.option(
    "-a",
    "--all",
    "everything",
    is_flag=True,
    help="Print small events, too: agents that join, saves that begin, deleted checkpoints.",
)
@click.pass_obj
def events(screen: Screen, run: str, follow: bool, start: str | None, everything: bool) -> int:
    """Print the timeline of a run: every event, decision and change of state, over all attempts.

    The second column is attempt and generation. A pipe also gets source and kind. `orch logs` has the output of the
    ranks. The exit code with -f is 0, 8 if the run failed or is held, or 10 if it was cancelled.
    """
    if follow and screen.json:
        raise ConfigError(
            "-f has no end, --json is one object", where="command line: orch events", hint="leave one out"
        )
    after = timeline.since(start, time.time()) if start is not None else 0.0
    row = one_row(run)
    warn_of_moved(screen, row)
    reader = Timeline(row["run"], Path(row["run_dir"]))
    found = [moment for moment in reader.poll() if moment.time >= after]
    if screen.json:
        screen.data("events", [to_json(moment) for moment in found])
        return 0
    printer = _Printer(screen, everything)
    printer.show(found)
    if not follow:
        if not printer.printed:
            screen.note(f"{row['run']}: nothing has happened" + (f" since {screen.when(after)}" if after else " yet"))
        return 0
    warn_without_controller(screen, [row])
    return _follow(screen, reader, printer, row["run"])


def _follow(screen: Screen, reader: Timeline, printer: "_Printer", run: str) -> int:
    screen.if_interrupted = lambda: detach_message(run)
    while True:
        row = one_row(run)
        fresh = reader.poll()
        printer.show(fresh)
        screen.flush()
        if is_over(row) and not fresh:
            trouble = end_error(row)
            screen.note(f"{run} is {row['state']}" + (f": {row['reason']}" if row["reason"] else ""))
            return trouble.exit_code if trouble else 0
        time.sleep(POLL)


def to_json(moment: TimelineEntry) -> dict[str, Any]:
    """Return a moment as plain JSON data."""
    return {
        "time": iso(moment.time), "attempt": moment.attempt, "generation": moment.generation, "source": moment.source,
        "kind": moment.kind, "text": moment.text or None, "data": moment.data,
    }  # fmt: skip


class _Printer:
    """Printer of moments: wrapped lines on a terminal, tab-separated values in a pipe."""

    def __init__(self, screen: Screen, everything: bool) -> None:
        self._screen, self._everything = screen, everything
        self._repetition = Repetition()
        self.printed = 0

    def show(self, moments: list[TimelineEntry]) -> None:
        for moment in moments:
            if moment.text or self._everything:
                if not self.printed and not self._screen.terminal:
                    self._screen.say("\t".join(_TITLES))
                self._one(moment)
                self.printed += 1

    def _one(self, moment: TimelineEntry) -> None:
        if not self._screen.terminal:
            cells = (iso(moment.time), moment.place, moment.source, moment.kind, moment.words)
            self._screen.say("\t".join(one_line(cell or "") for cell in cells))
            return
        head = f"{self._screen.when(moment.time)}  {moment.place or '-':<5}  "
        width = max(2 * len(head), shutil.get_terminal_size().columns)
        words = one_line(self._repetition.without(moment))
        lines = textwrap.wrap(words, width - len(head), break_long_words=False, break_on_hyphens=False)
        self._screen.say(head + f"\n{' ' * len(head)}".join(lines))


_TITLES = ("TIME", "ATT.GEN", "SOURCE", "KIND", "WHAT")
