"""`orch events` and `orch wait`, and following a run until it ends."""

import shutil
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from orchestrator.cli.access.registry import act_as_controller
from orchestrator.cli.access.run_folder import START, controller_state, has_moved, locate_run, warn_of_missing
from orchestrator.cli.runs.run_reader import EventFeed
from orchestrator.cli.runs.status import warn_without_controller
from orchestrator.cli.runs.timeline import EventDescriber, Repetition, Timeline, TimelineEntry, parse_since
from orchestrator.cli.terminal.argument_types import Seconds
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen, StatusLine, count, decimal, iso, one_line, progress
from orchestrator.errors import ConfigError, WaitTimeout
from orchestrator.run_view import RunView, find_run
from orchestrator.states import RunState
from trainer.protocol.events import Event

LOOK_EVERY = 0.5
TICK_EVERY = 2.0
"""Seconds between this command's own controller passes while no controller is alive."""
_WAITING = frozenset({RunState.CREATED, RunState.QUEUED, RunState.RECOVERING})
"""States in which nothing trains. The run's reason explains why."""
_TITLES = ("TIME", "ATT.GEN", "SOURCE", "KIND", "WHAT")
EVENTS_JSON = """
list of {time, attempt, generation, source, kind, text, data}, including minor events; kind is the event's kind, or
transition, decision, request or answer; text is null if the content is only in data
"""


def wait_until_end(screen: Screen, run: str, *, timeout: float | None = None, follow: bool = False) -> RunView:
    """Wait until the run has ended or is held. Raises WaitTimeout. Ctrl-C ends the wait, not the run."""
    with following(screen, run, follow=follow) as follower:
        return follower.until(lambda view: view.is_over, timeout)


@contextmanager
def following(screen: Screen, run: str, *, follow: bool = True) -> "Iterator[RunFollower]":
    """Yield a follower of one run. Ctrl-C prints the run's state and stops following it; the run continues."""
    screen.if_interrupted = lambda: detach_message(run)
    with screen.ticker() as ticker:
        yield RunFollower(screen, ticker, run, follow)


def detach_message(run: str) -> str:
    """Return the message shown after Ctrl-C on a watched run: its state, and the commands to use next."""
    view = find_run(run)
    if view.is_over:
        return f"interrupted: {run} is {view.state}\n  orch show {run}"
    commands = [f"orch status {run}", f"orch wait {run}", f"orch cancel {run}"]
    if controller_state(view.scheduler).alive:
        return "\n  ".join([f"detached: {run} continues ({view.state})", *commands])
    what = f"detached: {run} is {view.state}, but no controller is running, so nothing will be started or restarted"
    return "\n  ".join([what, "orch controller start", *commands])


