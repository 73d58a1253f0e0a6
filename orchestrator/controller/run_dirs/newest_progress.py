"""Where training stands, by the newest whole line of the metrics and by the heartbeat."""

import json
import os
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import number, open_regular
from orchestrator.controller.run_dirs.collect_evidence import Heartbeat
from trainer.contract.run_dir import AttemptDir

METRICS_TAIL = 16 * 1024
"""Bytes of the metrics file that are sure to hold one whole line."""


def progress(place: AttemptDir) -> tuple[int | None, float | None]:
    """Newest trained step and its loss, from the metrics' last line, else from the heartbeat."""
    line = last_line(place.metrics)
    if line is not None and isinstance(line.get("step"), int):
        return line["step"], _loss(line.get("loss"))
    try:
        heartbeat = Heartbeat.read(place.heartbeat)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None, None
    # Step 0 says that no rank has told its step yet, not that the run is back at its beginning.
    return (heartbeat.step, heartbeat.loss) if heartbeat.step else (None, None)


def _loss(value: Any) -> float | None:
    """A loss as `dump_line` writes it; None for what is none."""
    try:
        return None if value is None else number(value)
    except (KeyError, TypeError, ValueError):
        return None


def last_line(path: Path) -> dict[str, Any] | None:
    """The last whole line of a file of JSON lines; None when there is none."""
    try:
        with open_regular(path) as stream:
            stream.seek(max(0, os.fstat(stream.fileno()).st_size - METRICS_TAIL))
            block = stream.read(METRICS_TAIL)
        lines = block[: block.rfind(b"\n") + 1].splitlines()
        found = json.loads(lines[-1]) if lines else None
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
