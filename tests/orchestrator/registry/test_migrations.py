"""Versions of the registry: made, upgraded with a backup, refused when newer or older than any release."""

import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import RegistryError
from orchestrator.registry import fast_queries, migrate, versions
from orchestrator.registry.store import Store
from orchestrator.registry_rebuild.rebuild import rebuild
from tests.orchestrator.registry.old_registry import old_registry

Desk = Any
TODAY, NEXT = versions.HEAD, f"{int(versions.HEAD) + 1:04d}"
NOTE = "ALTER TABLE runs ADD COLUMN note TEXT DEFAULT 'none' NOT NULL"


def test_the_newest_migration_is_the_version_that_is_read(desk: Desk) -> None:
    assert list(migrate.MIGRATIONS) == sorted(migrate.MIGRATIONS)
    assert (min(migrate.MIGRATIONS), max(migrate.MIGRATIONS)) == (versions.OLDEST, versions.HEAD)
    assert versions.read_version(desk.path) == versions.HEAD


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


def test_an_older_registry_is_upgraded_after_a_backup(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    run, _ = desk.run()
    add_migration(monkeypatch, NOTE)
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
    assert versions.read_version(desk.path) == NEXT
    assert versions.read_version(desk.path.with_name(f"registry.db.{TODAY}.bak")) == TODAY


def schema(path: Path) -> dict[str, list[tuple[Any, ...]]]:
    """What SQLite says of every table, index and trigger, whatever words made them."""
    with closing(sqlite3.connect(path)) as raw:
        rows = raw.execute("SELECT name, type, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'").fetchall()
        pragmas = ("table_info", "foreign_key_list", "index_list", "index_info")
        found = {name: [row for word in pragmas for row in raw.execute(f"PRAGMA {word}({name})")] for name, *_ in rows}
        return found | {name: [(sql,)] for name, kind, sql in rows if kind == "trigger"}


def test_a_registry_that_earlier_migrations_made_is_one_of_today(desk: Desk, tmp_path: Path) -> None:
    path = tmp_path / "grown.db"
    old_registry(path, versions.HEAD)
    assert schema(path) == schema(desk.path)
    with closing(sqlite3.connect(path)) as raw:
        digest = hashlib.sha256(b"{}").hexdigest()
        raw.execute("INSERT INTO configs VALUES (?, '{}')", (digest,))
        raw.execute(
            "INSERT INTO runs (name, state, reason, cluster, run_dir, config_digest, total_steps, step, not_before,"
            " fresh_from, created_at, updated_at, identity)"
            f" VALUES ('r-1', 'RUNNING', '', 'slurm', '{tmp_path}/r', ?, 9, 3, 0, 1, 1, 1, '{{}}')",
            (digest,),
        )
        raw.execute(
            "INSERT INTO checkpoints (run, name, step, attempt, trust, bytes, path, committed_at, reason)"
            " VALUES ('r-1', 'a', 5, 1, 'VERIFIED', 7, '/r/a', 1.0, 'read')"
        )
        raw.commit()
        before = list(raw.iterdump())
    with Store.open(path) as store:
        (saved,) = store.checkpoints("r-1")
        assert (saved.trust, saved.tier, saved.seconds, saved.stall) == ("VERIFIED", "", None, None)
        assert store.run("r-1").scheduler == ""
    with closing(sqlite3.connect(path)) as raw:
        assert list(raw.iterdump()) == before
    assert not list(tmp_path.glob("*.bak"))


def test_attempts_of_a_registry_without_their_configs_have_that_of_their_run(tmp_path: Path) -> None:
    path, digest = tmp_path / "grown.db", hashlib.sha256(b"{}").hexdigest()
    old_registry(
        path,
        "0005",
        f"INSERT INTO configs VALUES ('{digest}', '{{}}')",
        "INSERT INTO runs (name, state, reason, cluster, run_dir, config_digest, total_steps, step, not_before,"
        f" fresh_from, created_at, updated_at, identity)"
        f" VALUES ('r-1', 'RUNNING', '', 'slurm', '{tmp_path}/r', '{digest}', 9, 3, 0, 1, 1, 1, '{{}}')",
        "INSERT INTO attempts (run, number, state, nonce, job_name, reason, epoch, nodes, excluded, intent_at,"
        " generations) VALUES ('r-1', 1, 'RUNNING', 'ab', 'orch-r-1-1-ab', '', 1, '[]', '[]', 1.0, 0)",
    )
    with Store.open(path) as store:
        assert [attempt.config_digest for attempt in store.attempts("r-1")] == [digest]


@pytest.mark.parametrize("version", ["0001", "0002", "0003", "0004"])
def test_an_unreleased_registry_is_refused_and_left_alone(tmp_path: Path, version: str) -> None:
    path = tmp_path / "registry.db"
    old_registry(path, version)
    before = path.read_bytes()
    for opens in (
        lambda: Store.open(path),
        lambda: Store.open(path, readonly=True),
        lambda: fast_queries.newest(path),
        lambda: fast_queries.leases(path),
        lambda: migrate.upgrade(path),
    ):
        with pytest.raises(RegistryError, match=f"version {version}, which this orch can neither read nor") as caught:
            opens()
        assert caught.value.where == str(path)
        assert caught.value.hint.startswith("`orch db rebuild --root")
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", ["0001", "0003", "0004"])
def test_an_unreleased_registry_is_not_replaced_while_its_controller_lives(tmp_path: Path, version: str) -> None:
    path = tmp_path / "registry.db"
    values = "(3, 'elsewhere:1:1', 1000.0, 1060.0, 0)"
    lease = f"INSERT INTO lease (epoch, holder, renewed_at, expires_at, ticked_at) VALUES {values}"
    old_registry(path, version, lease)
    with pytest.raises(RegistryError, match=r"a controller is alive \(elsewhere:1:1\)"):
        rebuild(path, [tmp_path], now=1001.0)
    assert versions.read_version(path) == version
    assert rebuild(path, [tmp_path], now=1061.0) == 0
    assert versions.read_version(path) == versions.HEAD


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
