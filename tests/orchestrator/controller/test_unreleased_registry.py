"""A registry of a version that was never released, as it lies there after `pip install -U`."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from orchestrator.cli import main
from orchestrator.controller import service
from orchestrator.errors import RegistryError
from orchestrator.registry import versions
from tests.orchestrator.registry.old_registry import old_registry

REFUSED = "can neither read nor upgrade"


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ORCH_HOME", str(tmp_path))
    monkeypatch.delenv("ORCH_REGISTRY", raising=False)
    return tmp_path / "registry.db"


@pytest.mark.parametrize("version", ["0001", "0004"])
def test_every_verb_refuses_it_in_one_line_until_it_is_rebuilt(
    path: Path, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    old_registry(path, version)
    before = path.read_bytes()
    for words in (["status"], ["controller", "status"], ["controller", "tick"]):
        assert main.run(words) == 6, words
        (said,) = [line for line in capsys.readouterr().err.splitlines() if REFUSED in line]
        assert version in said, words
    assert path.read_bytes() == before
    (path.parent / "runs").mkdir()
    assert main.run(["db", "rebuild", "--root", str(path.parent / "runs")]) == 0
    assert versions.read_version(path) == versions.HEAD
    assert main.run(["status"]) == 0


def test_a_registry_that_has_lost_its_version_is_not_taken_for_an_empty_one(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old_registry(path, versions.HEAD)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM alembic_version")
    for words in (["status"], ["controller", "tick"]):
        assert main.run(words) == 6, words
        assert REFUSED in capsys.readouterr().err, words


def test_no_controller_is_started_for_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old_registry(path, "0004")
    spawned: list[object] = []
    monkeypatch.setattr(os, "posix_spawn", lambda *args, **more: spawned.append(args))
    for start in (service.ensure_running, service.tick_once):
        with pytest.raises(RegistryError, match=REFUSED):
            start(path)
    assert spawned == []
