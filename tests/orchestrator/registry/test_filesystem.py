"""Which journal on which file system."""

import fcntl
import os
import sqlite3
from pathlib import Path

import pytest

from orchestrator.errors import RegistryError
from orchestrator.registry import filesystem, store
from orchestrator.registry.filesystem import Mount, journal_for, locks_work, mount_of, mounted
from orchestrator.registry.store import Store

MOUNTINFO = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:40 / /home rw,nosuid shared:2 master:1 - nfs4 server:/home rw,vers=4.2,local_lock=none
31 22 0:41 / /home/ann\\040lee rw - lustre 10.0.0.1@tcp:/fs rw,flock
32 30 0:42 / /home/local rw - xfs /dev/sdb rw
33 22 0:43 / /old rw - nfs server:/old rw,nolock
34 33 0:44 / /old rw - tmpfs tmpfs rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "local"),
    [
        ("/var/lib/x.db", "ext4", True),
        ("/home/bob/x.db", "nfs4", False),
        ("/home/ann lee/x.db", "lustre", False),
        ("/home/local/x.db", "xfs", True),
        ("/homework/x.db", "ext4", True),
        ("/old/x.db", "tmpfs", True),
    ],
)
def test_the_longest_and_latest_mount_holds_a_path(path: str, kind: str, local: bool) -> None:
    mount = mount_of(Path(path), MOUNTINFO)
    assert mount is not None
    assert (mount.kind, mount.is_local) == (kind, local)


def test_this_machine_has_mounts(tmp_path: Path) -> None:
    assert mounted(tmp_path) is not None


def nfs(*options: str) -> Mount:
    return Mount(point="/home", kind="nfs4", options=frozenset(options))


def test_wal_is_for_local_file_systems_only(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    assert journal_for(path, Mount(point="/", kind="ext4", options=frozenset())) == "wal"
    assert journal_for(path, nfs("rw")) == "delete"
    assert journal_for(path, None) == "delete"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("option", ["nolock", "local_lock=all", "local_lock=posix", "localflock"])
def test_locks_that_other_hosts_do_not_see_are_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(RegistryError, match=f"mounted with {option}: other hosts") as caught:
        journal_for(tmp_path / "registry.db", nfs("rw", option))
    assert "ORCH_REGISTRY=" in caught.value.hint


def test_locks_that_do_not_work_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise OSError(38, "Function not implemented")

    assert locks_work(tmp_path / "probe")
    monkeypatch.setattr(filesystem.fcntl, "lockf", broken)
    with pytest.raises(RegistryError, match="does not stop another one") as caught:
        journal_for(tmp_path / "registry.db", nfs("rw"))
    assert "ORCH_REGISTRY=" in caught.value.hint


def test_a_lock_that_the_other_process_ignores_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(stream: object, how: int) -> None:
        assert how in (fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN)

    monkeypatch.setattr(filesystem.fcntl, "lockf", nothing)
    assert not locks_work(tmp_path / "probe")


def journal_of(path: Path) -> str:
    raw = sqlite3.connect(path)
    try:
        return str(raw.execute("PRAGMA journal_mode").fetchone()[0])
    finally:
        raw.close()


def test_a_registry_that_moved_to_nfs_leaves_wal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "registry.db"
    Store.open(path).close()
    local = mounted(tmp_path)
    assert local is not None
    assert journal_of(path) == ("wal" if local.is_local else "delete")
    monkeypatch.setattr(store, "mounted", lambda folder: nfs("rw"))
    with Store.open(path) as moved:
        digest = moved.put_config({"a": 1})
        assert moved.config(digest) == {"a": 1}
    assert journal_of(path) == "delete"
