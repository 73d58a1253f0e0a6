"""The writer: a process without torch that writes a rank's checkpoints, and outlives the rank when the agent owns it.

Started as `python -P -m checkpointing.engine.writer_process one|many SOCKET ARENA PARENT LABEL`: `one` serves the rank
at the other end of SOCKET and ends with it; `many` receives connections over SOCKET, one generation after the other,
and ends with its owner. ARENA is the descriptor of the memory, PARENT the pid of whoever started this process.
"""

import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

from setproctitle import setproctitle

from checkpointing.engine import courtesy
from checkpointing.engine.arena import Arena
from checkpointing.engine.framing import Frames, copy_order_of, fault, write_order_of
from checkpointing.engine.orders import Orders
from checkpointing.engine.writing import put_file, write_files
from checkpointing.flush import copy_files
from checkpointing.storage import storage_at

_PATIENCE = 5.0


class Session:
    """One rank's connection: reads orders and answers each when it is done."""

    def __init__(self, stream: socket.socket, arena: Arena) -> None:
        self._frames, self._arena, self._orders = Frames(stream), arena, Orders()
        self._thread = threading.Thread(target=self.serve, name="session", daemon=True)

    def start(self) -> None:
        """Serve in the background."""
        self._thread.start()

    def serve(self) -> None:
        """Serve until the rank is gone; what it had ordered is abandoned, except for what makes its memory useful."""
        try:
            while (frame := self._frames.receive()) is not None:
                header, blob = frame
                try:
                    self._obey(header, blob)
                except (OSError, LookupError, RuntimeError, TypeError) as error:
                    self._answer(header["id"], {"fault": fault(error)})
        finally:
            # One that speaks nonsense is to learn that nobody listens any more.
            self._frames.hang_up()
            self._orders.cancel()

    def end(self) -> None:
        """Make way for the next connection: when this returns, nothing of this one touches the arena."""
        self._frames.hang_up()
        self._thread.join()
        self._orders.quiesce(_PATIENCE)
        self._frames.close()

    def _obey(self, header: dict[str, Any], blob: bytes) -> None:
        number = header["id"]
        match header["do"]:
            case "write":
                self._see(header["stamp"])
                order = write_order_of(header["order"])
                write = self._orders.begin(
                    lambda ticket: write_files(order, self._arena, ticket), reads_memory_for=order.place
                )
                self._promise(number, write, asdict)
            case "put":
                place, folder, name = header["place"], header["folder"], header["name"]
                put = self._orders.begin(
                    lambda _: put_file(storage_at(place), folder, name, blob, lambda: self._orders.until_unread(place))
                )
                self._promise(number, put, asdict)
            case "copy":
                flush = copy_order_of(header["order"])
                copied = self._orders.begin(
                    lambda ticket: copy_files(flush, stopped=ticket.cancelled, sleep=ticket.sleep)
                )
                self._promise(number, copied, asdict)
            case "warm":
                self._see(header["stamp"])
                self._promise(number, self._orders.begin(lambda _: self._arena.populate()), lambda _: {})
                self._orders.begin(lambda ticket: self._arena.gather_pages(ticket.cancelled))
            case "cancel":
                self._orders.cancel()
                self._answer(number, {"result": {}})
            case "ping":
                self._answer(number, {"result": {}})

    def _see(self, stamp: str) -> None:
        """Map the shape that the rank has given to the arena in the meantime."""
        if self._arena.stamp != stamp:
            self._arena.reload()

    def _promise(self, number: int, future: "Future[Any]", encode: Callable[[Any], dict[str, Any]]) -> None:
        def tell(done: "Future[Any]") -> None:
            error = done.exception()
            self._answer(number, {"fault": fault(error)} if error else {"result": encode(done.result())})

        future.add_done_callback(tell)

    def _answer(self, number: int, answer: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the rank is gone, and does not want to know any more
            self._frames.send({"id": number, **answer})


def _serve_many(control: socket.socket, arena: Arena) -> None:
    """One connection after the other, each brought by the owner; a new one ends the one before."""
    session: Session | None = None
    while True:
        try:
            _, descriptors, _, _ = socket.recv_fds(control, 1, 1, socket.MSG_CMSG_CLOEXEC)
        except ConnectionError:  # the owner has left without hearing all that it was told
            return
        if not descriptors:
            return
        if session is not None:
            session.end()
        session = Session(socket.socket(fileno=descriptors[0]), arena)
        session.start()
        with contextlib.suppress(ConnectionError):
            control.send(b"t")  # taken: an owner who misses this replaces a writer that is stopped or stuck


def main(arguments: list[str]) -> None:
    """Become the writer of whoever started this process."""
    kind, entrance, memory, parent, label = arguments
    courtesy.turn_deaf()
    courtesy.stand_back()
    courtesy.die_with(int(parent), by_signal=kind == "many")
    setproctitle(f"orch-writer-{label}".rstrip("-"))
    link = socket.socket(fileno=int(entrance))
    for descriptor in (link.fileno(), int(memory)):
        os.set_inheritable(descriptor, False)
    arena = Arena(int(memory))
    if kind == "many":
        _serve_many(link, arena)
    else:
        Session(link, arena).serve()
    # Not by way of the interpreter's end: a thread that hangs in the kernel must not keep the others here.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
