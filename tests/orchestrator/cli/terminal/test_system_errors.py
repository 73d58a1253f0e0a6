"""What the operating system refuses, with the folder and what to type."""

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from orchestrator.cli.terminal.streams import find_remedy, writing_to
from orchestrator.registry.sqlite_errors import explain
from tests.orchestrator.cli.conftest import Patch, Type


def refusal(number: int, place: object) -> OSError:
    return OSError(number, os.strerror(number), str(place))


@pytest.mark.parametrize("variable", ["ORCH_HOME", "XDG_STATE_HOME"])
def test_state_variable(orch: Type, monkeypatch: Patch, tmp_path: Path, variable: str) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.delenv("ORCH_HOME")
    monkeypatch.setenv(variable, str(tmp_path / "file"))
    said = orch("status")
    assert said.code == 4
    assert f"export {variable}=FOLDER, a folder that you may write to" in said.err


def test_a_closed_folder(tmp_path: Path) -> None:
    said = find_remedy(refusal(errno.EACCES, tmp_path / "my runs" / "file"))
    assert said.startswith(f"`ls -ld '{tmp_path / 'my runs'}'` shows its owner and mode")


def test_remedy_for_object_store() -> None:
    said = find_remedy(refusal(errno.EACCES, "s3://bucket/runs/step-1/__0_0.distcp"))
    assert said.startswith("s3://bucket/runs/step-1/__0_0.distcp is in an object store: give this shell credentials")


def test_a_folder_that_is_missing_is_made(tmp_path: Path) -> None:
    said = find_remedy(refusal(errno.ENOENT, tmp_path / "a" / "b"))
    assert said.startswith(f"`mkdir -p {tmp_path / 'a'}`")


def test_a_full_disk_is_named_though_the_error_has_no_path(tmp_path: Path) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert find_remedy(full).startswith("free some space in the folder that it writes to")
    with pytest.raises(OSError, match="No space left on device") as raised, writing_to(tmp_path / "out"):
        raise full
    assert find_remedy(raised.value).startswith(f"free some space in {tmp_path};")
    with pytest.raises(OSError, match="denied") as raised, writing_to(tmp_path / "out"):
        raise refusal(errno.EACCES, "/other/file")
    assert raised.value.filename == "/other/file"


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
