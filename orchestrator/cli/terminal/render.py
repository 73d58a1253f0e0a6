"""The only module that prints: answers on stdout, everything else on stderr; tables, JSON, errors, progress."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any, TextIO

from checkpointing.storage.durable import dump_line
from orchestrator.cli.terminal.tables import Column as Column
from orchestrator.cli.terminal.tables import as_text as as_text
from orchestrator.cli.terminal.tables import shorten_text as shorten_text
from orchestrator.cli.terminal.tables import table_lines, wrap_line
from trainer.protocol import time_spans
from trainer.protocol.time_spans import iso as iso

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|[@-Z\\-_])")
_CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)))
_NARROWEST = 40
"""Minimum page width in columns; a narrower terminal folds the lines itself."""
_LONGEST = 2000
"""Maximum number of characters of an error message as text."""
_PAGE = 160
"""Page width in columns for a file or a pipe."""
Meter = Callable[[int, int], None]
"""Progress callback with the amount done and the total."""


def plain(text: str) -> str:
    """Return `text` without escape sequences and control characters, so that no log line can control a terminal."""
    return _ESCAPES.sub("", text).translate(_CONTROLS)


def one_line(text: str) -> str:
    """Return `plain` text with line breaks and tabs turned into spaces."""
    return " ".join(plain(text).split())


def _readable(text: str) -> str:
    """Return `plain` text, cut so that a long foreign value does not fill the screen."""
    shown = plain(text)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}... ({len(shown)} characters)"


def size(count: float | None) -> str:
    """Format bytes: `96.4 GiB`."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def span(seconds: float | None) -> str:
    """Format a duration: `45s`, `6m10s`, `7h02m`, `3d04h`."""
    return "-" if seconds is None else time_spans.span(seconds)


def count(number: int | float | None) -> str:
    """Format a number without separators, so that it can be pasted: `61200`; a dash for None."""
    return "-" if number is None else str(number)


def progress(step: int | None, total: int | None, between: str = "/") -> str:
    """Format a run's progress. For a user's own program `total` may be unknown, and step 0 means unknown."""
    return f"{count(step)}{between}{count(total)}" if total else count(step or None)


def decimal(number: float | str | None, digits: int = 4) -> str:
    """Format a loss or rate; the words nan and inf are kept."""
    return "-" if number is None else (number if isinstance(number, str) else f"{number:.{digits}f}")


def host_list(names: Sequence[str]) -> str:
    """Join host names, as a host list if that is shorter: `gpu[001-016]`."""
    if len(names) < 3:
        return ",".join(names)
    # Imports ClusterShell, so only for tables of many nodes.
    from orchestrator.scheduler.slurm.command_output import fold_nodes

    return fold_nodes(tuple(names))


def _raw(value: Any) -> str:
    """Format a TSV cell without shortening it, and without tabs or line breaks."""
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        value = ",".join(map(str, value))
    return one_line(value) if isinstance(value, str) else dump_line(value).strip('"')


def _encodable(stream: TextIO, text: str) -> str:
    """Return a JSON text unchanged for a UTF-8 stream, otherwise in ASCII."""
    return text if (stream.encoding or "").lower().replace("-", "") == "utf8" else json.dumps(json.loads(text))


def _terminal_columns() -> int:
    import shutil  # takes 3 ms with its imports; not needed in a pipe

    return shutil.get_terminal_size().columns


