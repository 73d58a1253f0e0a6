"""On which file systems the registry may lie, with which journal, and what proves the locks of the unknown ones."""

import fcntl
import os
import shutil
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from orchestrator.errors import RegistryError
from orchestrator.registry import fast_queries, store
from orchestrator.registry.locks import lock_peer, lock_proof
from orchestrator.registry.locks.filesystem import Mount, mount_of, mounted
from orchestrator.registry.locks.lock_mode import LockSupport, lock_mode_for, lock_support
from orchestrator.registry.locks.lock_peer import LockPeer
from orchestrator.registry.locks.lock_probe import PeerCall, ProbeFailed, lock_fault, locks_work, other_peer, probe_file
from orchestrator.registry.locks.lock_proof import Proof, is_proved, proofs, prove, prove_with
from orchestrator.registry.store import Store

LOCAL, SHARED, UNKNOWN, UNSHARED = LockSupport
HERE = lock_proof.socket.gethostname()


def mount(kind: str, options: str = "rw", source: str = "somewhere:/x") -> Mount:
    """As the kernel writes it into /proc/self/mountinfo."""
    found = mount_of(Path("/x/registry.db"), f"30 22 0:40 / /x rw,relatime shared:2 - {kind} {source} {options}\n")
    assert found is not None
    return found


NFS3 = "rw,vers=3,rsize=1048576,hard,proto=tcp,mountaddr=10.0.0.1,mountvers=3,{}"


@pytest.mark.parametrize(
    ("kind", "options", "support", "reason"),
    [
        ("ext4", "rw", LOCAL, "one host"),
        ("overlay", "rw,lowerdir=/l,upperdir=/u,workdir=/w", LOCAL, "one host"),
        ("tmpfs", "rw", LOCAL, "one host"),
        ("nfs4", "rw,vers=4.2,hard,local_lock=none", SHARED, "nfs4 shows locks to all hosts"),
        ("nfs", NFS3.format("local_lock=none"), SHARED, "all hosts"),
        ("nfs", NFS3.format("local_lock=flock"), SHARED, "all hosts"),
        ("nfs", NFS3.format("nolock,local_lock=all"), UNSHARED, "mounted with local_lock=all"),
        ("nfs", NFS3.format("local_lock=posix"), UNSHARED, "mounted with local_lock=posix"),
        ("nfs", NFS3.format("nolock"), UNSHARED, "mounted with nolock"),
        ("lustre", "rw,flock,lazystatfs", SHARED, "all hosts"),
        ("lustre", "rw,localflock,lazystatfs", UNSHARED, "mounted with localflock"),
        ("lustre", "rw,lazystatfs", UNSHARED, "mounted without flock"),
        ("gpfs", "rw", SHARED, "all hosts"),
        ("ceph", "rw,name=a,acl", SHARED, "all hosts"),
        ("gfs2", "rw", SHARED, "all hosts"),
        ("gfs2", "rw,localflocks", UNSHARED, "mounted with localflocks"),
        ("beegfs", "rw,cfgFile=/etc/beegfs/beegfs-client.conf", UNKNOWN, "tuneUseGlobalFileLocks=true"),
        ("fuse.juicefs", "rw,user_id=0,allow_other", UNKNOWN, "fuse.juicefs is not known"),
        ("fuse.ceph-fuse", "rw", UNKNOWN, "is not known"),
        ("fuse.glusterfs", "rw", UNKNOWN, "is not known"),
        ("wekafs", "rw,writecache", UNKNOWN, "is not known"),
        ("9p", "rw,trans=virtio,version=9p2000.L", UNKNOWN, "every lock with yes"),
        ("9p", "rw,trans=virtio,cache=loose", UNSHARED, "mounted with cache=loose"),
        ("virtiofs", "rw", UNKNOWN, "virtiofsd"),
        ("cifs", "rw,vers=3.1.1,cache=strict", UNKNOWN, "is not known"),
        ("cifs", "rw,nobrl", UNSHARED, "mounted with nobrl"),
        ("fuse.sshfs", "rw,user_id=1000", UNSHARED, "no locks of its own"),
        ("fuse.s3fs", "rw", UNSHARED, "object store"),
        ("vboxsf", "rw", UNSHARED, "shared folders"),
        ("afs", "rw", UNSHARED, "byte ranges"),
        ("newfs", "rw", UNKNOWN, "newfs is not known"),
    ],
)
def test_what_is_known_of_a_file_system(kind: str, options: str, support: LockSupport, reason: str) -> None:
    found, why = lock_support(mount(kind, options))
    assert found is support
    assert reason in why


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "registry.db"


