"""Polling for events; measured times come from records of programs, never from the polling."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Found = TypeVar("Found")


class NotInTimeError(Exception):
    """The awaited event did not happen in time."""


def until(look: Callable[[], Found | None], seconds: float, what: str) -> Found:
    """Return the first result of `look`; raises NotInTimeError."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        if (found := look()) is not None:
            return found
        time.sleep(0.1)
    raise NotInTimeError(f"{what}: not within {seconds:.0f} s")


def lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a JSON lines file; empty if the file is missing."""
    if not path.exists():
        return []
    told = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in told if line.endswith("\n") and line.strip()]
