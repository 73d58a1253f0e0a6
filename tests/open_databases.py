"""Warning for every unclosed SQLite connection, as in Python 3.13, for all versions of Python."""

import functools
import os
import sqlite3
import sys
import warnings
from typing import Any


class WatchedConnection(sqlite3.Connection):
    """Connection that warns if it is collected while open, and names the test that opened it."""

    is_closed = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)  # raises where the file cannot be opened
        self.is_closed = False
        self.opened_in = os.environ.get("PYTEST_CURRENT_TEST", "no test")

    def close(self) -> None:
        self.is_closed = True
        super().close()

    def __del__(self) -> None:
        if not self.is_closed:
            warnings.warn(f"unclosed database, opened in {self.opened_in}", ResourceWarning, stacklevel=1, source=self)


def watch() -> None:
    """Watch all new connections of this process, unless Python does so itself."""
    if sys.version_info < (3, 13):
        sqlite3.connect = functools.partial(sqlite3.connect, factory=WatchedConnection)  # type: ignore[assignment]
