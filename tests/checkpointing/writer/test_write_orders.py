"""An order that cannot be carried out says so: no file that is missing, and no answer that never comes."""

import errno
import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from checkpointing.engine.ranks.group import Failed
from checkpointing.engine.save.saver import _failures
from checkpointing.errors import FencedOff
from checkpointing.storage import direct_io
from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.shared_memory import PAGE
from checkpointing.writer import write_orders
from checkpointing.writer.arena import Arena
from checkpointing.writer.link import InProcessWriter, WriterLink, WriterLost
from checkpointing.writer.write_orders import CancelToken, MessageStream, WriteOrder, put_file, write_files


def an_order(root: Path, files: int) -> WriteOrder:
    spans = tuple((f"__0_{n}.distcp", n * PAGE, PAGE) for n in range(files))
    return WriteOrder(place=str(root), folder="step", buffer=0, files=spans, step=1, plan="p")


@pytest.fixture
def arena() -> Arena:
    made = Arena.create()
    made.shape(4 * PAGE, 1, "p")
    return made


class Gives(LocalStorage):
    """A storage whose library raises something of its own for one file."""

    def __init__(self, root: Path, error: Exception) -> None:
        super().__init__(root)
        self.error = error

    def create(self, path: str) -> Any:
        if path.endswith("_1.distcp"):
            raise self.error
        return super().create(path)


@pytest.mark.parametrize("error", [IndexError("list index"), ValueError("no such bucket"), RuntimeError("closed")])
def test_a_file_that_a_library_did_not_write_is_not_called_written(
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


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_block_that_a_dead_lane_left_out_is_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, names = direct_io._DirectFile._write, []

    def short_of_memory(outlet: Any, at: int, end: int) -> None:
        name = threading.current_thread().name
        if name.startswith("lane-"):
            names.append(name)
            raise MemoryError
        write(outlet, at, end)
        lane_came.wait(10)

    lane_came = threading.Event()
    monkeypatch.setattr(direct_io._DirectFile, "_write", short_of_memory)
    threading.Timer(0.05, lane_came.set).start()
    with pytest.raises(OSError, match="Input/output error"):
        direct_io.write_direct(tmp_path / "f", memoryview(bytearray(64 * PAGE)), block=PAGE, threads=2)
    assert names


class Uploads(LocalStorage):
    """A store that shows a file when its sink is closed; somebody cancels while the last block is on its way."""

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


def test_a_writer_that_speaks_nonsense_is_lost_and_nobody_waits_for_it() -> None:
    ours, theirs = socket.socketpair()
    link = WriterLink(ours, Arena.create())
    waiting = link.ping()
    MessageStream(theirs).send({"id": 99, "result": {}})
    with pytest.raises(WriterLost):
        waiting.result(10)
    assert not link.alive
    link.close()
    theirs.close()


def test_an_order_that_gets_no_thread_is_refused_and_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
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
    failed = _failures([None, Failed("no token", fenced=True), Failed("disk full")])
    assert failed is not None
    assert isinstance(failed.error(1), FencedOff)


def test_a_small_file_lets_large_writes_end_before_it_waits_for_the_disk(tmp_path: Path, monkeypatch) -> None:
    order: list[str] = []
    (tmp_path / "step").mkdir()
    monkeypatch.setattr(os, "fsync", lambda _: order.append("fsync"))
    put_file(LocalStorage(tmp_path), "step", "x", b"y", lambda: order.append("others have ended"))
    assert order.index("others have ended") < order.index("fsync")


def test_the_names_of_the_files_are_durable_when_an_order_is_done(
    tmp_path: Path, arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[set[str]] = []
    monkeypatch.setattr(write_orders, "fsync_dir", lambda folder: synced.append(set(os.listdir(folder))))
    write_files(an_order(tmp_path, 2), arena, CancelToken())
    assert synced == [{"__0_0.distcp", "__0_1.distcp"}]


def test_nothing_that_is_guarded_happens_after_a_halt() -> None:
    token, done = CancelToken(), list[int]()
    token.unless_halted(lambda: done.append(1))
    assert not token.is_halted()
    token.halt()
    token.unless_halted(lambda: done.append(2))
    assert (done, token.is_halted(), token.is_cancelled()) == ([1], True, True)
    with pytest.raises(OSError, match="canceled"):
        token.check()
