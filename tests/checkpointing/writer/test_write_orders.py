"""Orders that cannot be executed are answered with an error."""

import ctypes
import errno
import os
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from checkpointing.engine.collectives.group import Failed
from checkpointing.errors import FencedOff
from checkpointing.format.commit import write_file
from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.digests import CHUNK, digest, filled_digest
from checkpointing.storage.shared_memory import PAGE
from checkpointing.writer import write_orders
from checkpointing.writer.arena import Arena
from checkpointing.writer.link import WriterLink, WriterLost
from checkpointing.writer.process import exit_with_parent, lower_priority
from checkpointing.writer.write_orders import (
    CancelToken,
    MessageStream,
    WriteOrder,
    decode_error,
    encode_error,
    write_files,
)
from tests.checkpointing.in_process_writer import InProcessWriter


def an_order(root: Path, files: int) -> WriteOrder:
    spans = tuple((f"__0_{n}.distcp", n * PAGE, PAGE) for n in range(files))
    return WriteOrder(place=str(root), folder="step", buffer=0, files=spans, step=1, plan="p")


@pytest.fixture
def arena() -> Arena:
    made = Arena.create()
    made.shape(4 * PAGE, 1, "p")
    return made


class Gives(LocalStorage):
    """A storage whose library raises its own kind of error for one file."""

    def __init__(self, root: Path, error: BaseException) -> None:
        super().__init__(root)
        self.error = error

    def create(self, path: str) -> Any:
        if path.endswith("_1.distcp"):
            raise self.error
        return super().create(path)


@pytest.mark.parametrize("error", [IndexError("list index"), ValueError("no such bucket"), RuntimeError("closed")])
def test_a_file_that_a_library_did_not_write_is_not_reported_as_written(
    tmp_path: Path, arena: Arena, error: Exception
) -> None:
    (tmp_path / "step").mkdir()
    with pytest.raises(type(error)):
        write_files(an_order(tmp_path, 3), arena, CancelToken(), Gives(tmp_path, error))


@pytest.mark.parametrize("past_the_cache", [(True, True, True), (True, False, True)])
def test_a_save_counts_as_direct_if_all_of_its_files_are(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch, past_the_cache: tuple[bool, ...]
) -> None:
    (tmp_path / "step").mkdir()
    answers = list(past_the_cache)
    monkeypatch.setattr(write_orders, "write_direct", lambda *_, **__: answers.pop())
    assert write_files(an_order(tmp_path, 3), arena, CancelToken()).direct is all(past_the_cache)


class Uploads(LocalStorage):
    """A store that shows a file when its sink is closed, and a cancel during the last block."""

    def __init__(self, root: Path, cancel_token: CancelToken) -> None:
        super().__init__(root)
        self.cancel_token, self.done = cancel_token, ""

    def create(self, path: str) -> Any:
        return self

    def write(self, data: memoryview) -> None:
        self.cancel_token.cancel()

    def close(self) -> None:
        self.done = "shown"

    def abort(self) -> None:
        self.done = "given up"


def test_an_upload_that_was_cancelled_at_its_end_does_not_appear(tmp_path: Path, arena: Arena) -> None:
    cancel_token = CancelToken()
    store = Uploads(tmp_path, cancel_token)
    with pytest.raises(OSError, match="canceled") as raised:
        write_files(an_order(tmp_path, 1), arena, cancel_token, store)
    assert raised.value.errno == errno.ECANCELED
    assert store.done == "given up"


def test_a_writer_that_sends_nonsense_is_lost_and_not_waited_for() -> None:
    ours, theirs = socket.socketpair()
    link = WriterLink(ours, Arena.create())
    waiting = link.ping()
    MessageStream(theirs).send({"id": 99, "result": {}})
    with pytest.raises(WriterLost):
        waiting.result(10)
    assert not link.alive
    theirs.settimeout(10)
    while theirs.recv(100):  # the order, and then the end
        pass
    link.close()
    theirs.close()


