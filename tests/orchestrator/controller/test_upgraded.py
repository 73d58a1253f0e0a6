"""A registry of an older version, as it lies there after `pip install -U`."""

import os
import time
from pathlib import Path

import pytest
import sqlalchemy
from alembic import command
from alembic.config import Config

from orchestrator.cli import main
from orchestrator.controller import service
from orchestrator.registry import fast_queries, migrate
from orchestrator.registry.store import Store
from orchestrator.registry.versions import HEAD


def older(path: Path, version: str, *statements: str) -> None:
    """A registry of this version."""
    engine = sqlalchemy.create_engine(f"sqlite:///{path}", poolclass=sqlalchemy.NullPool)
    config = Config()
    config.set_main_option("script_location", str(migrate.FOLDER))
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        command.upgrade(config, version)
        for statement in statements:
            connection.exec_driver_sql(statement)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    monkeypatch.delenv("ORCH_REGISTRY", raising=False)
    return tmp_path / "registry.db"


@pytest.mark.parametrize("version", ["0001", "0004"])
def test_a_tick_upgrades_the_registry_as_it_says(path: Path, version: str, capsys: pytest.CaptureFixture[str]) -> None:
    older(path, version)
    assert main.run(["controller", "status"]) == 6
    assert "orch controller tick upgrades it" in capsys.readouterr().err
    assert service.tick_once(path) is not None
    assert fast_queries.version(path) == HEAD
    assert main.run(["controller", "status"]) == 0


def test_a_controller_is_started_for_an_older_registry(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    older(path, "0004")
    spawned: list[object] = []
    monkeypatch.setattr(os, "posix_spawn", lambda *args, **more: spawned.append(args))
    assert service.ensure_running(path) is True
    assert len(spawned) == 1


def test_a_controller_of_the_older_version_that_lives_keeps_the_others_out(path: Path) -> None:
    """Its lease is for all runs: versions before 0004 knew no schedulers."""
    now = time.time()
    values = f"(3, 'old:1:1', {now}, {now + 60}, 0)"
    older(path, "0003", f"INSERT INTO lease (epoch, holder, renewed_at, expires_at, ticked_at) VALUES {values}")
    assert service.tick_once(path, patience=0.0) is None
    assert fast_queries.version(path) == HEAD
    with Store.open(path) as store:
        assert store.take_lease("new:1:1", now, 60.0, "lab@login1:6817/aaaaaaaa") is None
        taken = store.take_lease("new:1:1", now + 61.0, 60.0, "lab@login1:6817/aaaaaaaa")
        assert taken is not None
        assert taken.epoch == 4
        assert [lease.holder for lease in store.leases() if lease.holder] == ["new:1:1"]
