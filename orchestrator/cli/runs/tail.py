"""Files that grow while they are read: what is new in them, and which attempts may still write any."""

from pathlib import Path

from trainer.contract.run_dir import AttemptDir, RunDir

TAIL = 64 * 1024
"""Bytes at the end of a file in which its newest lines are."""


def file_size(path: Path) -> int:
    """Its bytes; 0 while there is no such file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def tail_offset(path: Path) -> int:
    """Where to begin for the newest lines alone; the first of them may be torn."""
    return max(0, file_size(path) - TAIL)


class OpenAttempts:
    """Attempts that may still tell something: one that a later one follows is read once more, then left alone."""

    def __init__(self, place: RunDir, *, newest: bool = False) -> None:
        """`newest`: all but the newest attempt are left alone from the beginning."""
        self._place = place
        attempts = place.all_attempts() if newest else []
        self._oldest = self._begun = attempts[-1].number if attempts else 0

    def attempts(self) -> list[AttemptDir]:
        """Those to be read now, oldest first."""
        found = [attempt for attempt in self._place.all_attempts() if attempt.number >= self._oldest]
        self._oldest = self._begun
        return found

    def mark_written(self, attempt: AttemptDir) -> None:
        """This one has written something: those before it are over."""
        self._begun = max(self._begun, attempt.number)