def test_an_order_without_a_thread_is_refused_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    link = InProcessWriter()

    def none_left(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(write_orders.threading.Thread, "start", none_left)
        with pytest.raises(RuntimeError):
            link.write(an_order(Path("/nowhere"), 1))
    assert not link._orders._running
    link._orders.until_unread("/nowhere")
    link.close()


def test_a_fence_on_any_rank_counts_for_all() -> None:
    failed = Failed.combine([None, Failed("no token", fenced=True), Failed("disk full")])
    assert failed is not None
    assert isinstance(failed.error(1), FencedOff)


def test_a_small_file_lets_large_writes_end_before_it_waits_for_the_disk(tmp_path: Path, monkeypatch) -> None:
    order: list[str] = []
    (tmp_path / "step").mkdir()
    monkeypatch.setattr(os, "fsync", lambda _: order.append("fsync"))
    write_file(LocalStorage(tmp_path), "step", "x", b"y", lambda: order.append("others have ended"))
    assert order.index("others have ended") < order.index("fsync")


def test_the_names_of_the_files_are_durable_when_an_order_is_done(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[set[str]] = []
    monkeypatch.setattr(write_orders, "fsync_dir", lambda folder: synced.append(set(os.listdir(folder))))
    write_files(an_order(tmp_path, 2), arena, CancelToken())
    assert synced == [{"__0_0.distcp", "__0_1.distcp"}]


def test_no_guarded_action_happens_after_a_halt() -> None:
    token, done = CancelToken(), list[int]()
    token.unless_halted(lambda: done.append(1))
    assert not token.is_halted()
    token.halt()
    token.unless_halted(lambda: done.append(2))
    assert (done, token.is_halted(), token.is_cancelled()) == ([1], True, True)
    with pytest.raises(OSError, match="canceled"):
        token.check()


def test_regions_of_one_file_are_written_by_many_and_digested_with_their_padding(tmp_path: Path) -> None:
    """A region that fills its last chunk has that chunk's own digest there."""
    arena = Arena.create()
    arena.shape(2 * CHUNK + 2 * PAGE, 1, "p")
    for begin, size in ((0, PAGE + 7), (2 * PAGE, CHUNK), (2 * PAGE + CHUNK, CHUNK)):
        arena.buffer(0)[begin : begin + size] = (os.urandom(PAGE) * (1 + CHUNK // PAGE))[:size]
    files = (("a", 0, PAGE + 7), ("b", 2 * PAGE, 2 * CHUNK))
    order = replace(an_order(tmp_path, 1), files=files, places=(("node", 2 * CHUNK), ("node", 0)))
    result = write_files(order, arena, CancelToken())
    first, second = bytes(arena.buffer(0)[: PAGE + 7]), bytes(arena.buffer(0)[2 * PAGE :])
    assert (tmp_path / "step" / "node").read_bytes() == second + first
    chunks = (digest(second[:CHUNK]), digest(second[CHUNK:]))
    assert [entry.chunks for entry in result.files] == [(digest(first),), chunks]
    assert result.filled == (filled_digest(first), chunks[1])
    with pytest.raises(OSError, match="several ranks cannot write to one object") as caught:
        write_files(order, arena, CancelToken(), Gives(tmp_path, ValueError()))
    assert caught.value.errno == errno.EOPNOTSUPP


def test_a_file_whose_library_ends_its_thread_is_not_written(tmp_path: Path, arena: Arena) -> None:
    (tmp_path / "step").mkdir()
    with pytest.raises(OSError, match="a file was not written"):
        write_files(an_order(tmp_path, 3), arena, CancelToken(), Gives(tmp_path, SystemExit()))


def test_threads_instead_of_a_writer_are_never_lost_and_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    link, populated = InProcessWriter(), threading.Event()
    assert link.alive
    assert link.replacement() is link
    monkeypatch.setattr(link.arena, "populate", populated.set)
    link.warm().result(10)
    assert populated.is_set()
    asleep = threading.Event()

    def order(token: CancelToken) -> None:
        asleep.set()
        token.sleep(600)
        token.check()

    sleeping = link._orders.start(order)
    assert asleep.wait(10)
    assert not sleeping.done(), "it sleeps until it is cancelled"
    link.cancel()
    with pytest.raises(OSError, match="canceled"):
        sleeping.result(10)
    link.close()


def test_an_order_that_cannot_be_sent_ends_as_one_of_a_lost_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    link = WriterLink(ours, Arena.create())

    def broken(*_: Any) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(link._messages, "send", broken)
    assert isinstance(link.ping().exception(10), WriterLost)
    assert not link.alive
    link.close()
    theirs.close()


@pytest.mark.parametrize("parent", ["dead", "other"])
def test_a_writer_whose_parent_is_gone_before_it_is_watched_ends_at_once(parent: str) -> None:
    dead = os.fork()
    if not dead:
        os._exit(0)
    os.waitpid(dead, 0)
    child = os.fork()
    if not child:
        try:
            exit_with_parent(dead if parent == "dead" else 1, by_signal=False)
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_several_files_are_written_at_a_time(tmp_path: Path) -> None:
    together, names = threading.Barrier(4, timeout=10), set[str]()

    class Noting(LocalStorage):
        def create(self, path: str) -> Any:
            together.wait()
            names.add(threading.current_thread().name)
            return super().create(path)

    arena = Arena.create()
    arena.shape(8 * PAGE, 1, "p")
    assert len(write_files(an_order(tmp_path, 8), arena, CancelToken(), Noting(tmp_path)).files) == 8
    assert names == {f"file_{number}" for number in range(4)}


def test_an_error_crosses_the_socket_with_its_number_and_file_or_as_a_text_that_is_not_too_long() -> None:
    reported = encode_error(OSError(errno.ENOSPC, "No space left", Path("/a/b")))
    assert reported == {"errno": errno.ENOSPC, "text": "No space left", "file": "/a/b"}
    assert (decode_error(reported).errno, decode_error(reported).filename) == (errno.ENOSPC, "/a/b")
    assert decode_error({**reported, "file": None}).filename is None
    long = encode_error(ValueError("x" * 5000))
    assert (long["errno"], long["file"], len(long["text"])) == (None, None, 4000)
    assert str(decode_error(long)).startswith("ValueError: xxx")


def test_a_writer_has_the_lowest_disk_priority() -> None:
    """Its class and level of I/O: the last one of the usual class. In a fork, whose priority stays low."""
    child = os.fork()
    if not child:
        try:
            lower_priority()
            found = ctypes.CDLL(None).syscall(252, 1, 0)  # ioprio_get of this process
            os._exit(found >> 13 << 3 | found & 7)
        finally:
            os._exit(255)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (2 << 3 | 7 if os.uname().machine == "x86_64" else 255)
