"""Registry in memory for simulations of the controller."""

import sqlite3
from pathlib import Path
from typing import Any

from orchestrator.registry import migrate
from orchestrator.registry.database import Database
from orchestrator.registry.records import Attempt, Run
from orchestrator.registry.store import Store


class MemoryStore(Store):
    """Registry without a file; it survives the controllers that use it."""

    def __init__(self) -> None:
        connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        connection.execute("PRAGMA foreign_keys = ON")
        migrate.run_migrations(connection, None)
        self.connection = connection
        database = Database(Path("/memory/registry.db"))
        database.connect = lambda: connection  # type: ignore[assignment]
        super().__init__(database)
        self._changes = -1
        self._rows: dict[str, tuple[Run, list[Attempt]]] = {}

    def rows(self, name: str) -> tuple[Run, list[Attempt]]:
        """Return a run and its attempts; they are read once after each change. Not for use within a transaction."""
        if self._changes != self.connection.total_changes:
            self._changes, self._rows = self.connection.total_changes, {}
        if name not in self._rows:
            self._rows[name] = self.run(name), self.attempts(name)
        return self._rows[name]

    def close(self) -> None:
        """Keep the connection, whose end would delete the registry."""

    def __del__(self) -> None:
        self.connection.close()

    def ignore_references(self) -> None:
        """Accept rows that no registry has, such as a run without its config."""
        self.connection.execute("PRAGMA foreign_keys = OFF")

    def change(self, kind: type[Any], changes: dict[str, Any], **keys: Any) -> None:
        """Change rows in ways that no controller does."""
        self.together(lambda: self.database.update(kind, changes, **keys))
