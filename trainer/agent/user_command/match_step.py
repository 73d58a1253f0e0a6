"""Finds the newest line that a user's `progress.pattern` matches, in a process of its own.

A pattern may take for ever on a line, and Python's engine holds the lock of the interpreter meanwhile: in the agent it
would stop everything. Run as a program of the standard library alone: `python -I -S match_step.py PATTERN < TEXT`.
"""

import json
import re
import sys
from collections.abc import Iterator

_LINES, _WIDTH = 500, 1000
"""So many lines, and so much of each, are matched."""


def find_step(text: str, pattern: str) -> dict[str, str] | None:
    """The groups of the newest line that matches, progress bars included; None when none does."""
    compiled = re.compile(pattern)
    for line in list(_newest_lines(text))[:_LINES]:
        found = compiled.search(line[:_WIDTH])
        groups = {name: value or "" for name, value in found.groupdict().items()} if found is not None else {}
        if is_whole(groups.get("step", "")):
            return groups
    return None


def is_whole(text: str) -> bool:
    """Whether it is a whole number, `12,000` included, that fits into 64 bits."""
    digits = text.replace(",", "")
    return digits.isascii() and digits.isdigit() and len(digits) < 19


def _newest_lines(text: str) -> Iterator[str]:
    """A bar is drawn over in place: each of its states is a line."""
    return reversed(re.split(r"[\r\n]+", text))


if __name__ == "__main__":
    json.dump(find_step(sys.stdin.buffer.read().decode(errors="replace"), sys.argv[1]), sys.stdout)
