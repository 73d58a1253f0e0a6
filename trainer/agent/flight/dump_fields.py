"""Fields of torch's dumps, as far as they can be believed: a process that dies may have written anything."""

import sys
from collections.abc import Mapping
from typing import Any

UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""What reading a malformed record raises."""
_LARGEST = 2**63 - 1
_LONGEST = 200
"""Characters of a word that are kept."""


def number(value: Any, otherwise: int = 0) -> int:
    """A number that torch counts with; `otherwise` for what is none."""
    try:
        found = int(value)
    except (TypeError, ValueError, OverflowError):
        return otherwise
    return found if -_LARGEST <= found <= _LARGEST else otherwise


def word(value: Any) -> str:
    """The text of a value, cut; equal ones are one object, for thousands of entries say the same."""
    return sys.intern((value if type(value) is str else str(value))[:_LONGEST])


def group_name(entry: Mapping[str, Any]) -> str:
    """The name of an entry's group; its number in that process where it has none."""
    names = entry.get("process_group")
    return word(names[0] if isinstance(names, list | tuple) and names else entry.get("pg_id", "?"))
