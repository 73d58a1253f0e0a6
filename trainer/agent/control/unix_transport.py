"""Packets between an agent and its fork server: one JSON object each, with file descriptors beside it."""

import socket
from collections.abc import Sequence
from typing import TypeVar

from trainer.contract.messages.codec import Direction, encode

_LARGEST = 1 << 17
_MOST_DESCRIPTORS = 8

M = TypeVar("M")


def pair() -> tuple[socket.socket, socket.socket]:
    """A connected pair that keeps packet boundaries and shows the other side's death as an empty packet."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(link: socket.socket, message: object, descriptors: Sequence[int] = ()) -> None:
    """Send one message; raises OSError when the other side is gone or does not read."""
    # A lone surrogate (of a file name in an exception, say) must not suppress the rest.
    data = encode(message).encode(errors="replace")
    if len(data) > _LARGEST:
        raise OSError(f"packet of {len(data)} bytes is larger than {_LARGEST}")
    socket.send_fds(link, [data], list(descriptors))


def receive(link: socket.socket, direction: Direction[M]) -> tuple[M | None, list[int]]:
    """The next message and its descriptors (not inheritable); None when the other side is gone.

    Raises MessageError.
    """
    data, descriptors, _, _ = socket.recv_fds(link, _LARGEST, _MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    return (direction.read(data) if data else None), descriptors
