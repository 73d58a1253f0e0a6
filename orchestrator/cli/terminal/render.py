"""The only place that prints: answers on stdout, everything else on stderr; tables, JSON, errors, progress."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

from checkpointing.storage.durable import dump_line

_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[PX^_][^\x1b]*(?:\x1b\\)?|[@-Z\\-_])")
_CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)))
_WORDS = 30
"""Characters that a column of sentences should have before it is folded."""
_NARROWEST = 40
"""Columns of a table at least: a terminal that is narrower, or says so, folds its lines."""
_PAGE = 160
"""Columns of a page that goes into a file or a pipe."""
Meter = Callable[[int, int], None]
"""Called with what is done and what there is to do."""


def plain(text: str) -> str:
    """`text` without escape sequences and control characters, so that no log line can drive a terminal."""
    return _ESCAPES.sub("", text).translate(_CONTROLS)


def one_line(text: str) -> str:
    """`plain`, with line breaks and tabs turned into spaces."""
    return " ".join(plain(text).split())


def size(count: float | None) -> str:
    """Bytes for people: `96.4 GiB`."""
    if count is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError("unreachable")


def span(seconds: float | None) -> str:
    """A duration for people: `45s`, `6m10s`, `7h02m`, `3d04h`."""
    if seconds is None:
        return "-"
    whole = max(0, int(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def iso(moment: float | None) -> str | None:
    """Seconds since the epoch as UTC ISO 8601, as every JSON answer has it."""
    if moment is None:
        return None
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


def count(number: int | float | None) -> str:
    """A number with thin groups for people: `61 200`."""
    return "-" if number is None else f"{number:,}".replace(",", " ")


def progress(step: int | None, total: int | None, between: str = "/") -> str:
    """How far a run is: of a user's own program the end is not known, and 0 says that its step is not either."""
    return f"{count(step)}{between}{count(total)}" if total else count(step or None)


def decimal(number: float | str | None, digits: int = 4) -> str:
    """A loss or rate for people; the words nan and inf as they are."""
    return "-" if number is None else (number if isinstance(number, str) else f"{number:.{digits}f}")


def host_list(names: Sequence[str]) -> str:
    """Host names as a host list where that is shorter: `gpu[001-016]`."""
    if len(names) < 3:
        return ",".join(names)
    from orchestrator.scheduler.slurm_text import fold_nodes  # brings ClusterShell: only for tables of many nodes

    return fold_nodes(tuple(names))


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _raw(value: Any) -> str:
    """One TSV cell: nothing shortened, no tab or line break."""
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return one_line(value) if isinstance(value, str) else dump_line(value).strip('"')


@dataclass(frozen=True)
class Column:
    """One column: its title, the key of the row it shows, and how people see the value."""

    title: str
    key: str
    show: Callable[[Any], str] = _text
    right: bool = False
    drop_order: int = 0  # on a narrow terminal the column with the highest number goes first; 0 stays
    wraps: bool = False  # sentences: folded over several lines where there is no room; the last column always is


def fitting_columns(cells: Mapping[Column, Sequence[str]], width: int) -> list[Column]:
    """The columns that fit: empty ones go, then spare ones, until those that fold have room for some words."""
    kept = [column for column, texts in cells.items() if not texts or any(text not in ("", "-") for text in texts)]
    kept = kept or list(cells)

    def needed() -> int:
        wide = {column: max(map(len, (column.title, *cells[column]))) for column in kept}
        folding = {column for column in kept if column.wraps or column is kept[-1]}
        return sum(min(wide[each], _WORDS) if each in folding else wide[each] for each in kept) + 2 * len(kept)

    while needed() > width and any(column.drop_order for column in kept):
        kept.remove(max(kept, key=lambda column: column.drop_order))
    return kept


