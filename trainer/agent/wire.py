"""The wire between agents and coordinator: JSON lines over TCP, opened by a token."""

import asyncio
import hmac
import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from checkpointing.durable import dump_line

LONGEST_LINE = 1 << 17
HELLO_SECONDS = 5.0
_MOST_STRANGERS = 256
_LARGEST_BACKLOG = 8 << 20

Message = dict[str, Any]


class WireError(Exception):
    """What came is not a message."""


class Peer:
    """One connection; sending never blocks, a peer that does not read is dropped."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        connection = writer.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.host: str = writer.get_extra_info("sockname")[0]

    def send(self, say: str, **fields: Any) -> None:
        """Queue one message; a message for a lost peer is dropped, its reader notices the loss."""
        if self._writer.is_closing():
            return
        # Nor may a lone surrogate in what is told go on: whoever writes it down could not encode it.
        self._writer.write((dump_line({"say": say, **fields}) + "\n").encode(errors="replace"))
        if self._writer.transport.get_write_buffer_size() > _LARGEST_BACKLOG:
            self._writer.transport.abort()

    async def receive(self) -> Message | None:
        """The next message; None when the connection has ended. Raises WireError."""
        try:
            line = await self._reader.readuntil(b"\n")
        except (asyncio.IncompleteReadError, OSError):
            return None
        except asyncio.LimitOverrunError as error:
            raise WireError(f"a line of more than {LONGEST_LINE} bytes") from error
        try:
            message = json.loads(line)
        except (ValueError, RecursionError) as error:  # deep nesting exhausts the parser's stack
            raise WireError(f"no JSON: {line[:40]!r}") from error
        if not isinstance(message, dict) or not isinstance(message.get("say"), str):
            raise WireError(f"no message: {line[:40]!r}")
        return message

    def hung_up(self) -> bool:
        """Whether the other side has ended the connection and all it said was read."""
        return self._reader.at_eof() or self._writer.is_closing()

    async def close(self) -> None:
        """Send what is queued, then hang up."""
        self._writer.close()
        try:
            await asyncio.wait_for(self._writer.wait_closed(), 2.0)
        except (OSError, TimeoutError):
            self._writer.transport.abort()

    def drop(self) -> None:
        self._writer.transport.abort()


class Door:
    """The coordinator's listening socket. Strangers cost at most one slot for five seconds."""

    def __init__(
        self,
        token: str,
        *,
        admit: Callable[[Message, Peer], bool],
        serve: Callable[[Message, Peer], Awaitable[None]],
        patience: float = HELLO_SECONDS,
    ) -> None:
        self.token, self._admit, self._serve, self._patience = token, admit, serve, patience
        self._strangers = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, host: str) -> int:
        """Listen on a free port of `host`; returns the port."""
        self._server = await asyncio.start_server(self._greet, host, 0, limit=LONGEST_LINE, backlog=1024)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._converse(Peer(reader, writer))
        except (asyncio.CancelledError, OSError):
            pass
        finally:
            writer.transport.abort()
            self._tasks.discard(task)

    async def _converse(self, peer: Peer) -> None:
        if self._strangers >= _MOST_STRANGERS:
            return
        self._strangers += 1
        try:
            hello = await asyncio.wait_for(peer.receive(), self._patience)
        except (WireError, TimeoutError):
            return
        finally:
            self._strangers -= 1
        if hello is not None and self._knows(hello) and self._admit(hello, peer):
            await self._serve(hello, peer)
            await peer.close()

    def _knows(self, hello: Message) -> bool:
        offered = hello.get("token")
        if hello["say"] != "hello" or not isinstance(offered, str):
            return False
        # As bytes: compare_digest refuses text that is not ASCII, and a lone surrogate does not encode strictly.
        return hmac.compare_digest(offered.encode(errors="replace"), self.token.encode())


async def connect(host: str, port: int, hello: Message) -> Peer:
    """Open a connection and say hello; raises OSError."""
    reader, writer = await asyncio.open_connection(host, port, limit=LONGEST_LINE)
    peer = Peer(reader, writer)
    peer.send("hello", **hello)
    return peer
