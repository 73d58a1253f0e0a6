"""A control server that is open to attacks, and what its members said: signals, whose names it sends back."""

import asyncio
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.agent.control.control_server import ControlServer
from trainer.agent.control.tcp_transport import AgentPeer, CoordinatorPeer, WireError, connect
from trainer.protocol.messages.agents import PROTOCOL, End, Hello, SignalReceived


class OpenServer:
    """An open door, what its members said, and how late its loop ever was."""

    def __init__(self, patience: float = 30.0, *, refusal: str = "") -> None:
        self.heard: list[tuple[str, str]] = []
        self.lost: list[str] = []
        self.members: list[AgentPeer] = []
        self.late = 0.0
        self.door = ControlServer("secret", admit=lambda hello, peer: refusal, serve=self._serve, patience=patience)

    async def __aenter__(self) -> "OpenServer":
        self.port = await self.door.open("127.0.0.1")
        self._watch = asyncio.create_task(self._measure())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._watch.cancel()
        await self.door.close()

    async def _measure(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.01)
            self.late = max(self.late, time.monotonic() - before - 0.01)

    async def _serve(self, hello: Hello, peer: AgentPeer) -> None:
        name = hello.name
        self.members.append(peer)
        try:
            while (message := await peer.receive()) is not None:
                assert isinstance(message, SignalReceived)
                self.heard.append((name, message.name))
                peer.send(End(code=0, reason=message.name))
        except WireError as error:
            self.lost.append(f"{name}: {error}")

    async def member(self, name: str = "a") -> CoordinatorPeer:
        return await connect("127.0.0.1", self.port, "secret", Hello(protocol=PROTOCOL, name=name))

    def stranger(self, said: bytes = b"") -> socket.socket:
        """A blocking connection, made while the door's loop stands still."""
        connection = socket.create_connection(("127.0.0.1", self.port), 5)
        connection.sendall(said)
        return connection


async def answered(peer: CoordinatorPeer, what: str = "ping", seconds: float = 1.0) -> None:
    peer.send(SignalReceived(name=what))
    async with asyncio.timeout(seconds):
        answer = await peer.receive()
    assert answer == End(code=0, reason=what)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextmanager
def closing(sockets: list[socket.socket]) -> Iterator[list[socket.socket]]:
    try:
        yield sockets
    finally:
        for each in sockets:
            each.close()
