"""Layout of tables and sentences for a page width. Words are never broken. Pure."""

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.protocol.cut_text import cut

WORDS = 30
"""Preferred minimum width of a text column in characters."""
_LONG = 3 * WORDS
"""Length above which the last text of a row is printed below it if the table is wider than the page."""
_GAP, _INDENT = "  ", "    "
_PIECE = 44
"""Maximum length of a command or a word that stays on one line if it fits."""
_COMMAND = r"`[^`]+`\S*|orch(?: [\w@.=/+-]+){1,4}\S*"
_PIECES = re.compile(rf"{_COMMAND}|\S+")


def as_text(value: Any) -> str:
    """Return the default text of a value."""
    if value is None:
        return "-"
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


MOST = 300
"""Maximum number of characters in a sentence in a table of many runs."""


def shorten_text(text: str) -> str:
    """Return the first clauses of a text, and how many characters are left out; `orch show` prints the whole text."""
    kept = cut(text, MOST)
    left = len(text) - len(kept.removesuffix(" ..."))
    return kept if kept == text else f"{kept} ({left} more characters: orch show)"


@dataclass(frozen=True)
class Column:
    """A column: its title, the key of its values in a row, and their format."""

    title: str
    key: str
    show: Callable[[Any], str] = as_text
    right: bool = False
    drop_order: int = 0  # on a narrow terminal the highest number is dropped first; 0 is never dropped
    wraps: bool = False  # text that may be folded over several lines; the last column is always folded


Cells = Mapping[Column, Sequence[str]]


@dataclass(frozen=True)
class TableLayout:
    """Visible columns and their widths. Cells in column `below` longer than `most` are printed below their rows."""

    widths: dict[Column, int]
    below: Column | None = None
    most: int = 0