class RunFollower:
    """Watches one run. If events are followed, `events` holds every event so far."""

    def __init__(self, screen: Screen, ticker: StatusLine, run: str, follow: bool) -> None:
        self._screen, self._ticker, self._run, self._follow = screen, ticker, run, follow
        self._feed: EventFeed | None = None
        self._describer = EventDescriber()
        self._next_tick = 0.0
        self._silent: tuple[str, ...] = ()
        self._acts = False
        self._reasons: set[str] = set()  # waiting reasons already shown
        self.events: list[Event] = []

    def skip_existing(self) -> None:
        """Skip the events so far, without printing or keeping them."""
        self._feed = EventFeed(Path(find_run(self._run).run_dir))
        self._feed.skip_existing()

    def until(self, enough: Callable[[RunView], bool], timeout: float | None) -> RunView:
        """Return the first view of the run that satisfies `enough`. Raises WaitTimeout."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            view = find_run(self._run)
            self._show(view)
            if enough(view):
                return view
            if time.monotonic() >= deadline:
                raise WaitTimeout(
                    f"{self._run} is still {view.state} after {timeout:g} s",
                    where=f"step {progress(view.step, view.total_steps, ' of ')}",
                    hint=f"it continues; wait again with `orch wait {self._run}`",
                )
            self._drive(view)
            time.sleep(min(LOOK_EVERY, max(0.0, deadline - time.monotonic())))

    def _show(self, view: RunView) -> None:
        # Each reason for waiting is printed once, in full.
        if view.state in _WAITING and view.reason and view.reason not in self._reasons:
            self._reasons.add(view.reason)
            self._ticker.print_above(f"{self._screen.when(view.updated_at)}  {view.reason}")
        if not self._follow:
            return
        if self._feed is None:
            self._feed = EventFeed(Path(view.run_dir))
        fresh = self._feed.poll()
        self.events += fresh
        for event in fresh:
            text = self._describer.describe(event)
            if text is not None:
                self._ticker.print_above(f"{self._screen.when(event.time)}  {text}")
        self._ticker.update(progress_line(view, self._feed.latest))

    def _drive(self, view: RunView) -> None:
        """Run a controller pass if no controller is alive, so that the wait can end.

        Raises Precondition if that is impossible from this host.
        """
        if time.monotonic() < self._next_tick or controller_state(view.scheduler).alive:
            return
        locate_run(view.run, view.cluster, view.scheduler).require_answer()
        if not self._acts:
            self._acts = True
            self._ticker.print_above(f"no controller is running: this command does its work until it ends; {START}")
        # If the controller stalls, repeated passes watch its lease until it can be taken over.
        self._silent = act_as_controller(self._screen, view.cluster, self._silent, patience=0.0)
        self._next_tick = time.monotonic() + TICK_EVERY


def progress_line(view: RunView, latest: dict[str, Any] | None) -> str:
    """Return `tiny-gpt-3  RUNNING  step 120/200 60%  loss 2.1130  81000 tokens/s  attempt 1 generation 2`.

    If there is no step line (a user's own program writes none), the registry's data is used.
    """
    if latest is None:
        step = f"  step {progress(view.step, view.total_steps)}" if view.step else ""
        loss = f"  loss {decimal(view.loss)}" if view.step and view.loss is not None else ""
        return f"{view.run}  {view.state}{step}{loss}"
    step, total, speed = latest["step"], view.total_steps, latest.get("tokens_per_s")
    share = f" {100 * step // total}%" if total else ""
    rate = f"  {count(round(speed))} tokens/s" if isinstance(speed, (int, float)) else ""
    place = f"attempt {latest.get('attempt')} generation {latest.get('generation')}"
    head = f"{view.run}  {view.state}  step {progress(step, total)}{share}"
    return f"{head}  loss {decimal(latest.get('loss'))}{rate}  {place}"


@click.command(cls=Verb, json_data="the run's row from status")
@click.argument("run")
@click.option("--timeout", type=Seconds(min=0), metavar="SECONDS", help="Give up after this time (60, 1m, 2h).")
@click.option("--follow", is_flag=True, help="Print events and decisions as they happen.")
@click.pass_obj
def wait(screen: Screen, run: str, timeout: float | None, follow: bool) -> int:
    """Wait until a run ends, and return its result as the exit code.

    0 succeeded, 8 failed or held (with the reason and what to do), 10 cancelled, 124 timeout, 130 detached by
    Ctrl-C. It prints why a job is waiting in the queue. If no controller is alive, this command does its work.
    """
    view = wait_until_end(screen, find_run(run).run, timeout=timeout, follow=follow)
    if screen.json:
        screen.data("wait", view.to_json())
    return report_end(screen, view)


def report_end(screen: Screen, view: RunView) -> int:
    """Print the result of an ended run, and return its exit code. With --json, only return the exit code."""
    trouble = view.end_error
    if trouble and not screen.json:
        raise trouble
    screen.say(f"{view.run} succeeded: step {progress(view.step, view.total_steps, ' of ')}")
    return trouble.exit_code if trouble else 0


def end_follow(screen: Screen, view: RunView) -> int:
    """Print the end of a run whose output was followed, and return its exit code."""
    screen.note(view.sentence)
    return view.end_error.exit_code if view.end_error else 0


@click.command(cls=Verb, json_data=EVENTS_JSON)
@click.argument("run")
@click.option("-f", "--follow", is_flag=True, help="Continue until the run ends.")
@click.option(
    "--since", "start", metavar="TIME",
    help="Start at this time: 90s, 10m, 2h or 1d ago, or an ISO time (local unless it has a zone).",
)  # fmt: skip
@click.option(
    "-a", "--all", "all_", is_flag=True,
    help="Also print minor events: agents joining, saves starting, checkpoints being deleted.",
)  # fmt: skip
@click.pass_obj
def events(screen: Screen, run: str, follow: bool, start: str | None, all_: bool) -> int:
    """Print the timeline of a run: every event, decision and change of state, over all attempts.

    The second column shows the attempt and generation. In a pipe, columns for source and kind are added. `orch logs`
    shows the ranks' output. With -f, the exit code is 0, 8 if the run failed or is held, or 10 if it was cancelled.
    """
    if follow and screen.json:
        where = "command line: orch events"
        what = "-f prints entries as they happen, but --json prints one object"
        raise ConfigError(what, where=where, hint="omit one of them")
    after = parse_since(start, time.time()) if start is not None else 0.0
    view = find_run(run)
    if has_moved(view):
        warn_of_missing(screen, view.run, view.run_dir)
    reader = Timeline(view.run, Path(view.run_dir))
    found = [moment for moment in reader.poll() if moment.time >= after]
    if screen.json:
        keys = ("attempt", "generation", "source", "kind")
        rows = [
            {
                "time": iso(each.time), **{key: getattr(each, key) for key in keys}, "text": each.text or None,
                "data": each.data,
            }
            for each in found
        ]  # fmt: skip
        screen.data("events", rows)
        return 0
    printer = _Printer(screen, all_)
    printer.show(found)
    if follow:
        warn_without_controller(screen, [view])
        return _follow(screen, reader, printer, view.run)
    if not printer.printed:
        screen.note(f"{view.run}: nothing has happened" + (f" since {screen.when(after)}" if after else " yet"))
    return 0


def _follow(screen: Screen, reader: Timeline, printer: "_Printer", run: str) -> int:
    screen.if_interrupted = lambda: detach_message(run)
    while True:
        view = find_run(run)
        fresh = reader.poll()
        printer.show(fresh)
        screen.flush()
        if view.is_over and not fresh:
            return end_follow(screen, view)
        time.sleep(LOOK_EVERY)


class _Printer:
    """Prints timeline entries: wrapped lines on a terminal, tab-separated values in a pipe."""

    def __init__(self, screen: Screen, all_: bool) -> None:
        self._screen, self._all = screen, all_
        self._repetition = Repetition()
        self.printed = 0

    def show(self, moments: Sequence[TimelineEntry]) -> None:
        for moment in moments:
            if moment.text or self._all:
                if not self.printed and not self._screen.terminal:
                    self._screen.say("\t".join(_TITLES))
                self._print(moment)
                self.printed += 1

    def _print(self, moment: TimelineEntry) -> None:
        if not self._screen.terminal:
            cells = (iso(moment.time), moment.place, moment.source, moment.kind, moment.words)
            self._screen.say("\t".join(one_line(cell or "") for cell in cells))
            return
        head = f"{self._screen.when(moment.time)}  {moment.place or '-':<5}  "
        width = max(2 * len(head), shutil.get_terminal_size().columns)
        words = one_line(self._repetition.without(moment))
        lines = textwrap.wrap(words, width - len(head), break_long_words=False, break_on_hyphens=False)
        self._screen.say(head + f"\n{' ' * len(head)}".join(lines))
