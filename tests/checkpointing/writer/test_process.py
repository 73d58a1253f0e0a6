"""The real writer process: its files, failures, lifetime and hung disks."""

import errno
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from checkpointing.format.manifest import FileEntry
from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.digests import digest
from checkpointing.tiers.copy_files import CopyOrder
from checkpointing.writer.arena import Arena
from checkpointing.writer.link import WriterLink, WriterLost
from checkpointing.writer.write_orders import WriteOrder
from tests.checkpointing.fake_storages import Faulty, full_after
from tests.checkpointing.in_process_writer import InProcessWriter
from tests.checkpointing.proofs.mounts import frozen, loop_ext4, remount, small_tmpfs
from tests.forked_writers import execute_child
from tests.trainer.agent.job import alive, until

MIB = 1 << 20
SECONDS = 20


def shaped(arena: Arena, size: int = 12 * MIB) -> None:
    arena.shape(size, 2, "p1")
    for index in range(2):
        arena.buffer(index)[:] = os.urandom(MIB) * (size // MIB)


def order(place: Path | str, folder: str = "s1", *, size: int = 12 * MIB, files: int = 1, **over: object) -> WriteOrder:
    part = size // files
    parts = tuple((f"__0_{at}.distcp", at * part, part) for at in range(files))
    fields = {"place": str(place), "folder": folder, "buffer": 0, "files": parts, "step": 1, "plan": "p1"}
    return WriteOrder(**{**fields, **over})


@pytest.fixture(params=["process", "threads"])
def writer(request: pytest.FixtureRequest) -> Iterator[WriterLink | InProcessWriter]:
    made = WriterLink.start() if request.param == "process" else InProcessWriter()
    shaped(made.arena)
    yield made
    made.close()


@pytest.fixture
def link() -> Iterator[WriterLink]:
    made = WriterLink.start(label="7")
    shaped(made.arena)
    yield made
    made.close()


def pid_of(link: WriterLink) -> int:
    assert link._process is not None
    return link._process.pid


@pytest.mark.parametrize("files", [1, 6])
def test_files_digests_and_record_are_of_the_staged_bytes(writer, tmp_path, files):
    asked = order(tmp_path / "new" / "root", files=files, buffer=1, extra={"at": [1, "x"]}, step=9)
    wrote = writer.write(asked).result(SECONDS)
    buffer = writer.arena.buffer(1)
    for entry, (name, offset, size) in zip(wrote.files, asked.files, strict=True):
        data = bytes(buffer[offset : offset + size])
        assert (tmp_path / "new" / "root" / "s1" / name).read_bytes() == data
        assert entry == FileEntry.from_bytes(name, data)
    record = writer.arena.record(1)
    assert (record.step, record.plan, record.name, record.extra) == (9, "p1", "s1", {"at": [1, "x"]})
    assert (record.files, record.places) == (wrote.files, tuple(offset for _, offset, _ in asked.files))
    assert writer.arena.record(0) is None
    writer.write(order(tmp_path, "s2", publish=False)).result(SECONDS)
    assert writer.arena.record(0) is None


def test_places_that_are_urls_are_written_to(writer, tmp_path):
    wrote = writer.write(order(f"local://{tmp_path}", files=2)).result(SECONDS)
    assert not wrote.direct
    assert (tmp_path / "s1" / "__0_1.distcp").read_bytes() == bytes(writer.arena.buffer(0)[6 * MIB :])
    assert writer.put(f"local://{tmp_path}", "s1", ".metadata", b"abc").result(SECONDS).size == 3


def test_small_files_and_copies_run_beside_the_writes(writer, tmp_path):
    big = os.urandom(3 * MIB)
    writes = [writer.write(order(tmp_path / "a", f"s{at}", buffer=at)) for at in range(2)]
    puts = [writer.put(str(tmp_path / "a"), f"s{at}", ".metadata", big) for at in range(2)]
    entries = (*writes[0].result(SECONDS).files, puts[0].result(SECONDS))
    assert entries[1].chunks == (digest(big),)
    made = CopyOrder(source=str(tmp_path / "a"), target=str(tmp_path / "b"), folder="s0", files=entries)
    copied = writer.copy(made).result(SECONDS)
    assert (copied.bytes, copied.bad) == (15 * MIB, "")
    for entry in entries:
        assert (tmp_path / "b" / "s0" / entry.name).read_bytes() == (tmp_path / "a" / "s0" / entry.name).read_bytes()
    assert [write.result(SECONDS).files[0].size for write in writes] == [12 * MIB] * 2


def fault(future: "Future[object]") -> tuple[type[BaseException], int | None]:
    error = future.exception(SECONDS)
    assert isinstance(error, OSError)
    return type(error), error.errno


def test_errors_keep_their_errno(writer, tmp_path):
    writer.write(order(tmp_path)).result(SECONDS)
    assert fault(writer.write(order(tmp_path))) == (FileExistsError, errno.EEXIST)
    assert fault(writer.put(str(tmp_path), "s1", "__0_0.distcp", b"")) == (FileExistsError, errno.EEXIST)
    assert fault(writer.write(order("/proc/nowhere"))) == (FileNotFoundError, errno.ENOENT)
    assert fault(writer.write(order(tmp_path, "s2", plan="other"))) == (OSError, errno.ESTALE)
    assert "name" in str(writer.put(str(tmp_path), "s3", "COMMIT", b"").exception(SECONDS))
    assert "ghost" in str(writer.write(order("ghost://x", "s4")).exception(SECONDS))
    assert writer.ping().result(SECONDS) is None


def test_a_state_the_disk_does_not_take_is_still_recorded_in_memory(writer, tmp_path):
    with small_tmpfs(tmp_path / "tiny", "2m") as tiny:
        assert fault(writer.write(order(tiny, files=2))) == (OSError, errno.ENOSPC)
        assert writer.arena.record(0).step == 1
        remount(tiny, "ro")
        assert fault(writer.write(order(tiny, "s2"))) == (OSError, errno.EROFS)


def test_a_failing_storage_of_the_caller_is_reported_with_its_number(tmp_path):
    writer = InProcessWriter(Faulty(tmp_path, full_after(9 * MIB)))
    shaped(writer.arena)
    assert fault(writer.write(order("anywhere"))) == (OSError, errno.ENOSPC)
    writer.close()
    writer = InProcessWriter(LocalStorage(tmp_path / "b"))
    shaped(writer.arena)
    assert writer.write(order("anywhere")).result(SECONDS).files[0].size == 12 * MIB
    assert (tmp_path / "b" / "s1" / "__0_0.distcp").stat().st_size == 12 * MIB
    writer.close()


def test_the_writer_sees_a_new_shape(link, tmp_path):
    link.write(order(tmp_path)).result(SECONDS)
    link.arena.shape(20 * MIB, 1, "p2")
    link.arena.buffer(0)[:] = b"2" * (20 * MIB)
    link.warm().result(SECONDS)
    link.write(order(tmp_path, "s2", size=20 * MIB, plan="p2")).result(SECONDS)
    assert (tmp_path / "s2" / "__0_0.distcp").read_bytes() == b"2" * (20 * MIB)


def test_a_link_costs_two_descriptors_and_leaves_none():
    before = len(os.listdir("/proc/self/fd"))
    link = WriterLink.start()
    shaped(link.arena)
    link.ping().result(SECONDS)
    assert len(os.listdir("/proc/self/fd")) == before + 2
    pid = pid_of(link)
    link.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not alive(pid)


def test_the_writer_runs_at_low_priority_and_ignores_signals_of_slurm(monkeypatch):
    monkeypatch.setattr(subprocess.Popen, "_execute_child", execute_child)  # the program itself
    link = WriterLink.start(label="7")
    link.ping().result(SECONDS)
    pid = pid_of(link)
    assert Path(f"/proc/{pid}/comm").read_text().strip() == "orch-writer-7"
    assert os.getpriority(os.PRIO_PROCESS, pid) == min(19, os.getpriority(os.PRIO_PROCESS, 0) + 10)
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGCONT, signal.SIGINT):
        os.kill(pid, number)
    assert link.ping().result(SECONDS) is None
    maps = Path(f"/proc/{pid}/maps").read_text()
    link.close()
    assert "torch" not in maps


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.proof) for seed in range(2, 30))])
def test_a_killed_writer_ends_every_future_and_is_replaced_over_the_same_memory(tmp_path, seed):
    link = WriterLink.start()
    shaped(link.arena, 64 * MIB)
    link.write(order(tmp_path, "s0", size=64 * MIB, buffer=1)).result(SECONDS)
    link.arena.clear(0)
    futures = [link.write(order(tmp_path, "s1", size=64 * MIB)), link.put(str(tmp_path), "s1", "x", b"y" * MIB)]
    time.sleep(random.Random(seed).random() * 0.04)  # the moment is what the seed chooses
    os.kill(pid_of(link), signal.SIGKILL)
    for future in futures:
        assert isinstance(future.exception(SECONDS), WriterLost | None)
    until(lambda: not link.alive, 30)
    assert isinstance(link.write(order(tmp_path, "s2")).exception(SECONDS), WriterLost)
    fresh = link.replacement()
    assert fresh.arena.record(1).name == "s0"
    assert fresh.arena.record(0) is None or fresh.arena.record(0).name == "s1"
    assert fresh.write(order(tmp_path, "s3", size=64 * MIB)).result(SECONDS).files[0].size == 64 * MIB
    assert (tmp_path / "s3" / "__0_0.distcp").read_bytes() == bytes(fresh.arena.buffer(0))
    fresh.close()


