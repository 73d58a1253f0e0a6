"""Where training stands, by the newest whole line of the metrics and by the heartbeat."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import number, open_regular
from trainer.contract.heartbeat import Heartbeat
from trainer.contract.run_dir import AttemptDir

METRICS_TAIL = 16 * 1024
"""Bytes of the metrics file that are sure to hold one whole line."""


@dataclass(frozen=True, kw_only=True)
class KnownProgress:
    """The newest trained step, its loss, and the last step as a user's own program says it (0: it does not).

    `saved`: the newest checkpoint by the heartbeat, for ranks' events of commits may be lost (0: none).
    """

    step: int
    loss: float | None = None
    total: int = 0
    saved: int = 0


def progress(place: AttemptDir) -> KnownProgress | None:
    """Newest trained step and its loss, from the metrics' last line, else from the heartbeat."""
    line, heartbeat = last_line(place.metrics), _heartbeat(place)
    # A full disk takes no more lines, while the heartbeat is overwritten.
    newer = heartbeat.step or 0 if heartbeat is not None and heartbeat.saves_failing else 0
    saved = heartbeat.saved_step if heartbeat is not None else 0
    if line is not None and isinstance(line.get("step"), int) and line["step"] >= newer:
        return KnownProgress(step=line["step"], loss=_loss(line.get("loss")), saved=saved)
    # Step 0 says that no rank has told its step yet, not that the run is back at its beginning.
    if heartbeat is None or not heartbeat.step:
        return None
    return KnownProgress(step=heartbeat.step, loss=heartbeat.loss, total=heartbeat.total_steps, saved=saved)


def _heartbeat(place: AttemptDir) -> Heartbeat | None:
    try:
        return Heartbeat.read(place.heartbeat)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


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
