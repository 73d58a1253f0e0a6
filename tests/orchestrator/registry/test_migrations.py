"""Versions of the registry: created, upgraded after a backup, and refused if unknown."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from orchestrator.cli import main
from orchestrator.errors import RegistryError
from orchestrator.registry import fast_queries, migrate, versions
from orchestrator.registry.store import Store
from orchestrator.registry_rebuild.rebuild import rebuild
from tests.orchestrator.ordinary_user import folder_of_an_ordinary_user

Desk = Any
TODAY, NEXT = versions.HEAD, f"{int(versions.HEAD) + 1:04d}"
NOTE = "ALTER TABLE runs ADD COLUMN note TEXT DEFAULT 'none' NOT NULL"


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


def add_migration(monkeypatch: pytest.MonkeyPatch, *statements: str) -> None:
    """Be a later program, which knows one more version."""
    monkeypatch.setattr(migrate, "MIGRATIONS", {**migrate.MIGRATIONS, NEXT: statements})
    monkeypatch.setattr(versions, "HEAD", NEXT)


@pytest.mark.parametrize("first", ["status", "read", "write"])
def test_an_older_registry_is_upgraded_after_a_backup(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:  # fmt: skip
    run, _ = desk.run()
    add_migration(monkeypatch, NOTE)
    if first == "status":
        assert [row["run"] for row in fast_queries.newest(desk.path)] == [run.name]
    else:
        Store.open(desk.path, readonly=first == "read").close()
    assert versions.read_version(desk.path) == NEXT
    with Store.open(desk.path) as upgraded:
        assert upgraded.run(run.name) == run
        assert upgraded.attempts(run.name)
    raw = sqlite3.connect(desk.path)
    assert raw.execute("SELECT note FROM runs").fetchall() == [("none",)]
    with pytest.raises(sqlite3.IntegrityError, match="never changed"):
        raw.execute("UPDATE configs SET data = ''")
    raw.close()
    assert versions.read_version(desk.path) == NEXT
    assert versions.read_version(desk.path.with_name(f"registry.db.{TODAY}.bak")) == TODAY


@pytest.mark.parametrize(("folder_mode", "file_mode"), [(0o700, 0o400), (0o500, 0o600)], ids=["file", "folder"])
def test_an_older_registry_that_may_not_be_written_is_refused_and_left_alone(
    monkeypatch: pytest.MonkeyPatch, folder_mode: int, file_mode: int
) -> None:  # fmt: skip
    with folder_of_an_ordinary_user() as folder:
        path = folder / "registry.db"
        Store.open(path).close()
        migrate.set_journal(path, "DELETE")  # as on a network file system; a write-ahead log cannot be read here
        add_migration(monkeypatch, NOTE)
        path.chmod(file_mode)
        folder.chmod(folder_mode)
        before = path.read_bytes()
        for opens in (lambda: Store.open(path, readonly=True), lambda: fast_queries.newest(path)):
            with pytest.raises(RegistryError, match=f"older version {TODAY}, this orch reads {NEXT}") as caught:
                opens()
            assert (caught.value.exit_code, "its owner upgrades it" in caught.value.hint) == (6, True)
        assert (path.read_bytes(), list(folder.glob("*.bak"))) == (before, [])


REFUSED = "can neither read nor upgrade"


def set_version(path: Path, version: str) -> None:
    """Make the registry one of this version; "" takes its version away."""
    with closing(sqlite3.connect(path)) as raw, raw:
        raw.execute("DELETE FROM alembic_version")
        raw.executemany("INSERT INTO alembic_version VALUES (?)", [(version,)] if version else [])


@pytest.mark.parametrize("version", ["0004", "0008", ""])
def test_an_unknown_version_is_refused_and_left_alone(desk: Desk, version: str) -> None:
    set_version(desk.path, version)
    before = desk.path.read_bytes()
    for opens in (
        lambda: Store.open(desk.path),
        lambda: Store.open(desk.path, readonly=True),
        lambda: fast_queries.newest(desk.path),
        lambda: migrate.upgrade(desk.path),
    ):
        with pytest.raises(RegistryError, match=f"version {version or '[?]'}, which this orch {REFUSED}") as caught:
            opens()
        assert caught.value.where == str(desk.path)
        assert caught.value.hint.startswith("`orch db rebuild --root")
    assert desk.path.read_bytes() == before


def test_verbs_refuse_an_unknown_version_in_one_line_until_it_is_rebuilt(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ORCH_HOME", str(desk.folder))
    monkeypatch.delenv("ORCH_REGISTRY", raising=False)
    desk.store.drop_lease(desk.lease)
    set_version(desk.path, "0004")
    spawned: list[object] = []
    monkeypatch.setattr(os, "posix_spawn", lambda *args, **more: spawned.append(args))
    for words in (["status"], ["controller", "status"], ["controller", "start"], ["controller", "tick"]):
        assert main.run(words) == 6, words
        assert [REFUSED in line for line in capsys.readouterr().err.splitlines()].count(True) == 1, words
    assert spawned == []
    assert main.run(["db", "rebuild", "--root", str(desk.root)]) == 0
    assert main.run(["status"]) == 0


def test_a_registry_of_an_unknown_version_is_not_replaced_while_its_controller_lives(desk: Desk) -> None:
    desk.store.drop_lease(desk.lease)
    desk.store.take_lease("elsewhere:1:1", 1000.0, 60.0)
    set_version(desk.path, "0004")
    with pytest.raises(RegistryError, match=r"a controller is alive \(elsewhere:1:1\)"):
        rebuild(desk.path, [desk.root], now=1001.0)
    assert versions.read_version(desk.path) == "0004"
    assert rebuild(desk.path, [desk.root], now=1061.0) == 0
    assert versions.read_version(desk.path) == versions.HEAD


def test_a_failed_upgrade_leaves_the_old_registry(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = desk.run()
    with monkeypatch.context() as patch:
        add_migration(patch, NOTE, "this is no SQL")
        with pytest.raises(RegistryError, match="no SQL|syntax"):
            Store.open(desk.path)
    assert versions.read_version(desk.path) == TODAY
    with Store.open(desk.path) as old:
        assert old.run(run.name) == run
    assert "note" not in fast_queries.newest(desk.path)[0]


def columns(path: Path) -> set[tuple[str, str, str, int]]:
    with closing(sqlite3.connect(path)) as raw:
        tables = [name for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {(name, *row[1:4]) for name in tables for row in raw.execute(f"PRAGMA table_info({name})")}


def test_an_upgraded_registry_has_the_columns_of_a_new_one(desk: Desk) -> None:
    run, attempt = desk.run()
    desk.store.close()
    new = columns(desk.path)
    added = [statement.split() for one in migrate.MIGRATIONS.values() for statement in one]
    assert added
    with closing(sqlite3.connect(desk.path)) as raw, raw:
        for words in added:
            assert (words[:2], words[3:5]) == (["ALTER", "TABLE"], ["ADD", "COLUMN"])
            raw.execute(f"ALTER TABLE {words[2]} DROP COLUMN {words[5]}")
    set_version(desk.path, versions.OLDEST)
    with Store.open(desk.path) as upgraded:
        assert (upgraded.run(run.name), upgraded.attempts(run.name)) == (run, [attempt])
    assert columns(desk.path) == new
