"""Queue of events for the journal, which keeps their order and retries writes while a disk is full."""

import logging
import threading
from collections.abc import Callable
from typing import Any

_log = logging.getLogger(__name__)

EmitEvent = Callable[[str, dict[str, Any]], None]
"""Callback that takes an event's kind and its data."""


def emit_nothing(kind: str, data: dict[str, Any]) -> None:
    """Discard an event. Used on ranks that do not report, because one rank reports for all."""


class EventSink:
    """Serializes events from several threads. `on_event` is called by one thread at a time, in order."""

    def __init__(self, on_event: EmitEvent) -> None:
        self._on_event = on_event
        self._pending: list[tuple[str, dict[str, Any]]] = []
        self._lock = threading.RLock()

    def emit(self, kind: str, data: dict[str, Any]) -> None:
        with self._lock:
            self._pending.append((kind, data))
            self.flush()

    def flush(self) -> None:
        """Retry writing the pending events."""
        with self._lock:
            try:
                while self._pending:
                    self._on_event(*self._pending[0])
                    self._pending.pop(0)
            except OSError as error:
                # A disk that is too full for a checkpoint may be too full for its event as well. The next call retries.
                _log.warning("event %s could not be written yet: %s", self._pending[0][0], error)

    def close(self) -> None:
        """Write the remaining events. Raises the error if one cannot be written."""
        with self._lock:
            for kind, data in self._pending:
                self._on_event(kind, data)
