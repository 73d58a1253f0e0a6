"""Events on their way to the journal: in order, and never lost because a disk was full for a moment."""

import logging
import threading
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)

EmitEvent = Callable[[str, dict[str, Any]], None]
"""Takes an event's kind and its data."""


def emit_nothing(kind: str, data: dict[str, Any]) -> None:
    """For the ranks that do not report: one rank reports for all."""


class EventSink:
    """Called by several threads; `on_event` is called by one at a time, in the order of the events."""

    def __init__(self, on_event: EmitEvent) -> None:
        self._on_event = on_event
        self._pending: list[tuple[str, dict[str, Any]]] = []
        self._lock = threading.RLock()

    def emit(self, kind: str, data: dict[str, Any]) -> None:
        with self._lock:
            self._pending.append((kind, data))
            self.flush()

    def flush(self) -> None:
        """Try again to write what could not be written."""
        with self._lock:
            try:
                while self._pending:
                    self._on_event(*self._pending[0])
                    self._pending.pop(0)
            except OSError as error:
                # The disk that is too full for a checkpoint may be too full for its event: the next call tries again.
                _log.warning("event %s could not be written yet: %s", self._pending[0][0], error)

    def close(self) -> None:
        """Raises what keeps an event from being written."""
        with self._lock:
            for kind, data in self._pending:
                self._on_event(kind, data)
