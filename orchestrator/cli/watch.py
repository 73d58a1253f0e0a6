"""Watching a run until it ends: what is shown on the way, who drives it, and what the end means."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from orchestrator.cli import whereabouts
from orchestrator.cli.feed import Feed, progress_line, sentence
from orchestrator.cli.pulse import controller_lives
from orchestrator.cli.render import Screen, Ticker, progress
from orchestrator.cli.status import one_row
from orchestrator.errors import Fenced, RunCancelled, RunFailed, WaitTimeout
from orchestrator.home import registry_path
from orchestrator.states import ENDED_RUNS, RunState
from trainer.contract.events import Event

LOOK_EVERY = 0.5
TICK_EVERY = 2.0
"""Seconds between two passes of our own, where no controller lives."""


def until_end(screen: Screen, run: str, *, timeout: float | None = None, follow: bool = False) -> dict[str, Any]:
    """Wait until the run has ended or is held; returns its status row.

    Raises WaitTimeout. Ctrl-C ends the watching only, with exit code 130, and says so.
    """
    with watching(screen, run, follow=follow) as watch:
        return watch.until(is_over, timeout)


@contextmanager
def watching(screen: Screen, run: str, *, follow: bool = True) -> "Iterator[Watch]":
    """A watch over one run; Ctrl-C ends it with exit code 130, and says so."""
    try:
        with screen.ticker() as ticker:
            yield Watch(screen, ticker, run, follow)
    except KeyboardInterrupt:
        screen.note(f"\ndetached: {run} goes on\n  orch status {run}\n  orch wait {run}\n  orch cancel {run}")
        raise click.exceptions.Exit(130) from None


def is_over(row: dict[str, Any]) -> bool:
    """Whether nothing more happens to a run by itself."""
    return row["state"] in ENDED_RUNS or row["state"] == RunState.HELD


class Watch:
    """One person watching one run; `events` are all that were seen, where they are followed."""

    def __init__(self, screen: Screen, ticker: Ticker, run: str, follow: bool) -> None:
        self._screen, self._ticker, self._run, self._follow = screen, ticker, run, follow
        self._feed: Feed | None = None
        self._next_tick = 0.0
        self._unreachable = ""
        self.events: list[Event] = []

    def skip(self) -> None:
        """What has happened so far is neither told nor kept."""
        self._feed = Feed(Path(one_row(self._run)["run_dir"]))
        self._feed.skip()

    def until(self, enough: Callable[[dict[str, Any]], bool], timeout: float | None) -> dict[str, Any]:
        """The first status row for which it is enough; raises WaitTimeout."""
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
        if not self._follow:
            return
        if self._feed is None:
            self._feed = Feed(Path(row["run_dir"]))
        fresh = self._feed.poll()
        self.events += fresh
        for event in fresh:
            text = sentence(event)
            if text is not None:
                self._ticker.keep(f"{self._screen.when(event.time)}  {text}")
        self._ticker.move(progress_line(self._run, row["state"], row["total_steps"], self._feed.beat))

    def _drive(self, row: dict[str, Any]) -> None:
        """Act in the place of a controller that does not live: waiting must not be for ever.

        Raises Precondition when nobody can from this host.
        """
        if time.monotonic() < self._next_tick or controller_lives(time.time(), row["scheduler"]):
            return
        whereabouts.find(row).require_answer()
        from orchestrator.controller import service  # sqlalchemy: only where nobody else drives

        try:
            # Beside a stalled controller the passes between two looks watch its lease until it may be taken.
            report = service.tick_once(registry_path(), row["cluster"], patience=0.0)
            silent = " and ".join(report.unreachable) if report is not None else ""
            if silent and silent != self._unreachable:
                self._screen.note(f"{silent} does not answer; nothing is assumed, asking again")
            self._unreachable = silent
        except Fenced:
            pass  # a controller has come to life meanwhile, and acts
        self._next_tick = time.monotonic() + TICK_EVERY


def verdict(row: dict[str, Any]) -> RunFailed | RunCancelled | None:
    """What the end of a run means to the one who waited: None, or what to raise, with what to type."""
    run, state = row["run"], row["state"]
    if state == RunState.SUCCEEDED:
        return None
    why = f"{run} is {state}" + (f": {row['reason']}" if row["reason"] else "")
    if state == RunState.CANCELLED:
        return RunCancelled(why, where=row["run_dir"], hint=f"go on with it:  orch resume {run}")
    looks = f"look:  orch show {run}   orch logs {run} --rank first-error"
    return RunFailed(why, where=row["run_dir"], hint=f"{looks}   then, mended:  orch resume {run}")
