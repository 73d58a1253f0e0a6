"""Looking until something has happened: what is measured are times that programs wrote down, never those of looking."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

Found = TypeVar("Found")


class NotInTimeError(Exception):
    """What was waited for did not happen."""


def until(look: Callable[[], Found | None], seconds: float, what: str) -> Found:
    """The first thing that `look` finds; raises NotInTimeError."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        if (found := look()) is not None:
            return found
        time.sleep(0.1)
    raise NotInTimeError(f"{what}: not within {seconds:.0f} s")


def lines(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a file of JSON lines; none when it is not there."""
    if not path.exists():
        return []
    told = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in told if line.endswith("\n") and line.strip()]
