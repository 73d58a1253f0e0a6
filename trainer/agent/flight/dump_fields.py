"""Fields of torch's dumps, sanitized: a dying process may have written anything."""

import sys
from collections.abc import Mapping
from typing import Any

UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError, MemoryError)
"""Exceptions raised by reading a malformed record."""
_LARGEST = 2**63 - 1
_LONGEST = 200
"""Maximum characters kept of a word."""


def number(value: Any, otherwise: int = 0) -> int:
    """Return an integer within torch's range; `otherwise` for any other value."""
    try:
        found = int(value)
    except (TypeError, ValueError, OverflowError):
        return otherwise
    return found if -_LARGEST <= found <= _LARGEST else otherwise


def word(value: Any) -> str:
    """Return the text of a value, truncated and interned, since thousands of entries share it."""
    return sys.intern((value if type(value) is str else str(value))[:_LONGEST])


def group_name(entry: Mapping[str, Any]) -> str:
    """Return the name of an entry's group, or its process-local number if it has no name."""
    names = entry.get("process_group")
    return word(names[0] if isinstance(names, list | tuple) and names else entry.get("pg_id", "?"))