def cell_width(text: str) -> int:
    """Return the number of terminal columns that a text occupies."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(char) in ("W", "F") for char in text)
    return len(text) + wide - sum(unicodedata.combining(char) > 0 for char in text)


def layout(cells: Cells, width: int) -> TableLayout:
    """Choose the columns: drop empty ones, then optional ones, until the text columns have room for some words.

    A long text of the last column is printed below its row if the column is too narrow. If it cannot hold even a few
    words, all its texts are printed below.
    """
    kept = [column for column, texts in cells.items() if not texts or any(text not in ("", "-") for text in texts)]
    kept = kept or list(cells)
    if sum(_natural(column, cells) for column in kept) + len(_GAP) * (len(kept) - 1) <= width:
        return TableLayout({column: _natural(column, cells) for column in kept})
    last = kept[-1]
    below = last if len(kept) > 2 and any(cell_width(text) > WORDS for text in cells[last]) else None
    short = {**cells, last: [text for text in cells[last] if below is None or cell_width(text) <= _LONG]}
    chosen = _without_spare(kept, short, width, last_folds=True)
    in_column = any(text not in ("", "-") for text in short[last])
    if below is None or (in_column and _needed_width(chosen, short, last_folds=True) <= width):
        return TableLayout(_shared_out(chosen, short, width, last_folds=True), below, _LONG)
    chosen = _without_spare(kept[:-1], cells, width, last_folds=False)
    return TableLayout(_shared_out(chosen, cells, width, last_folds=False), below)


def _without_spare(columns: Sequence[Column], cells: Cells, width: int, *, last_folds: bool) -> list[Column]:
    kept = list(columns)
    while _needed_width(kept, cells, last_folds=last_folds) > width and any(column.drop_order for column in kept):
        kept.remove(max(kept, key=lambda column: column.drop_order))
    return kept


def _folding(columns: Sequence[Column], last_folds: bool) -> set[Column]:
    return {column for column in columns if column.wraps or (last_folds and column is columns[-1])}


def _natural(column: Column, cells: Cells) -> int:
    return max(map(cell_width, (column.title, *cells[column])))


def _least(column: Column, cells: Cells) -> int:
    """Return the minimum width of a text column: a few words, and its longest piece."""
    longest = max((cell_width(piece) for text in cells[column] for piece in _PIECES.findall(text)), default=0)
    return min(_natural(column, cells), max(WORDS, cell_width(column.title), min(longest, _PIECE)))


def _needed_width(columns: Sequence[Column], cells: Cells, *, last_folds: bool) -> int:
    folding = _folding(columns, last_folds)
    widths = (_least(column, cells) if column in folding else _natural(column, cells) for column in columns)
    return sum(widths) + len(_GAP) * (len(columns) - 1)


def _shared_out(columns: Sequence[Column], cells: Cells, width: int, *, last_folds: bool) -> dict[Column, int]:
    """Return natural widths if they fit; otherwise text columns share the space left by the others."""
    folding = _folding(columns, last_folds)
    widths = {column: _natural(column, cells) for column in columns}
    spare = width - len(_GAP) * (len(columns) - 1) - sum(widths.values())
    for column in sorted(folding, key=lambda column: -widths[column]):
        if spare >= 0:
            break
        given = max(_least(column, cells), widths[column] + spare)
        spare += widths[column] - given
        widths[column] = given
    return widths  # if even the minimum does not fit, lines are too long, but they can still be copied


def table_lines(
    columns: Sequence[Column], rows: Sequence[Mapping[Column, str]], width: int, paint: Callable[[str, str], str]
) -> list[str]:
    """Return the lines of a table. `paint` colours a piece of a cell by its whole text (empty for a title)."""
    cells = {column: [row[column] for row in rows] for column in columns}
    plan = layout(cells, width)
    lines = _row_lines(plan, {column: column.title for column in plan.widths}, lambda piece, _: paint(piece, ""))
    for index in range(len(rows)):
        texts = {column: cells[column][index] for column in plan.widths}
        apart = cells[plan.below][index] if plan.below is not None else ""
        apart = apart if cell_width(apart) > plan.most and apart != "-" else ""
        lines += _row_lines(plan, {column: "" if text == apart else text for column, text in texts.items()}, paint)
        lines += wrap_line(_INDENT + apart, width) if apart else []
    return lines


def _row_lines(plan: TableLayout, texts: Mapping[Column, str], paint: Callable[[str, str], str]) -> list[str]:
    folded = {column: folded_text(text, plan.widths[column]) or [""] for column, text in texts.items()}
    lines = []
    for index in range(max(map(len, folded.values()))):
        line = []
        for column, pieces in folded.items():
            piece = pieces[index] if index < len(pieces) else ""
            space = " " * (plan.widths[column] - cell_width(piece))
            shown = paint(piece, texts[column]) if piece else ""
            line.append(space + shown if column.right else shown + space)
        lines.append(_GAP.join(line).rstrip())
    return lines


def wrap_line(text: str, width: int, hang: int = 0) -> list[str]:
    """Fold one line of text. Further lines are indented like the first one, plus `hang` characters."""
    edge = len(text) - len(text.lstrip()) + hang
    if cell_width(text) <= width or edge > width // 2:
        return [text]
    first, *rest = folded_text(text[edge:].strip(), width - edge)
    return [text[:edge] + first, *(" " * edge + piece for piece in rest)]


def folded_text(text: str, width: int) -> list[str]:
    """Fold a text into lines of at most `width`, or one longer word. A command that fits stays on one line."""
    if cell_width(text) <= width:
        return [text] if text else []
    lines: list[str] = []
    here = 0  # start of the current line
    end = 0  # end of the last piece that fits on it
    for start, stop in _pieces(text, width):
        if cell_width(text[here:stop]) > width and end > here:
            lines.append(text[here:end].rstrip())
            here = start
        end = stop
    return [*lines, text[here:end].rstrip()]


def _pieces(text: str, width: int) -> list[tuple[int, int]]:
    """Return the spans of unbreakable pieces: commands that fit, and words."""
    found = []
    for match in _PIECES.finditer(text):
        if cell_width(match[0]) <= min(width, _PIECE):
            found.append(match.span())
            continue
        words = re.finditer(r"\S+", match[0])
        found += [(match.start() + word.start(), match.start() + word.end()) for word in words]
    return found