class Screen:
    """Output of a command, in the form that the global options set."""

    def __init__(self) -> None:
        self.json = self.quiet = self.verbose = self.no_color = self.no_progress = self.utc = self.debug = False
        self.words: tuple[str, ...] = ()  # command line after `orch`
        self.if_interrupted: Callable[[], str] = lambda: "interrupted"  # message after Ctrl-C; verbs set it
        self._warnings: list[dict[str, str]] = []
        self._page: list[str] | None = None  # lines of a live display
        self._canvas: Any = None  # console of the live display

    @property
    def terminal(self) -> bool:
        """Whether stdout is a terminal and the output is text."""
        return sys.stdout.isatty() and not self.json

    @property
    def width(self) -> int:
        """Page width of stdout in columns."""
        return max(_terminal_columns(), _NARROWEST) if sys.stdout.isatty() else _PAGE

    def _print(self, text: str, stream: TextIO) -> None:
        if self._page is not None and stream is sys.stdout:
            self._page.append(text)
            return
        print(text, file=stream)

    def flush(self) -> None:
        """Flush stdout now, so that a closed pipe is noticed in time."""
        sys.stdout.flush()

    # -- answers, on stdout

    def data(self, verb: str, data: Any) -> None:
        """Print the JSON envelope of an answer."""
        answer = {"schema": f"orch.{verb}/1", "time": iso(time.time()), "data": data, "warnings": self._warnings}
        self._print(_encodable(sys.stdout, dump_line(answer)), sys.stdout)
        self.flush()

    def answer(self, verb: str, data: Any, text: str, *, note: str = "") -> None:
        """Print the answer as JSON, or else as text, with `note` on stderr."""
        if self.json:
            self.data(verb, data)
            return
        self.say(text)
        if note:
            self.note(note)

    def say(self, text: str, hang: int = 0) -> None:
        """Print a line of the answer as text. With --json print nothing, because only data may be on stdout.

        On a narrower terminal the line is folded between words and indented by its first `hang` characters.
        """
        if not self.json:
            self._sentences(text, sys.stdout, hang)

    def _sentences(self, text: str, stream: TextIO, hang: int = 0) -> None:
        width, text = _terminal_columns() if stream.isatty() else 0, self._in_own_time(text)
        lines = [piece for line in text.split("\n") for piece in wrap_line(line, width, hang)] if width else [text]
        self._print("\n".join(lines), stream)

    def raw(self, text: str) -> None:
        """Print a line of foreign text (a log, a script), without escape sequences and control characters."""
        self._print(plain(text), sys.stdout)

    def listing(
        self, verb: str, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], *, empty: str = ""
    ) -> None:  # fmt: skip
        """Print rows as the JSON answer, or as a table with `empty` as a note if there are no rows.

        Keys that begin with `_` are for the table only.
        """
        if self.json:
            self.data(verb, [{key: row[key] for key in row if not key.startswith("_")} for row in rows])
            return
        self.table(columns, rows)
        if empty and not rows:
            self.note(empty)

    def table(self, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], *, aligned: bool = False) -> None:
        """Print an aligned table on a terminal; otherwise print tab-separated values, complete and unformatted.

        `aligned`: print an aligned table everywhere, as part of a text page.
        """
        if not (self.terminal or aligned):
            self._print("\t".join(column.title for column in columns), sys.stdout)
            for row in rows:
                self._print("\t".join(_raw(row.get(column.key)) for column in columns), sys.stdout)
            return
        if rows:
            self._folded_table(columns, rows)

    def _folded_table(self, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> None:
        texts = [
            {column: self._in_own_time(one_line(column.show(row.get(column.key)))) for column in columns}
            for row in rows
        ]
        self._print("\n".join(table_lines(columns, texts, self.width, self._paint)), sys.stdout)

    def _paint(self, piece: str, text: str) -> str:
        """Return a piece of a cell in the colour for the cell's text. Titles, whose text is empty, are bold."""
        style = _STYLES.get(text, "") if text else _BOLD
        coloured = style and self.terminal and not self.colorless and os.environ.get("TERM") != "dumb"
        return f"\x1b[{style}m{piece}\x1b[0m" if coloured else piece

    def _console(self, stream: TextIO) -> Any:
        from rich.console import Console  # rich: only where it is used

        width = None if stream.isatty() else _PAGE
        return Console(file=stream, no_color=self.colorless, highlight=False, soft_wrap=False, width=width)

    @property
    def colorless(self) -> bool:
        return self.no_color or bool(os.environ.get("NO_COLOR"))

    # -- everything else, on stderr

    def note(self, text: str) -> None:
        """Print a note that is not part of the answer."""
        if not self.quiet:
            self._sentences(plain(text), sys.stderr)

    def warn(self, code: str, message: str) -> None:
        """Print a warning; with --json, add it to the envelope."""
        self._warnings.append({"code": code, "message": message})
        if not self.json:
            self._sentences(f"warning: {plain(message)}", sys.stderr)

    def error(self, code: str, what: str, where: str, hint: str) -> None:
        """Print the error, its location and the command to type."""
        if self.json:
            fields = {"code": code, "message": what, "where": where, "hint": hint}
            answer = json.dumps({"schema": "orch.error/1", "error": fields}, ensure_ascii=False)
            self._print(_encodable(sys.stdout, answer), sys.stdout)
            return
        lines = [f"error: {_readable(what)}", *(f"  {_readable(line)}" for line in (where, hint) if line)]
        self._sentences("\n".join(lines), sys.stderr)

    def report_interrupt(self) -> None:
        """Print the state after Ctrl-C, even with -q, since the run may continue."""
        what, _, hint = self.if_interrupted().partition("\n")
        if self.json:
            self.error("Interrupted", what, "", "; ".join(line.strip() for line in hint.splitlines()))
        elif what:
            self._print("\n".join((plain(what), *([plain(hint)] if hint else []))), sys.stderr)

    def when(self, moment: float | None) -> str:
        """Format a time, in local time or UTC."""
        if moment is None:
            return "-"
        zone = datetime.fromtimestamp(moment, UTC) if self.utc else datetime.fromtimestamp(moment).astimezone()
        return zone.strftime("%Y-%m-%d %H:%M:%S") + ("Z" if self.utc else "")

    def _in_own_time(self, text: str) -> str:
        return time_spans.show_moments(text, self.when)

    def clear_screen(self) -> None:
        """Clear the screen for the next page of --watch."""
        if self.terminal:
            sys.stdout.write("\x1b[H\x1b[2J")

    @contextmanager
    def live_page(self) -> Iterator[Callable[[Callable[[], None]], None]]:
        """Show a page that is redrawn in place. Yields a function that redraws it by calling a function that prints."""
        from rich.live import Live  # rich: only where it is used
        from rich.text import Text

        self._canvas = self._console(sys.stdout)
        with Live(console=self._canvas, auto_refresh=False) as live:

            def draw(page: Callable[[], None]) -> None:
                self._page = []
                try:
                    page()
                    text = Text.from_ansi("\n".join(self._page))
                finally:
                    self._page = None
                live.update(text, refresh=True)

            yield draw

    @property
    def remaining_space(self) -> tuple[int, int] | None:
        """Lines left in the live display, and its width in columns; None without a live display."""
        if self._page is None:
            return None
        from rich.text import Text  # rich: only where it is used

        used = sum(len(Text.from_ansi(line).wrap(self._canvas, self._canvas.width)) for line in self._page)
        return max(0, self._canvas.height - used), self._canvas.width

    @property
    def live(self) -> bool:
        """Whether progress bars and redrawn lines may be shown."""
        return sys.stderr.isatty() and not (self.json or self.quiet or self.no_progress)

    @contextmanager
    def bar(self, label: str, *, unit: str = "bytes") -> Iterator[Meter]:
        """Show a progress bar on a terminal. Yields a callback for (done, total)."""
        if not self.live:
            yield lambda _done, _total: None
            return
        from rich import progress  # rich: only where it is used

        parts: list[Any] = [progress.TextColumn("{task.description}"), progress.BarColumn()]
        if unit == "bytes":
            parts += [progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn()]
        else:
            parts += [progress.MofNCompleteColumn(), progress.TextColumn("{task.fields[extra]}")]
        with progress.Progress(*parts, progress.TimeRemainingColumn(), console=self._console(sys.stderr)) as bars:
            task = bars.add_task(label, total=None, extra="")
            yield lambda done, total: bars.update(task, completed=done, total=total)

    @contextmanager
    def ticker(self) -> Iterator["StatusLine"]:
        """Show a line that is redrawn, with permanent lines above it."""
        ticker = StatusLine(self)
        try:
            yield ticker
        finally:
            ticker.clear()


class StatusLine:
    """Status line of --follow, redrawn on a terminal and otherwise printed periodically."""

    EVERY = 10.0
    """Seconds between two lines if they cannot be redrawn."""

    def __init__(self, screen: Screen) -> None:
        self._screen, self._shown, self._next = screen, "", 0.0

    def update(self, text: str) -> None:
        """Show the newest state."""
        if self._screen.live:
            width = max(os.get_terminal_size(sys.stderr.fileno()).columns, _NARROWEST)
            self._shown = one_line(text)[: width - 1]
            sys.stderr.write(f"\r\x1b[K{self._shown}")
            sys.stderr.flush()
        elif text != self._shown and time.monotonic() >= self._next:
            self._shown, self._next = text, time.monotonic() + self.EVERY
            self._screen.note(text)

    def print_above(self, text: str) -> None:
        """Write a permanent line above the status line."""
        shown = self._shown
        self.clear()
        self._screen.note(text)
        if shown and self._screen.live:
            self.update(shown)

    def clear(self) -> None:
        if self._screen.live and self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = ""


_BOLD = "1"
_STYLES = {
    "SUCCEEDED": "32", "RUNNING": "1", "FAILED": "1;31", "HELD": "1;35", "RECOVERING": "35", "CANCELLED": "2",
    "CORRUPT": "1;31", "SUSPECT": "35", "LOST": "31",
}  # fmt: skip
"""Colours that are legible on dark and light backgrounds: no yellow, no cyan."""