def test_a_writer_that_cannot_be_started_is_a_lost_one(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    link = WriterLink.start()
    assert isinstance(link.ping().exception(SECONDS), WriterLost)
    link.close()


def test_a_writer_that_does_not_end_is_killed_or_left_behind(monkeypatch):
    monkeypatch.setattr("checkpointing.writer.link._LEAVE_SECONDS", 0.01)
    link = WriterLink.start()
    process = link._process
    link.ping().result(SECONDS)
    os.kill(process.pid, signal.SIGSTOP)
    killed = []
    monkeypatch.setattr(process, "kill", lambda: killed.append(process.pid))
    link.close()
    assert killed == [process.pid]
    assert link.arena.descriptor == -1
    os.kill(process.pid, signal.SIGKILL)
    process.wait(SECONDS)


_OWNER = """
import os, sys, time
from checkpointing.writer.link import WriterLink
link = WriterLink.start()
link.ping().result(20)
if os.fork() == 0:  # a child, as of a data loader: it holds the socket open
    time.sleep(60)
print(link._process.pid, flush=True)
time.sleep(60)
"""


def test_a_writer_dies_with_its_rank_even_if_another_process_holds_the_socket():
    with subprocess.Popen([sys.executable, "-c", _OWNER], stdout=subprocess.PIPE, start_new_session=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        try:
            assert alive(pid)
            os.kill(owner.pid, signal.SIGKILL)
            until(lambda: not alive(pid), 30)
        finally:
            os.killpg(owner.pid, signal.SIGKILL)


def test_cancelling_ends_what_is_in_flight_and_nothing_else(link, tmp_path):
    slow = CopyOrder(
        source=str(tmp_path), target=str(tmp_path / "b"), folder="s0", bandwidth=0.001,
        files=link.write(order(tmp_path, "s0")).result(SECONDS).files,
    )  # fmt: skip
    copying = link.copy(slow)
    until(lambda: (tmp_path / "b" / "s0").exists(), 30)
    assert link.cancel() is None
    assert fault(copying) == (OSError, errno.ECANCELED)
    assert link.write(order(tmp_path, "s1")).result(SECONDS).files[0].size == 12 * MIB


def test_a_hung_disk_delays_nothing_else(link, tmp_path):
    with loop_ext4(tmp_path / "disk", 64) as disk:
        (disk / "s1").mkdir()
        with frozen(disk):
            hung = [link.write(order(disk)), link.put(str(disk), "s1", "x", b"y"), link.put(str(disk), "s1", "z", b"")]
            for at in range(3):
                assert link.ping().result(SECONDS) is None
                assert link.write(order(tmp_path, f"s{at}", buffer=1)).result(SECONDS).files
                assert link.put(str(tmp_path), f"s{at}", "x", b"y").result(SECONDS).size == 1
            assert link.arena.record(0).step == 1  # digested and vouched for, whatever the disk does
            assert not any(future.done() for future in hung)
        for future in hung:
            future.result(SECONDS)
        assert (disk / "s1" / "__0_0.distcp").read_bytes() == bytes(link.arena.buffer(0))


class Owned:
    """An agent: starts a writer for each generation."""

    def __init__(self) -> None:
        self.arena = Arena.create()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", "-m", "checkpointing.writer.process", "many"]
        command += [str(theirs.fileno()), str(self.arena.descriptor), str(os.getpid()), "0"]
        with theirs:
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno(), self.arena.descriptor])

    def rank(self, patience: float = SECONDS) -> WriterLink:
        """Connect as a new generation's rank."""
        ours, theirs = socket.socketpair()
        with ours:
            socket.send_fds(self.control, [b"c"], [ours.fileno()])
        return WriterLink.attach(theirs.detach(), os.dup(self.arena.descriptor), patience)

    def close(self) -> None:
        self.control.close()
        assert self.process.wait(30) == 0
        self.arena.close()


