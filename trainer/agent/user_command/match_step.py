"""Finds the newest line that a user's `progress.pattern` matches, in a separate process.

A pattern may run for ever on a line while Python's engine holds the GIL, which would block the whole agent. The program
needs the standard library alone: `python -I -S match_step.py PATTERN < TEXT`.
"""

import json
import re
import sys
from collections.abc import Iterator

_LINES, _WIDTH = 500, 1000
"""Maximum number of lines, and of characters of each, that are matched."""


def find_step(text: str, pattern: str) -> dict[str, str] | None:
    """Return the groups of the newest matching line, progress bars included; None without a match."""
    compiled = re.compile(pattern)
    for line in list(_newest_lines(text))[:_LINES]:
        found = compiled.search(line[:_WIDTH])
        groups = {name: value or "" for name, value in found.groupdict().items()} if found is not None else {}
        if is_whole(groups.get("step", "")):
            return groups
    return None


def is_whole(text: str) -> bool:
    """Whether the text is a whole number of at most 64 bits, such as `12,000`."""
    digits = text.replace(",", "")
    return digits.isascii() and digits.isdigit() and len(digits) < 19


def _newest_lines(text: str) -> Iterator[str]:
    """Split at line ends and carriage returns: each state of a progress bar is a line."""
    return reversed(re.split(r"[\r\n]+", text))


if __name__ == "__main__":
    json.dump(find_step(sys.stdin.buffer.read().decode(errors="replace"), sys.argv[1]), sys.stdout)
