"""Which mount holds the registry, on which file systems it may be, and with which journal."""

import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from orchestrator.errors import RegistryError
from orchestrator.registry import fast_queries, file_systems, store
from orchestrator.registry.file_systems import (
    Mount,
    choose_journal_mode,
    find_mount,
    locks_work,
    match_mount,
    why_unshared,
)
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
    ("path", "kind", "source", "local"),
    [
        ("/var/lib/x.db", "ext4", "/dev/sda1", True),
        ("/home/bob/x.db", "nfs4", "server:/home", False),
        ("/home/ann lee/x.db", "lustre", "10.0.0.1@tcp:/fs", False),
        ("/home/local/x.db", "xfs", "/dev/sdb", True),
        ("/homework/x.db", "ext4", "/dev/sda1", True),
        ("/old/x.db", "tmpfs", "tmpfs", True),
    ],
)
def test_the_longest_and_latest_mount_holds_a_path(path: str, kind: str, source: str, local: bool) -> None:
    found = match_mount(Path(path), MOUNTINFO)
    assert found is not None
    assert (found.kind, found.source, found.is_local) == (kind, source, local)


def test_this_machine_has_mounts(tmp_path: Path) -> None:
    assert find_mount(tmp_path) is not None


def mount(kind: str, options: str = "rw") -> Mount:
    """As the kernel writes it into /proc/self/mountinfo."""
    found = match_mount(Path("/x/registry.db"), f"30 22 0:40 / /x rw,relatime shared:2 - {kind} server:/x {options}\n")
    assert found is not None
    return found


NFS3 = "rw,vers=3,rsize=1048576,hard,proto=tcp,mountaddr=10.0.0.1,mountvers=3,{}"


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("nfs4", "rw,vers=4.2,hard,local_lock=none", ""),
        ("nfs", NFS3.format("local_lock=none"), ""),
        ("nfs", NFS3.format("local_lock=flock"), ""),
        ("nfs", NFS3.format("nolock,local_lock=all"), "mounted with local_lock=all"),
        ("nfs", NFS3.format("local_lock=posix"), "mounted with local_lock=posix"),
        ("nfs", NFS3.format("nolock"), "mounted with nolock"),
        ("lustre", "rw,flock,lazystatfs", ""),
        ("lustre", "rw,localflock,lazystatfs", "mounted with localflock"),
        ("gpfs", "rw", ""),
        ("ceph", "rw,name=a,acl", ""),
        ("gfs2", "rw", ""),
        ("gfs2", "rw,localflocks", "mounted with localflocks"),
        ("beegfs", "rw,cfgFile=/etc/beegfs/beegfs-client.conf", "locks of beegfs is not known"),
        ("fuse.sshfs", "rw,user_id=1000", "locks of fuse.sshfs is not known"),
        ("cifs", "rw,vers=3.1.1,cache=strict", "locks of cifs is not known"),
    ],
)
def test_what_is_known_of_a_file_system(kind: str, options: str, reason: str) -> None:
    found = why_unshared(mount(kind, options))
    assert reason in found
    assert bool(reason) == bool(found)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.db"


def test_the_journal_follows_the_locks_and_nothing_is_left_behind(path: Path) -> None:
    assert choose_journal_mode(path, mount("ext4")) == "wal"
    assert choose_journal_mode(path, mount("nfs4")) == "delete"
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("refused", [mount("newfs"), mount("nfs", "rw,nolock"), None])
def test_locks_that_may_not_reach_other_hosts_are_refused(path: Path, refused: Mount | None) -> None:
    with pytest.raises(RegistryError, match="cannot hold the registry") as caught:
        choose_journal_mode(path, refused)
    assert caught.value.hint.startswith("set ORCH_REGISTRY=")


def test_locks_that_do_not_work_on_this_host_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise OSError(38, "Function not implemented")

    def nothing(*arguments: object) -> None:
        """As a file system that answers every lock with yes."""

    assert locks_work(path)
    for lock in (broken, nothing):
        monkeypatch.setattr(file_systems.fcntl, "lockf", lock)
        with pytest.raises(RegistryError, match="does not stop another process"):
            choose_journal_mode(path, mount("nfs4"))
    assert os.listdir(path.parent) == []


# ---- a registry that is there already


def journal_of(path: Path) -> str:
    with closing(sqlite3.connect(path)) as raw:
        return str(raw.execute("PRAGMA journal_mode").fetchone()[0])


def test_a_registry_that_moved_to_nfs_leaves_wal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store.open(path).close()
    local = find_mount(path.parent)
    assert local is not None
    assert journal_of(path) == ("wal" if local.is_local else "delete")
    monkeypatch.setattr(store, "find_mount", lambda folder: mount("nfs4"))
    with Store.open(path) as moved:
        digest = moved.put_config({"a": 1})
        assert moved.config(digest) == {"a": 1}
    assert journal_of(path) == "delete"


def test_a_registry_at_a_refused_place_is_read_and_says_how_to_move_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(path) as made:
        digest = made.put_config({"a": 1})
    monkeypatch.setattr(store, "find_mount", lambda folder: mount("beegfs"))
    with pytest.raises(RegistryError, match="the file system beegfs at /x cannot hold") as caught:
        Store.open(path)
    assert "it can still be read. Move it: `orch db backup /path" in caught.value.hint
    assert fast_queries.newest(path) == []
    with Store.open(path, readonly=True) as read:
        assert read.config(digest) == {"a": 1}


def test_a_refused_place_gets_no_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "find_mount", lambda folder: mount("beegfs"))
    with pytest.raises(RegistryError):
        Store.open(path)
    assert os.listdir(path.parent) == []
