"""A registry of an earlier revision, made by the statements that its migrations ran (`revisions/*.sql`)."""

import sqlite3
from contextlib import closing
from pathlib import Path

REVISIONS = Path(__file__).parent / "revisions"


def old_registry(path: Path, version: str, *statements: str) -> None:
    """Make the file at this revision, then run `statements` in it."""
    with closing(sqlite3.connect(path)) as raw:
        for step in sorted(REVISIONS.glob("*.sql")):
            if step.stem <= version:
                raw.executescript(step.read_text())
        for statement in statements:
            raw.execute(statement)
        raw.commit()
