"""`orch events`: the timeline of a run."""

import shutil
import textwrap
import time
from pathlib import Path
from typing import Any

import click

from orchestrator.cli.access.run_folder import warn_of_moved
from orchestrator.cli.runs import timeline
from orchestrator.cli.runs.follow import detached, end_error, is_over
from orchestrator.cli.runs.status import one_row, warn_without_controller
from orchestrator.cli.runs.timeline import Moment, Repetition, Timeline
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Screen, iso, one_line
from orchestrator.errors import ConfigError

POLL = 0.5


@click.command(cls=Verb)
@click.argument("run")
@click.option("-f", "--follow", is_flag=True, help="Continue until the run ends.")
@click.option("--since", "start", default=None, metavar="TIME", help="Only from then on: 10m, 2h, 1d, or an ISO time.")
@click.option("-a", "--all", "everything", is_flag=True, help="Print small events, too.")
@click.pass_obj
def events(screen: Screen, run: str, follow: bool, start: str | None, everything: bool) -> int:
    """Print the timeline of a run: every event, decision and change of state, over all attempts.

    The exit code with -f is 0, 8 if the run failed or is held, or 10 if it was cancelled.
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
    screen.if_interrupted = lambda: detached(run)
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


def to_json(moment: Moment) -> dict[str, Any]:
    """A moment as programs see it."""
    return {
        "time": iso(moment.time), "attempt": moment.attempt, "generation": moment.generation, "source": moment.source,
        "kind": moment.kind, "text": moment.text or None, "data": moment.data,
    }  # fmt: skip


class _Printer:
    """Lines for people, wrapped below their text; tab-separated values in a pipe."""

    def __init__(self, screen: Screen, everything: bool) -> None:
        self._screen, self._everything = screen, everything
        self._repetition = Repetition()
        self.printed = 0

    def show(self, moments: list[Moment]) -> None:
        for moment in moments:
            if moment.text or self._everything:
                if not self.printed and not self._screen.terminal:
                    self._screen.say("\t".join(_TITLES))
                self._one(moment)
                self.printed += 1

    def _one(self, moment: Moment) -> None:
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
