"""Messages between an agent and its fork server: JSON objects with attached file descriptors."""

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TypeVar

from trainer.protocol.messages.codec import Direction, encode

_MAX_PACKET = 1 << 16
"""Maximum message size in a packet; the kernel limits packets, so longer messages travel in a memfd."""
_IN_MEMORY_FILE = b"m"
"""Packet whose message is in the memfd passed as its last descriptor; a JSON object begins with a brace instead."""
_MAX_DESCRIPTORS = 8

M = TypeVar("M")


def pair() -> tuple[socket.socket, socket.socket]:
    """Return a connected pair that keeps packet boundaries and reports the other side's death as an empty packet."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(link: socket.socket, message: object, descriptors: Sequence[int] = ()) -> None:
    """Send one message of any length; raises OSError if the other side is gone or does not read."""
    # A lone surrogate, for example from a file name in an exception, must not suppress the rest.
    data = encode(message).encode(errors="replace")
    with ExitStack() as stack:
        packet, attached = data, list(descriptors)
        if len(data) > _MAX_PACKET:
            file = stack.enter_context(open(os.memfd_create("orch-message"), "wb", buffering=0))
            _write_all(file.fileno(), data)
            packet, attached = _IN_MEMORY_FILE, [*attached, file.fileno()]
        socket.send_fds(link, [packet], attached)


def receive(link: socket.socket, direction: Direction[M]) -> tuple[M | None, list[int]]:
    """Return the next message and its descriptors (not inheritable); None if the other side is gone.
    Raises MessageError.
    """
    data, descriptors, _, _ = socket.recv_fds(link, _MAX_PACKET, _MAX_DESCRIPTORS + 1, socket.MSG_CMSG_CLOEXEC)
    if data == _IN_MEMORY_FILE:
        with open(descriptors.pop(), "rb") as file:
            file.seek(0)
            data = file.read()
    return (direction.read(data) if data else None), descriptors


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