class Screen:
    """Where a command's answer goes, and how the global options ask for it."""

    def __init__(self) -> None:
        self.json = self.quiet = self.verbose = self.no_color = self.no_progress = self.utc = self.debug = False
        self._warnings: list[dict[str, str]] = []
        self._page: list[str] | None = None  # lines of a picture that is drawn over
        self._canvas: Any = None  # the console that it is drawn on

    @property
    def terminal(self) -> bool:
        """Whether a person reads stdout."""
        return sys.stdout.isatty() and not self.json

    def _print(self, text: str, stream: TextIO) -> None:
        if self._page is not None and stream is sys.stdout:
            self._page.append(text)
            return
        print(text, file=stream)

    def flush(self) -> None:
        """Push everything out now, so that a reader that went away is noticed in time."""
        sys.stdout.flush()

    # -- answers, on stdout

    def data(self, verb: str, data: Any) -> None:
        """The JSON envelope of an answer."""
        answer = {"schema": f"orch.{verb}/1", "time": iso(time.time()), "data": data, "warnings": self._warnings}
        self._print(dump_line(answer), sys.stdout)
        self.flush()

    def say(self, text: str) -> None:
        """A line of the answer for people; nothing with --json, where only data may be on stdout."""
        if not self.json:
            self._print(text, sys.stdout)

    def raw(self, text: str) -> None:
        """A line of somebody else's text (a log, a script), without what could drive the terminal."""
        self._print(plain(text), sys.stdout)

    def table(self, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], *, aligned: bool = False) -> None:
        """A table for people on a terminal; tab-separated values, complete and unformatted, anywhere else.

        `aligned`: part of a page that is for people wherever it goes.
        """
        if not (self.terminal or aligned):
            self._print("\t".join(column.title for column in columns), sys.stdout)
            for row in rows:
                self._print("\t".join(_raw(row.get(column.key)) for column in columns), sys.stdout)
            return
        if rows:
            self._rich_table(columns, rows)

    def _rich_table(self, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> None:
        from rich.table import Table  # rich costs 60 ms: only where a person sees it
        from rich.text import Text

        console = self._console(sys.stdout)
        console.width = max(console.width, _NARROWEST)
        cells = {column: [one_line(column.show(row.get(column.key))) for row in rows] for column in columns}
        kept = fitting_columns(cells, console.width)
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for column in kept:
            wraps = column.wraps or column is kept[-1]
            table.add_column(
                column.title, justify="right" if column.right else "left", no_wrap=not wraps,
                overflow="fold" if wraps else "ellipsis",
            )  # fmt: skip
        for index in range(len(rows)):
            texts = (cells[column][index] for column in kept)
            table.add_row(*(Text(text, style=_STYLES.get(text, "")) for text in texts))
        with console.capture() as capture:
            console.print(table)
        self._print("\n".join(line.rstrip() for line in capture.get().splitlines()), sys.stdout)

    def _console(self, stream: TextIO) -> Any:
        from rich.console import Console  # as above

        width = None if stream.isatty() else _PAGE
        return Console(file=stream, no_color=self.colorless, highlight=False, soft_wrap=False, width=width)

    @property
    def colorless(self) -> bool:
        return self.no_color or bool(os.environ.get("NO_COLOR"))

    # -- everything else, on stderr

    def note(self, text: str) -> None:
        """Something worth knowing that is not the answer."""
        if not self.quiet:
            self._print(plain(text), sys.stderr)

    def warn(self, code: str, message: str) -> None:
        """Something a person should look at; in JSON it stands in the envelope."""
        self._warnings.append({"code": code, "message": message})
        if not self.json:
            self._print(f"warning: {plain(message)}", sys.stderr)

    def error(self, code: str, what: str, where: str, hint: str) -> None:
        """What went wrong, where, and what to type."""
        if self.json:
            fields = {"code": code, "message": what, "where": where, "hint": hint}
            self._print(json.dumps({"schema": "orch.error/1", "error": fields}, ensure_ascii=False), sys.stdout)
            return
        lines = [f"error: {plain(what)}", *(f"  {plain(line)}" for line in (where, hint) if line)]
        self._print("\n".join(lines), sys.stderr)

    def when(self, moment: float | None) -> str:
        """A moment for people, in local time or UTC."""
        if moment is None:
            return "-"
        zone = datetime.fromtimestamp(moment, UTC) if self.utc else datetime.fromtimestamp(moment).astimezone()
        return zone.strftime("%Y-%m-%d %H:%M:%S") + ("Z" if self.utc else "")

    def clear_screen(self) -> None:
        """Start the screen afresh for the next picture of --watch."""
        if self.terminal:
            sys.stdout.write("\x1b[H\x1b[2J")

    @contextmanager
    def live_page(self) -> Iterator[Callable[[Callable[[], None]], None]]:
        """A page that is drawn over in place; yields what to call with a function that says the page."""
        from rich.live import Live  # as above
        from rich.text import Text

        canvas = self._console(sys.stdout)
        with Live(console=canvas, auto_refresh=False) as live:

            def draw(page: Callable[[], None]) -> None:
                self._page, self._canvas = [], canvas
                try:
                    page()
                    text = Text.from_ansi("\n".join(self._page))
                finally:
                    self._page = self._canvas = None
                live.update(text, refresh=True)

            yield draw

    @property
    def remaining_space(self) -> tuple[int, int] | None:
        """Lines that are left below what the picture says by now, and columns; None for a page that may be long."""
        if self._page is None:
            return None
        from rich.text import Text  # as above

        used = sum(len(Text.from_ansi(line).wrap(self._canvas, self._canvas.width)) for line in self._page)
        return max(0, self._canvas.height - used), self._canvas.width

    @property
    def live(self) -> bool:
        """Whether bars and lines that are drawn over may be shown."""
        return sys.stderr.isatty() and not (self.json or self.quiet or self.no_progress)

    @contextmanager
    def bar(self, label: str, *, unit: str = "bytes") -> Iterator[Meter]:
        """A progress bar on a terminal; yields what to call with (done, total)."""
        if not self.live:
            yield lambda _done, _total: None
            return
        from rich import progress  # as above

        parts: list[Any] = [progress.TextColumn("{task.description}"), progress.BarColumn()]
        if unit == "bytes":
            parts += [progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn()]
        else:
            parts += [progress.MofNCompleteColumn(), progress.TextColumn("{task.fields[extra]}")]
        with progress.Progress(*parts, progress.TimeRemainingColumn(), console=self._console(sys.stderr)) as bars:
            task = bars.add_task(label, total=None, extra="")
            yield lambda done, total: bars.update(task, completed=done, total=total)

    @contextmanager
    def ticker(self) -> Iterator["Ticker"]:
        """One line that is drawn over, with lines that stay above it."""
        ticker = Ticker(self)
        try:
            yield ticker
        finally:
            ticker.clear()


class Ticker:
    """The moving line of --follow: drawn over on a terminal, written now and then elsewhere."""

    EVERY = 10.0
    """Seconds between two lines where nothing can be drawn over."""

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
        """Write a line that stays."""
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


_STYLES = {
    "SUCCEEDED": "green", "RUNNING": "cyan", "FAILED": "bold red", "HELD": "bold yellow", "RECOVERING": "yellow",
    "CANCELLED": "dim", "CORRUPT": "bold red", "SUSPECT": "yellow", "LOST": "red",
}  # fmt: skip