def test_the_journal_follows_the_locks_and_nothing_is_left_behind(path: Path) -> None:
    assert lock_mode_for(path, mount("ext4")).journal == "wal"
    on_nfs = lock_mode_for(path, mount("nfs4"))
    assert (on_nfs.journal, on_nfs.linked) == ("delete", False)
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("kind", ["beegfs", "fuse.juicefs", "9p", "virtiofs", "newfs"])
def test_unknown_locks_are_refused_with_two_ways_out(path: Path, kind: str) -> None:
    with pytest.raises(RegistryError, match=f"the file system {kind} at /x cannot hold the registry") as caught:
        lock_mode_for(path, mount(kind))
    assert caught.value.hint.startswith("set ORCH_REGISTRY=")
    assert "orch doctor --locks" in caught.value.hint


def test_locks_that_never_reach_another_host_are_refused_with_one_way_out(path: Path) -> None:
    for refused in (mount("fuse.sshfs"), mount("nfs", "rw,nolock"), None):
        with pytest.raises(RegistryError) as caught:
            lock_mode_for(path, refused)
        assert "ORCH_REGISTRY=" in caught.value.hint
        assert "--locks" not in caught.value.hint


def test_locks_that_do_not_work_on_this_host_are_refused_everywhere(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise OSError(38, "Function not implemented")

    assert locks_work(path)
    monkeypatch.setattr(lock_peer.fcntl, "lockf", broken)
    with pytest.raises(RegistryError, match="does not stop another one"):
        lock_mode_for(path, mount("nfs4"))


def test_a_lock_that_the_other_process_ignores_is_noticed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(descriptor: int, how: int, *rest: int) -> None:
        assert how in (fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN)

    monkeypatch.setattr(lock_peer.fcntl, "lockf", nothing)
    assert not locks_work(path)


# ---- between two hosts: the other one is a second process that gives another name, since a host has one kernel


@pytest.fixture
def halves(path: Path) -> Iterator[Callable[[bool], tuple[PeerCall, PeerCall]]]:
    """This host's half and another one's, on the same file, or (True) on one that this host does not see."""
    with (
        probe_file(path) as seen,
        probe_file(path) as unseen,
        other_peer((), seen) as same,
        other_peer((), unseen) as apart,
        closing(LockPeer(str(seen))) as here,
    ):

        def made(is_apart: bool) -> tuple[PeerCall, PeerCall]:
            there = apart if is_apart else same
            return here.do, lambda text: "node7 another-boot" if text == "who" else there(text)

        yield made


def test_a_proof_between_two_hosts_opens_the_place_for_them(
    path: Path, halves: Callable[[bool], tuple[PeerCall, PeerCall]]
) -> None:
    juice = mount("fuse.juicefs", source="JuiceFS:home")
    found = prove(path, juice, *halves(False), 1000.0)
    assert found == Proof(kind="fuse.juicefs", source="JuiceFS:home", hosts=(HERE, "node7"), proved_at=1000.0)
    assert proofs(path) == [found]
    allowed = lock_mode_for(path, juice)
    assert (allowed.journal, allowed.linked) == ("delete", True)
    assert lock_mode_for(path.with_name("draft.db"), juice) == allowed, "a rebuild makes it under another name"
    assert is_proved(path, juice, "node7")
    assert not is_proved(path, juice, "node8"), "its client may be configured in another way"
    assert not is_proved(path, mount("fuse.juicefs", source="JuiceFS:other"))


def test_locks_that_stay_on_each_host_are_seen_and_take_a_proof_back(
    path: Path, halves: Callable[[bool], tuple[PeerCall, PeerCall]]
) -> None:
    beegfs = mount("beegfs")
    assert isinstance(prove(path, beegfs, *halves(False), 1000.0), Proof)
    fault = prove(path, beegfs, *halves(True), 2000.0)
    assert fault == f"a lock of this host does not stop the other one ({HERE} and node7)"
    assert proofs(path) == []
    with pytest.raises(RegistryError, match="tuneUseGlobalFileLocks"):
        lock_mode_for(path, beegfs)


@pytest.mark.parametrize(
    ("lies", "fault"),
    [
        ({"lock": "free"}, "a lock of this host does not stop the other one"),
        ({"read": ""}, "the other one does not see what this host wrote under its lock"),
        ({"link": "free"}, "a name that this host linked can be linked again by the other one"),
    ],
)
def test_each_thing_that_sqlite_or_the_link_needs_is_tried(
    path: Path, halves: Callable[[bool], tuple[PeerCall, PeerCall]], lies: dict[str, str], fault: str
) -> None:
    here, there = halves(False)
    found = prove(path, mount("newfs"), here, lambda text: lies.get(text) or (text in lies and "-") or there(text), 1.0)
    assert isinstance(found, str)
    assert found.startswith(fault)


def test_a_process_on_this_machine_is_no_other_host(path: Path) -> None:
    found = prove_with((), path, mount("newfs"), 1.0)
    assert found == f"{HERE} is this same machine: only another one proves anything"
    assert os.listdir(path.parent) == []


def test_a_host_that_cannot_be_asked_proves_nothing(path: Path) -> None:
    with pytest.raises(ProbeFailed, match="no such node"):
        prove_with(("sh", "-c", "echo no such node >&2; exit 1", "--"), path, mount("newfs"), 1.0)
    with pytest.raises(OSError, match="no-such-launcher"):
        prove_with(("no-such-launcher",), path, mount("newfs"), 1.0)


@pytest.fixture
def two_clients(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    """One folder of a server, mounted twice by sshfs: two clients that know nothing of each other, as two hosts are."""
    server = Path("/usr/lib/openssh/sftp-server")
    lacking = [name for name in ("sshfs", "fusermount3") if shutil.which(name) is None]
    if lacking or not server.exists() or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip(f"a real network file system needs sshfs, sftp-server and /dev/fuse; lacking: {lacking}")
    (tmp_path / "folder").mkdir()
    ssh = tmp_path / "ssh"
    ssh.write_text(f"#!/bin/sh\nexec {server}\n")
    ssh.chmod(0o755)
    clients = (tmp_path / "one", tmp_path / "two")
    with ExitStack() as mounted_ones:
        for client in clients:
            client.mkdir()
            subprocess.run(["sshfs", "-o", f"ssh_command={ssh}", f"host:{tmp_path}/folder", client], check=True)
            mounted_ones.callback(subprocess.run, ["fusermount3", "-u", client], check=True)
        yield clients


def test_two_clients_of_a_real_network_file_system(two_clients: tuple[Path, Path]) -> None:
    one, two = two_clients
    found = mounted(one)
    assert found is not None
    assert (found.kind, lock_support(found)[0]) == ("fuse.sshfs", UNSHARED)
    with (
        probe_file(one / "registry.db") as path,
        other_peer((), two / path.name) as there,
        closing(LockPeer(str(path))) as here,
    ):
        fault = lock_fault(here.do, there)
    assert fault == "a lock of this host does not stop the other one"
    with pytest.raises(RegistryError, match="fuse.sshfs at .* cannot hold the registry: sshfs has no locks"):
        Store.open(one / "registry.db")


@pytest.mark.parametrize("text", ["", "[{}]", "{", '[{"kind": 1}]', "[[1]]"])
def test_a_file_of_proofs_that_is_none_proves_nothing(path: Path, text: str) -> None:
    lock_proof.proof_file(path).write_text(text)
    assert proofs(path) == []


# ---- a registry that is there already


def journal_of(path: Path) -> str:
    raw = sqlite3.connect(path)
    try:
        return str(raw.execute("PRAGMA journal_mode").fetchone()[0])
    finally:
        raw.close()


def test_a_registry_that_moved_to_nfs_leaves_wal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store.open(path).close()
    local = mounted(path.parent)
    assert local is not None
    assert journal_of(path) == ("wal" if local.is_local else "delete")
    monkeypatch.setattr(store, "mounted", lambda folder: mount("nfs4"))
    with Store.open(path) as moved:
        digest = moved.put_config({"a": 1})
        assert moved.config(digest) == {"a": 1}
    assert journal_of(path) == "delete"


def test_a_registry_at_a_refused_place_is_read_and_says_how_to_move_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(path) as made:
        digest = made.put_config({"a": 1})
    monkeypatch.setattr(store, "mounted", lambda folder: mount("beegfs"))
    with pytest.raises(RegistryError, match="the file system beegfs at /x cannot hold") as caught:
        Store.open(path)
    assert "it can still be read. Move it: `orch db backup /path" in caught.value.hint
    assert fast_queries.newest(path) == []
    with Store.open(path, readonly=True) as read:
        assert read.config(digest) == {"a": 1}


def test_a_refused_place_gets_no_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "mounted", lambda folder: mount("beegfs"))
    with pytest.raises(RegistryError):
        Store.open(path)
    assert os.listdir(path.parent) == []


def test_a_proved_place_has_a_link_around_every_write(
    path: Path, halves: Callable[[bool], tuple[PeerCall, PeerCall]], monkeypatch: pytest.MonkeyPatch
) -> None:
    prove(path, mount("newfs"), *halves(False), 1.0)
    monkeypatch.setattr(store, "mounted", lambda folder: mount("newfs"))
    lock = path.with_name("registry.db.lock")
    with Store.open(path) as opened:
        seen = opened.together(lambda: lock.exists())
        assert seen, "the lock is held while the work is done"
        assert not lock.exists(), "and given back"
    assert journal_of(path) == "delete"
