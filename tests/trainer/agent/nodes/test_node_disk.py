"""Folders on a node's disk: private, in use by several processes, deleted by age."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.agent.nodes.node_disk import FolderLock, NotPrepared, delete_unused, make_own_folder

DAY = 86400.0


def test_the_users_own_folder_is_private_and_variables_are_the_nodes(tmp_path: Path):
    own = make_own_folder("cluster.caches", "$DISK/x", {"DISK": str(tmp_path), "USER": "ann"})
    assert own.parent == tmp_path / "x"
    assert own.name.startswith("orch-")
    assert own.stat().st_mode & 0o777 == 0o700
    assert make_own_folder("cluster.caches", f"{tmp_path}/x", {}) == own


@pytest.mark.parametrize(("text", "why"), [("$NOPE/x", "NOPE is not set on this node"), ("here", "an absolute path")])
def test_a_place_that_is_unknown_is_refused(text: str, why: str):
    with pytest.raises(NotPrepared, match=f"^cluster.caches=.*{why}"):
        make_own_folder("cluster.caches", text, {})


def test_a_folder_that_others_can_change_is_refused(tmp_path: Path):
    own = make_own_folder("cluster.caches", str(tmp_path), {})
    own.chmod(0o777)
    with pytest.raises(NotPrepared, match="can be changed by everybody"):
        make_own_folder("cluster.caches", str(tmp_path), {})


def in_use(folder: Path) -> FolderLock:
    lock = FolderLock.use(folder)
    folder.mkdir(exist_ok=True)
    (folder / "file").touch()
    return lock


def age(folder: Path, days: float) -> None:
    lock = folder.with_name(f".{folder.name}.lock")
    os.utime(lock, (lock.stat().st_atime, lock.stat().st_mtime - days * DAY))


def test_only_old_and_unused_folders_of_ours_are_deleted(tmp_path: Path):
    old, used, new = (tmp_path / name for name in ("old", "used", "new"))
    in_use(old).release()
    held = in_use(used)
    in_use(new).release()
    (tmp_path / "foreign").mkdir()
    for folder in (old, used):
        age(folder, 8)
    assert delete_unused(tmp_path, 7, caches=True) == []
    assert delete_unused(tmp_path, 7, caches=False) == [old]
    assert {path.name for path in tmp_path.iterdir()} == {"used", ".used.lock", "new", ".new.lock", "foreign"}
    held.release()
    assert delete_unused(tmp_path, 7, caches=False) == [used]


def test_users_share_a_folder_and_their_death_frees_it(tmp_path: Path):
    program = "import sys; from pathlib import Path; from trainer.agent.nodes.node_disk import FolderLock;"
    program += "FolderLock.use(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    words = [sys.executable, "-c", program, str(tmp_path / "a")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "held\n"
        assert FolderLock.own_unused(tmp_path / "a") is None
        in_use(tmp_path / "a").release()
        other.kill()
        other.wait()
        FolderLock.own(tmp_path / "a").release()


@pytest.mark.parametrize("take", [FolderLock.use, FolderLock.own])
def test_a_wait_for_another_process_is_announced(tmp_path: Path, take: Callable[..., FolderLock]):
    first, announced = FolderLock.own(tmp_path / "a"), []

    def note(lock: Path) -> None:
        announced.append(lock)
        first.release()

    take(tmp_path / "a", note).release()
    assert announced == [tmp_path / ".a.lock"]
    take(tmp_path / "a", note).release()
    assert len(announced) == 1, "a free lock needs no wait"


def test_a_lock_whose_folder_was_deleted_meanwhile_is_taken_again(tmp_path: Path):
    folder = tmp_path / "a"
    FolderLock.own(folder).delete()
    second = in_use(folder)
    assert FolderLock.own_unused(folder) is None
    second.release()
