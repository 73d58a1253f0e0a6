"""The lines of a metrics file, one by one: a long run has a million of them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import open_regular


def metrics_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every whole line with its step; nothing of a file that is not there, or not visible."""
    try:
        stream = open_regular(path)
    except OSError:
        return
    with stream:
        for line in stream:
            try:
                fields = json.loads(line)
                yield int(fields["step"]), fields
            except (ValueError, KeyError, TypeError, OverflowError):
                continue  # torn by a kill, or of a version that writes something else