@pytest.fixture
def owned() -> Iterator[Owned]:
    made = Owned()
    yield made
    made.close()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.proof) for seed in range(2, 20))])
def test_a_new_generation_finds_the_memory_of_the_last_one_and_is_not_disturbed_by_it(owned, tmp_path, seed):
    first = owned.rank()
    shaped(first.arena, 64 * MIB)
    content = bytes(first.arena.buffer(0))
    given_up = first.write(order(tmp_path, "s1", size=64 * MIB))
    time.sleep(random.Random(seed).random() * 0.03)  # the moment is what the seed chooses
    if seed:
        first.close()  # its rank is dead; with seed 0 something still holds the connection
    second = owned.rank()
    assert isinstance(given_up.exception(SECONDS), WriterLost | None)
    record = second.arena.record(0)
    assert (record.step, record.name) == (1, "s1")
    assert bytes(second.arena.buffer(0)) == content
    assert record.files == (FileEntry.from_bytes("__0_0.distcp", content),)
    second.arena.clear(0)
    second.arena.buffer(0)[:MIB] = bytes(MIB)
    assert second.write(order(tmp_path, "s2", size=64 * MIB, publish=False)).result(SECONDS).files
    assert second.arena.record(0) is None  # nothing of the first generation came in between
    assert (tmp_path / "s2" / "__0_0.distcp").read_bytes() == bytes(MIB) + content[MIB:]
    if not seed:
        first.close()
    second.close()


