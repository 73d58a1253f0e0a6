"""The coordinator's listening socket: who knows the token comes in, everybody else costs as little as can be."""

import asyncio
import contextlib
import errno
import hmac
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable

from trainer.agent.control.tcp_transport import Message, Peer, WireError, parse

HELLO_SECONDS = 5.0
LONGEST_HELLO = 1 << 12
MAX_UNAUTHENTICATED = 256
_AT_ONCE = 64
_PAUSE = 0.01
"""At most so many are let in at once, with a pause after: a flood gets a bounded share of the loop's time."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Serve = Callable[[Message, Peer], Awaitable[None]]


class _UnauthenticatedPeer:
    """A connection that has not shown the token: a socket and the bytes that came, no task, no stream."""

    def __init__(self, connection: socket.socket, due: float) -> None:
        self.connection, self.due = connection, due
        self.heard = bytearray()

    def hello(self) -> tuple[Message, bytes] | None:
        """Its first line and what followed it, when it is there; raises OSError or WireError when it never will be."""
        with contextlib.suppress(BlockingIOError):
            data = self.connection.recv(LONGEST_HELLO)
            if not data:
                raise ConnectionResetError("it hung up")
            self.heard += data
        line, end, rest = self.heard.partition(b"\n")
        if len(line) > LONGEST_HELLO:
            raise WireError("a hello that is too long")
        return (parse(line), bytes(rest)) if end else None


class ControlServer:
    """Lets in who knows the token; a newcomer displaces the oldest stranger, so that holding places blocks nobody."""

    def __init__(
        self, token: str, *, admit: Callable[[Message, Peer], bool], serve: Serve, patience: float = HELLO_SECONDS
    ) -> None:
        self.token, self._admit, self._serve, self._patience = token, admit, serve, patience
        self._unauthenticated: OrderedDict[int, _UnauthenticatedPeer] = OrderedDict()  # by descriptor, the oldest first
        self._listener: socket.socket | None = None
        self._clock: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, host: str) -> int:
        """Listen on a free port of this one address; returns the port."""
        listener = self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listener.bind((host, 0))
        listener.listen(1024)
        self._listen()
        port: int = listener.getsockname()[1]
        return port

    async def close(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
        while self._unauthenticated:
            self._part(next(iter(self._unauthenticated)))
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- strangers ---------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._answer)

    def _answer(self) -> None:
        """Somebody knocks."""
        assert self._listener is not None
        for _ in range(_AT_ONCE):
            try:
                connection, _address = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    self._make_room(len(self._unauthenticated) // 2)
                break
            self._meet(connection)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        loop.call_later(_PAUSE, self._listen)

    def _meet(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        self._make_room(MAX_UNAUTHENTICATED - 1)
        self._unauthenticated[connection.fileno()] = _UnauthenticatedPeer(connection, loop.time() + self._patience)
        loop.add_reader(connection, self._hear, connection.fileno())
        if self._clock is None:
            self._clock = loop.call_later(self._patience, self._expire)

    def _make_room(self, places: int) -> None:
        while len(self._unauthenticated) > places:
            oldest = next(iter(self._unauthenticated))
            # It may have said all in the same moment: nobody goes who was not listened to.
            self._hear(oldest)
            if oldest in self._unauthenticated:
                self._part(oldest)

    def _expire(self) -> None:
        """Part with those whose time is up; they stand in the order of their coming."""
        loop = asyncio.get_running_loop()
        self._clock = None
        for descriptor, stranger in list(self._unauthenticated.items()):
            if stranger.due > loop.time():
                self._clock = loop.call_at(stranger.due, self._expire)
                return
            self._part(descriptor)

    def _hear(self, descriptor: int) -> None:
        stranger = self._unauthenticated[descriptor]
        try:
            said = stranger.hello()
        except (OSError, WireError):
            self._part(descriptor)
            return
        if said is None:
            return
        hello, rest = said
        if not self._knows(hello):
            self._part(descriptor)
            return
        asyncio.get_running_loop().remove_reader(descriptor)
        del self._unauthenticated[descriptor]
        task = asyncio.get_running_loop().create_task(self._converse(stranger.connection, hello, rest))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _part(self, descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        self._unauthenticated.pop(descriptor).connection.close()

    def _knows(self, hello: Message) -> bool:
        offered = hello.get("token")
        if hello["say"] != "hello" or not isinstance(offered, str):
            return False
        # As bytes: compare_digest refuses text that is not ASCII, and a lone surrogate does not encode strictly.
        return hmac.compare_digest(offered.encode(errors="replace"), self.token.encode())

    # -- members -----------------------------------------------------------------------------------------------------

    async def _converse(self, connection: socket.socket, hello: Message, rest: bytes) -> None:
        peer: Peer | None = None
        try:
            loop = asyncio.get_running_loop()
            _, peer = await loop.connect_accepted_socket(lambda: Peer(rest), connection)
            if self._admit(hello, peer):
                peer.send("welcome")
                await self._serve(hello, peer)
            else:
                peer.send("refused", reason="this attempt has no place for this agent")
            await peer.close()
        except (asyncio.CancelledError, OSError):
            pass
        finally:
            connection.close() if peer is None else peer.drop()
