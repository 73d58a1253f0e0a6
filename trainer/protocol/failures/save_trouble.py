"""Failing saves during training, described in one line of the heartbeat."""

import re
from pathlib import PurePosixPath
from typing import Any

from checkpointing.format.commit import parse_name
from checkpointing.storage.storage_errors import disk_words
from trainer.protocol.events import EventKind

SAVES_FAILING = "saves failing"
"""Prefix of the line when saves themselves fail, as opposed to copying them."""
_LONGEST = 300
_OS_ERROR = re.compile(r"\[Errno (\d+)\] [^:']+: '([^']+)'")
_FAILED = (EventKind.CHECKPOINT_FAILED, EventKind.CHECKPOINT_RETRIED, EventKind.CHECKPOINT_STUCK)
_WORKED = (EventKind.CHECKPOINT_COMMITTED, EventKind.CHECKPOINT_FLUSHED)


class SaveTrouble:
    """State of a checkpointer's saves and copies to other tiers, from its events. `text` is empty while they work."""

    def __init__(self) -> None:
        self._failing: dict[str, tuple[int, str]] = {}  # by tier; the first tier's name is empty
        self.size = 0
        """Size in bytes of the newest checkpoint that could not be saved, if known."""

    def note(self, kind: str, data: dict[str, Any]) -> bool:
        """Process an event, and return whether it concerns saving."""
        tier = str(data.get("tier") or "")
        if kind in _FAILED:
            since, _ = self._failing.get(tier, (int(data["step"]), ""))
            self._failing[tier] = since, short_reason(str(data["reason"]))
            self.size = int(data.get("bytes") or 0) or self.size
        elif kind in _WORKED:
            self._failing.pop(tier, None)
        return kind in (*_FAILED, *_WORKED)

    @property
    def text(self) -> str:
        """Return the line, such as `saves failing since step 30: disk full (/runs/gpt-1/checkpoints)`."""
        lines = [
            f"{f'copies to {tier} failing' if tier else SAVES_FAILING} since step {since}: {reason}"
            for tier, (since, reason) in sorted(self._failing.items())
        ]
        return "; ".join(lines)


def short_reason(reason: str) -> str:
    """Return the disk error and the folder for a failed save, or the shortened reason if it is not a disk error."""
    found = _OS_ERROR.search(reason)
    words = disk_words(int(found[1])) if found else ""
    if found and words:
        return f"{words} ({_folder(found[2])})"
    line = " ".join(reason.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


def _folder(path: str) -> str:
    parts = PurePosixPath(path)
    own = next((parent for parent in (parts, *parts.parents) if parse_name(parent.name) is not None), parts)
    return str(own.parent)
