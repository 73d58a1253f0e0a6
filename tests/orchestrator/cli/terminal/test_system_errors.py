"""What the operating system refuses, with the folder and what to type."""

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from orchestrator.cli.terminal import streams
from orchestrator.cli.terminal.streams import cure
from orchestrator.registry.sqlite_errors import explain
from tests.orchestrator.cli.conftest import Type


def refusal(number: int, place: object) -> OSError:
    return OSError(number, os.strerror(number), str(place))


@pytest.mark.parametrize("variable", ["ORCH_HOME", "XDG_STATE_HOME"])
def test_the_variable_that_names_the_folder_is_what_is_changed(
    orch: Type, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("ORCH_HOME")
    monkeypatch.setenv(variable, str(tmp_path / "file"))
    said = orch("status")
    assert said.code == 4
    assert f"export {variable}=FOLDER, a folder in which you may write" in said.err


def test_a_home_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "gone"))
    said = cure(refusal(errno.EACCES, tmp_path / "gone" / ".local" / "state" / "orch"))
    assert said.startswith(f"HOME={tmp_path / 'gone'} is no folder: export HOME=FOLDER, or ORCH_HOME=FOLDER")


def closed(monkeypatch: pytest.MonkeyPatch, *places: Path) -> None:
    """As an ordinary user finds what he may not write and not enter."""
    monkeypatch.setattr(os, "access", lambda path, mode, **_: Path(path) not in places)


def test_a_closed_folder_of_ones_own_is_opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "my runs").mkdir()
    closed(monkeypatch, tmp_path / "my runs")
    said = cure(refusal(errno.EACCES, tmp_path / "my runs" / "new" / "file"))
    assert said.startswith(f"`chmod u+rwX '{tmp_path / 'my runs'}'`")


def test_the_folder_of_somebody_else_is_left_to_him(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed(monkeypatch, tmp_path)
    monkeypatch.setattr(streams.os, "getuid", lambda: 4711)
    said = cure(refusal(errno.EACCES, tmp_path / "file"))
    assert said.startswith(f"{tmp_path} belongs to ")
    assert "name a place of your own" in said


def test_an_object_store_is_not_opened_with_a_mode() -> None:
    said = cure(refusal(errno.EACCES, "s3://bucket/runs/step-1/__0_0.distcp"))
    assert said.startswith("s3://bucket/runs/step-1/__0_0.distcp is in an object store: give this shell credentials")


def test_a_folder_that_is_missing_is_made(tmp_path: Path) -> None:
    said = cure(refusal(errno.ENOENT, tmp_path / "a" / "b"))
    assert said.startswith(f"`mkdir -p {tmp_path / 'a'}`")


def test_a_registry_that_is_read_only_is_made_writable(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    path.touch(0o444)
    with sqlite3.connect(f"file:{tmp_path / 'other'}?mode=rwc", uri=True) as made:
        made.execute("CREATE TABLE t (x)")
    made.close()
    raw = sqlite3.connect(f"file:{tmp_path / 'other'}?mode=ro", uri=True)
    with pytest.raises(sqlite3.OperationalError) as refused:
        raw.execute("INSERT INTO t VALUES (1)")
    raw.close()
    assert explain(refused.value, path).hint.startswith(f"chmod u+w {path}")
    path.chmod(0o644)
    assert "chmod" not in explain(refused.value, path).hint
