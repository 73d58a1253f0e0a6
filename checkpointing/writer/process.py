"""The writer process, which writes a rank's checkpoints without torch and can outlive the rank.

Started as `python -P -m checkpointing.writer.process one|many SOCKET ARENA PARENT LABEL`. `one` serves the rank at the
other end of SOCKET and ends with it. `many` receives connections over SOCKET, one per generation, and ends with its
owner. ARENA is the memory's descriptor, PARENT the pid of the process that started this one.
"""

import contextlib
import ctypes
import os
import platform
import select
import signal
import socket
import sys
import threading
from concurrent.futures import Future
from functools import partial
from typing import Any

from checkpointing.format.commit import write_file
from checkpointing.process_title import set_title
from checkpointing.storage.backends import open_storage
from checkpointing.tiers.copy_files import copy_files
from checkpointing.writer.arena import Arena
from checkpointing.writer.write_orders import (
    MessageStream,
    OrderThreads,
    encode_error,
    write_files,
)

_NICE = 10
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273}
_BEST_EFFORT_LAST = (2 << 13) | 7
_WHOLE_PROCESS = 1
_SET_PDEATHSIG = 1

_IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT)


def ignore_slurm_signals() -> None:
    """Ignore the signals that Slurm and terminals send to all processes. The writer ends only with its owner."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _IGNORED)


def lower_priority() -> None:
    """Take the lowest normal CPU and I/O priority. Errors are ignored."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        # Set before any thread starts, because I/O priority belongs to threads, and new threads inherit it.
        ctypes.CDLL(None).syscall(number, _WHOLE_PROCESS, 0, _BEST_EFFORT_LAST)


def exit_with_parent(parent: int, *, by_signal: bool) -> None:
    """End this process when `parent` does.

    A thread watches the parent. `by_signal` also makes the kernel send SIGKILL, which works even while this process is
    stopped. That signal is tied to the parent's *thread* that started this process, so use it only if that thread lives
    on.
    """
    if by_signal:
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    try:
        handle = os.pidfd_open(parent)
    except ProcessLookupError:
        os._exit(0)
    if os.getppid() != parent:  # the parent died before it could be watched
        os._exit(0)
    threading.Thread(target=_wait_and_exit, args=(handle,), name="parent", daemon=True).start()


def _wait_and_exit(handle: int) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll()
    os._exit(0)


_PATIENCE = 5.0


class WriterSession:
    """A rank's connection. Reads orders and answers each one when it is done."""

    def __init__(self, stream: socket.socket, arena: Arena) -> None:
        self._messages, self._arena, self._orders = MessageStream(stream), arena, OrderThreads()
        self._thread = threading.Thread(target=self.serve, name="session", daemon=True)

    def start(self) -> None:
        """Serve in the background."""
        self._thread.start()

    def serve(self) -> None:
        """Serve until the rank is gone.

        Its orders are then abandoned, except for work needed to finish a memory copy.
        """
        try:
            while (message := self._messages.receive()) is not None:
                header, blob = message
                try:
                    self._execute(header, blob)
                except (OSError, AttributeError, LookupError, RuntimeError, TypeError) as error:
                    self._answer(header["id"], {"fault": encode_error(error)})
        finally:
            # Disconnect so that a peer that sent a malformed message sees the connection end.
            self._messages.disconnect()
            self._orders.cancel()

    def end(self) -> None:
        """End the session before the next connection. Afterwards, none of its orders touches the arena."""
        self._messages.disconnect()
        self._thread.join()
        self._orders.quiesce(_PATIENCE)
        self._messages.close()

    def _execute(self, header: dict[str, Any], blob: bytes) -> None:
        number, start = header["id"], self._orders.start
        match header["do"]:
            case "write":
                self._reload_arena(header["stamp"])
                order = header["order"]
                write = start(lambda token: write_files(order, self._arena, token), reads_memory_for=order.place)
                self._answer_when_done(number, write)
            case "put":
                place, folder, name = header["place"], header["folder"], header["name"]
                unread = partial(self._orders.until_unread, place)
                put = start(lambda _: write_file(open_storage(place), folder, name, blob, unread))
                self._answer_when_done(number, put)
            case "copy":
                copy_order = header["order"]
                copy = start(lambda token: copy_files(copy_order, stopped=token.is_cancelled, sleep=token.sleep))
                self._answer_when_done(number, copy)
            case "warm":
                self._reload_arena(header["stamp"])
                self._answer_when_done(number, start(lambda _: self._arena.populate()))
                start(lambda token: self._arena.use_huge_pages(token.is_cancelled))
            case "cancel":
                self._orders.cancel()
                self._answer(number, {"result": None})
            case "ping":
                self._answer(number, {"result": None})

    def _reload_arena(self, stamp: str) -> None:
        """Map the shape that the rank has since given the arena."""
        if self._arena.stamp != stamp:
            self._arena.reload()

    def _answer_when_done(self, number: int, future: "Future[Any]") -> None:
        def send_result(done: "Future[Any]") -> None:
            error = done.exception()
            self._answer(number, {"fault": encode_error(error)} if error else {"result": done.result()})

        future.add_done_callback(send_result)

    def _answer(self, number: int, answer: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the rank is gone and no longer needs the answer
            self._messages.send({"id": number, **answer})


def _serve_many(control: socket.socket, arena: Arena) -> None:
    """Serve connections handed over by the owner, one at a time. A new one ends the previous one."""
    session: WriterSession | None = None
    while True:
        try:
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:  # the owner exited without reading all replies
            return
        if not descriptors:
            return
        if session is not None:
            session.end()
        session = WriterSession(socket.socket(fileno=descriptors[0]), arena)
        session.start()
        with contextlib.suppress(ConnectionError):
            control.send(b"t")  # taken; without this reply, the owner replaces the writer as stopped or stuck


def main(arguments: list[str]) -> None:
    """Run as the writer for the process that started this one."""
    kind, entrance, memory, parent, label = arguments
    ignore_slurm_signals()
    lower_priority()
    exit_with_parent(int(parent), by_signal=kind == "many")
    set_title(f"orch-writer-{label}".rstrip("-"))
    link = socket.socket(fileno=int(entrance))
    for descriptor in (link.fileno(), int(memory)):
        os.set_inheritable(descriptor, False)
    arena = Arena(int(memory))
    if kind == "many":
        _serve_many(link, arena)
    else:
        WriterSession(link, arena).serve()
    # Skip interpreter shutdown: a thread that hangs in the kernel must not keep the process alive.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