def test_a_new_generation_waits_for_the_digests_of_the_last_one(owned, tmp_path):
    first = owned.rank()
    size = 512 * MIB  # so much takes longer to digest than a connection to be made
    first.arena.shape(size, 1, "p1")
    first.write(order(tmp_path, "s1", size=size))
    second = owned.rank()
    assert second.arena.record(0) is not None
    first.close()
    second.close()


def test_a_generation_is_abandoned_while_its_disk_hangs(owned, tmp_path):
    with loop_ext4(tmp_path / "disk", 64) as disk:
        (disk / "s1").mkdir()
        with frozen(disk):
            first = owned.rank()
            shaped(first.arena)
            first.write(order(disk))
            until(lambda: first.arena.record(0), 30)
            first.close()
            second = owned.rank(patience=4.0)
            assert second.write(order(tmp_path, "s2", buffer=1)).result(SECONDS).files
            second.close()
        # Nobody but the main thread and the one that watches the parent: else the disk could not be taken away.
        until(lambda: len(os.listdir(f"/proc/{owned.process.pid}/task")) <= 2, 10)


def test_a_stopped_writer_is_distinguished_from_a_listening_one(owned):
    owned.rank().close()
    os.kill(owned.process.pid, signal.SIGSTOP)
    with pytest.raises(WriterLost):
        owned.rank(patience=0.2)
    os.kill(owned.process.pid, signal.SIGCONT)


def test_nonsense_on_the_socket_ends_the_connection_and_not_the_writer(owned):
    for nonsense in (b"\xff" * 64, b"\x02\0\0\0{}", b"\x04\0\0\0nope", b"\x01\0", b"\x01\0\0\0[", b"\x03\0\0\0[7]"):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            socket.send_fds(owned.control, [b"c"], [ours.fileno()])
            ours.close()
            theirs.sendall(nonsense)
            theirs.shutdown(socket.SHUT_WR)
            assert theirs.recv(1) == b""
    link = owned.rank()
    assert link.ping().result(SECONDS) is None
    link.close()


def test_an_order_that_cannot_be_read_is_answered_and_the_next_one_is_served(link):
    odd = link._request({"do": "write", "order": {"place": 1}, "stamp": link.arena.stamp})
    assert odd.exception(SECONDS) is not None
    assert link.ping().result(SECONDS) is None
    assert link.alive


def test_a_writer_that_has_just_died_is_replaced_over_the_same_memory(tmp_path):
    ours, theirs = socket.socketpair()
    theirs.close()
    arena = Arena.create()
    shaped(arena)
    arena.buffer(0)[:3] = b"abc"
    made = WriterLink.attach(ours.detach(), os.dup(arena.descriptor))
    try:
        assert made.put(str(tmp_path), "s1", "x", b"1").result(SECONDS).size == 1
        assert bytes(made.arena.buffer(0)[:3]) == b"abc"
    finally:
        made.close()
        arena.close()
