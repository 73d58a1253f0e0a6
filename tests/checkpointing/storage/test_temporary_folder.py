"""Drafts: nothing is left of them, whatever ends their maker, and nobody's work is taken away."""

import fcntl
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from checkpointing.storage.durable import temporary_folder

KILLED = """
import os, sys
from pathlib import Path
from checkpointing.storage.durable import temporary_folder
with temporary_folder(Path(sys.argv[1]), "out") as folder:
    (folder / "half.safetensors").write_bytes(b"half")
    os._exit(9)
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_not_moved_away_goes_at_the_end(tmp_path: Path) -> None:
    with temporary_folder(tmp_path, "out") as first:
        (first / "file").write_text("x")
        first.rename(tmp_path / "kept")
    full = OSError("full")
    with suppress(OSError), temporary_folder(tmp_path, "out") as second:
        (second / "file").write_text("x")
        raise full
    assert names(tmp_path) == ["kept"]
    assert names(tmp_path / "kept") == ["file"]


def test_what_a_killed_maker_left_goes_when_the_next_one_begins(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=Path(__file__).parents[3], timeout=60)
    assert done.returncode == 9
    (left,) = tmp_path.iterdir()
    with temporary_folder(tmp_path, "other"):
        assert left.exists(), "of another export"
    with temporary_folder(tmp_path, "out") as folder:
        assert names(tmp_path) == [folder.name]


def test_a_private_draft_is_nobody_elses_to_read(tmp_path: Path) -> None:
    with temporary_folder(tmp_path, "import", mode=0o700) as folder:
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_maker_that_is_at_work_is_left_alone(tmp_path: Path) -> None:
    with temporary_folder(tmp_path, "out") as first, temporary_folder(tmp_path, "out") as second:
        assert names(tmp_path) == sorted([first.name, second.name])


def test_other_machines_drafts_and_other_folders_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "node1.cluster")
    left = [".out.node2-cluster.0123abcd.tmp", ".out.node1-cluster.tmp", "out", ".out.node1-cluster.0123abcd"]
    for name in (*left, ".out.node1-cluster.0123abcd.tmp"):
        (tmp_path / name).mkdir()
    (tmp_path / ".out.node1-cluster.76543210.tmp").touch()
    with temporary_folder(tmp_path, "out"):
        pass
    assert names(tmp_path) == sorted([*left, ".out.node1-cluster.76543210.tmp"]), "nor is a file"


def test_without_locks_drafts_are_made_and_none_is_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(descriptor: int, how: int) -> None:
        raise OSError(38, os.strerror(38))

    with temporary_folder(tmp_path, "out") as first:
        monkeypatch.setattr(fcntl, "flock", unsupported)
        with temporary_folder(tmp_path, "out"):
            assert first.exists()


def test_a_draft_that_another_maker_sweeps_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it is opened, while its lock is held, and after it is opened."""
    swept: list[str] = []
    true_open, true_lock = os.open, fcntl.flock

    def sweep(path: Path) -> None:
        swept.append(path.name)
        path.rmdir()

    def opened(path: Path, flags: int) -> int:
        if not swept:
            sweep(path)
        descriptor = true_open(path, flags)
        if len(swept) == 2:
            sweep(path)
        return descriptor

    def locked(descriptor: int, how: int) -> None:
        if len(swept) == 1:
            sweep(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
            raise BlockingIOError
        true_lock(descriptor, how)

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opened)
        patch.setattr(fcntl, "flock", locked)
        with temporary_folder(tmp_path, "out") as folder:
            assert names(tmp_path) == [folder.name]
    assert len(swept) == 3
    assert len(os.listdir("/proc/self/fd")) == before
