"""Search for the newest line that matches a user's `progress.pattern`, in a separate process.
Python's engine holds the GIL while it matches, and matching a line may never finish, which would block the whole agent.
Uses only the standard library: `python -I -S match_step.py PATTERN < TEXT`.
"""

import json
import re
import sys
from collections.abc import Iterator

_LINES, _WIDTH = 500, 1000
"""Maximum number of lines matched, and of characters of each."""


def find_step(text: str, pattern: str) -> dict[str, str] | None:
    """Return the groups of the newest matching line, progress bars included, or None if no line matches."""
    compiled = re.compile(pattern)
    for line in list(_newest_lines(text))[:_LINES]:
        found = compiled.search(line[:_WIDTH])
        groups = {name: value or "" for name, value in found.groupdict().items()} if found is not None else {}
        if is_whole(groups.get("step", "")):
            return groups
    return None


def is_whole(text: str) -> bool:
    """Return whether the text is an integer of at most 64 bits, such as `12,000`."""
    digits = text.replace(",", "")
    return digits.isascii() and digits.isdigit() and len(digits) < 19


def _newest_lines(text: str) -> Iterator[str]:
    """Return the lines, newest first, split at newlines and carriage returns: each progress bar state counts."""
    return reversed(re.split(r"[\r\n]+", text))


if __name__ == "__main__":
    json.dump(find_step(sys.stdin.buffer.read().decode(errors="replace"), sys.argv[1]), sys.stdout)
