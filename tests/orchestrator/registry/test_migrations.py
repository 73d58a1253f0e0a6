"""Versions of the registry: made, upgraded with a backup, refused when newer."""

import hashlib
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine

from orchestrator.errors import RegistryError
from orchestrator.registry import fast_queries, migrate, store, versions
from orchestrator.registry.models import Base
from orchestrator.registry.store import Store

Desk = Any
MIGRATIONS = Path(migrate.__file__).parent / "migrations"
STEPS = sorted((MIGRATIONS / "versions").glob("v*.py"))
TODAY, NEXT = versions.HEAD, f"{int(versions.HEAD) + 1:04d}"

SECOND = """
import sqlalchemy as sa
from alembic import op

revision = "{next}"
down_revision = "{today}"


def upgrade() -> None:
    with op.batch_alter_table("runs") as batch:
        batch.add_column(sa.Column("note", sa.Text(), nullable=False, server_default="none"))
    {then}
"""


def test_migrations_make_exactly_the_tables_of_the_models(desk: Desk) -> None:
    engine = create_engine(f"sqlite:///{desk.path}")
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
    engine.dispose()


def test_the_known_versions_are_those_of_the_folder() -> None:
    script = ScriptDirectory(str(MIGRATIONS))
    assert [step.revision for step in script.walk_revisions()][::-1] == list(versions.KNOWN)
    assert script.get_current_head() == versions.HEAD


def test_opening_a_registry_of_today_does_not_import_alembic(desk: Desk) -> None:
    code = (
        "import sys; from pathlib import Path; from orchestrator.registry.store import Store; "
        "Store.open(Path(sys.argv[1])).close(); print('alembic' in sys.modules, 'torch' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code, str(desk.path)], capture_output=True, text=True, timeout=60, check=True,
        cwd=MIGRATIONS.parents[2],
    )  # fmt: skip
    assert answer.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("readonly", [False, True])
def test_a_newer_registry_is_refused_and_left_alone(desk: Desk, readonly: bool) -> None:
    raw = sqlite3.connect(desk.path)
    raw.execute("UPDATE alembic_version SET version_num = '9999'")
    raw.commit()
    for reads in (lambda: Store.open(desk.path, readonly=readonly), lambda: fast_queries.newest(desk.path)):
        with pytest.raises(RegistryError, match="version 9999, which is newer than this orch knows") as caught:
            reads()
        assert "upgrade orch" in caught.value.hint
    assert raw.execute("SELECT version_num FROM alembic_version").fetchone() == ("9999",)
    raw.close()


class Tomorrow:
    """A copy of the migrations with one more, and a program that knows it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, then: str = "") -> None:
        (folder / "versions").mkdir(parents=True)
        for name in ("env.py", "script.py.mako", *(f"versions/{step.name}" for step in STEPS)):
            (folder / name).write_text((MIGRATIONS / name).read_text())
        (folder / "versions" / f"v{NEXT}_note.py").write_text(SECOND.format(then=then, today=TODAY, next=NEXT))
        monkeypatch.setattr(migrate, "FOLDER", folder)
        for module in (migrate, store, fast_queries):
            monkeypatch.setattr(module, "KNOWN", (*versions.KNOWN, NEXT))
        for module in (store, fast_queries, migrate):
            monkeypatch.setattr(module, "HEAD", NEXT)


def test_an_older_registry_is_upgraded_after_a_backup(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = desk.run()
    Tomorrow(tmp_path / "migrations", monkeypatch)
    with pytest.raises(RegistryError, match=f"older version {TODAY}") as caught:
        fast_queries.newest(desk.path)
    assert "orch controller tick" in caught.value.hint
    with Store.open(desk.path) as upgraded:
        assert upgraded.run(run.name) == run
        assert upgraded.attempts(run.name)
    raw = sqlite3.connect(desk.path)
    assert raw.execute("SELECT note FROM runs").fetchall() == [("none",)]
    with pytest.raises(sqlite3.IntegrityError, match="never changed"):
        raw.execute("UPDATE configs SET data = ''")
    raw.close()
    assert fast_queries.version(desk.path) == NEXT
    assert fast_queries.version(desk.path.with_name(f"registry.db.{TODAY}.bak")) == TODAY


def test_a_registry_of_the_first_version_gets_what_came_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the first version stay, and what they could not tell is empty."""
    path, first = tmp_path / "old.db", tmp_path / "first"
    (first / "versions").mkdir(parents=True)
    for name in ("env.py", "script.py.mako", "versions/v0001_first_tables.py"):
        (first / name).write_text((MIGRATIONS / name).read_text())
    with monkeypatch.context() as patch:
        patch.setattr(migrate, "FOLDER", first)
        path.touch()
        migrate.upgrade(path)
    assert fast_queries.version(path) == "0001"
    raw = sqlite3.connect(path)
    digest = hashlib.sha256(b"{}").hexdigest()
    raw.execute("INSERT INTO configs VALUES (?, '{}')", (digest,))
    raw.execute(
        "INSERT INTO runs (name, state, reason, cluster, run_dir, config_digest, total_steps, step, not_before,"
        " fresh_from, created_at, updated_at, identity)"
        " VALUES ('r-1', 'RUNNING', '', 'slurm', '/r', ?, 9, 3, 0, 1, 1, 1, '{}')",
        (digest,),
    )
    raw.execute("INSERT INTO checkpoints VALUES ('r-1', 'a', 5, 1, 'VERIFIED', 7, '/r/a', 1.0, 'read')")
    raw.commit()
    raw.close()
    with Store.open(path) as upgraded:
        (saved,) = upgraded.checkpoints("r-1")
        assert (saved.trust, saved.tier, saved.seconds, saved.stall) == ("VERIFIED", "", None, None)
        assert upgraded.copies("r-1") == []
        assert upgraded.notices("r-1") == []
        assert (upgraded.run("r-1").scheduler, upgraded.run("r-1").slurm_cluster) == ("", None)
    assert fast_queries.version(path) == versions.HEAD


def test_a_failed_upgrade_leaves_the_old_registry(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = desk.run()
    with monkeypatch.context() as patch:
        Tomorrow(tmp_path / "migrations", patch, then="op.execute('this is no SQL')")
        with pytest.raises(RegistryError, match="no SQL|syntax"):
            Store.open(desk.path)
    assert fast_queries.version(desk.path) == TODAY
    with Store.open(desk.path) as old:
        assert old.run(run.name) == run
    assert "note" not in fast_queries.newest(desk.path)[0]
