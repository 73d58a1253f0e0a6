"""Backups: whole, private, and never half there."""

import os
import shutil
import sqlite3
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from orchestrator.errors import Precondition, RegistryError
from orchestrator.registry import fast_queries
from orchestrator.registry.backup import backup
from orchestrator.registry.store import Store
from tests.orchestrator.ordinary_user import folder_of_an_ordinary_user

Desk = Any


def test_a_backup_is_a_registry_with_what_was_committed(desk: Desk, tmp_path: Path) -> None:
    run, _ = desk.run()
    copy = tmp_path / "copy.db"

    def in_the_middle() -> None:
        desk.store.note_run(run.name, **desk.stamp, step=5)
        backup(desk.path, copy)

    desk.store.together(in_the_middle)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    with Store.open(copy, readonly=True) as other:
        assert other.run(run.name) == run
    assert sorted(name for name in os.listdir(tmp_path) if "copy" in name) == ["copy.db"]


def test_a_backup_replaces_an_older_one_and_failure_leaves_it(desk: Desk, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    backup(desk.path, copy)
    run, _ = desk.run()
    backup(desk.path, copy)
    with Store.open(copy, readonly=True) as other:
        assert other.runs() == [run]
    before = copy.read_bytes()
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(before[:4096] + b"\xff" * 8192 + before[12288:])
    with pytest.raises(RegistryError, match="damaged"):
        backup(damaged, copy)
    assert copy.read_bytes() == before


def test_what_cannot_be_backed_up(desk: Desk, tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="no registry to back up"):
        backup(tmp_path / "none.db", tmp_path / "copy.db")
    with pytest.raises(RegistryError, match="its own backup"):
        backup(desk.path, desk.path)
    with pytest.raises(Precondition, match="cannot be written: No such file") as caught:
        backup(desk.path, tmp_path / "no" / "folder" / "copy.db")
    assert caught.value.hint.startswith(f"mkdir -p {tmp_path / 'no' / 'folder'},")
    with pytest.raises(Precondition, match="cannot be written") as caught:
        backup(desk.path, Path("/proc/x"))
    assert caught.value.hint.startswith("name a file in your own folder")
    with closing(sqlite3.connect(desk.path)) as raw:
        assert raw.execute("PRAGMA integrity_check").fetchone() == ("ok",)


@pytest.mark.parametrize("content", [b"hello", b"SQLite format 3\0 and no more"])
def test_what_is_no_backup_is_left_as_it_was(tmp_path: Path, content: bytes) -> None:
    path, to = tmp_path / "registry.db", tmp_path / "notes.txt"
    Store.open(path).close()
    to.write_bytes(content)
    with pytest.raises(Precondition, match="is not a registry backup"):
        backup(path, to)
    assert to.read_bytes() == content


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    path, to = tmp_path / "registry.db", tmp_path / "pipe"
    Store.open(path).close()
    os.mkfifo(to)
    with pytest.raises(Precondition, match="is not a registry backup"):
        backup(path, to)
    assert to.is_fifo()


def test_an_older_backup_and_an_empty_file_are_replaced(tmp_path: Path) -> None:
    path, to, link = tmp_path / "registry.db", tmp_path / "backup.db", tmp_path / "newest"
    Store.open(path).close()
    to.touch()
    link.symlink_to(to)
    for place in (to, to, link):
        backup(path, place)
    assert link.is_symlink()
    assert to.read_bytes().startswith(b"SQLite format 3")


def test_a_registry_in_a_folder_that_cannot_be_written_is_refused_with_the_way_to_copy_it(tmp_path: Path) -> None:
    with folder_of_an_ordinary_user() as place:
        folder, copy = place / "shared", place / "copy"
        folder.mkdir()
        copy.mkdir()
        path = folder / "registry.db"
        Store.open(path).close()
        writer = sqlite3.connect(path)
        writer.execute("INSERT INTO configs (digest, data) VALUES ('fresh', '{}')")
        writer.commit()
        left = {name: (folder / name).read_bytes() for name in ("registry.db", "registry.db-wal")}
        writer.close()
        for name, content in left.items():  # as a host leaves it that went down
            (folder / name).write_bytes(content)
        folder.chmod(0o555)
        for reads in (lambda: fast_queries.newest(path), lambda: backup(path, place / "backup.db")):
            with pytest.raises(RegistryError, match="in a folder without write permission") as caught:
                reads()
            assert caught.value.hint.startswith(f"chmod u+w {folder}; or copy it: `cp {path}* FOLDER`, then ")
        for name in left:
            shutil.copyfile(folder / name, copy / name)
        with closing(sqlite3.connect(copy / "registry.db")) as raw:
            assert raw.execute("SELECT digest FROM configs").fetchall() == [("fresh",)]
        assert sorted(os.listdir(place)) == ["copy", "shared"]
