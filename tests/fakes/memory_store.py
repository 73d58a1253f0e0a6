"""Registry in memory for simulations of the controller."""

import sqlite3
from pathlib import Path
from typing import Any

from orchestrator.registry import migrate
from orchestrator.registry.database import Database
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
