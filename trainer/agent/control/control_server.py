"""The coordinator's listening socket: peer authentication, silence detection and inbox messages."""

import asyncio
import contextlib
import errno
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from trainer.agent.control.tcp_transport import (
    AgentPeer,
    Unproven,
    WireError,
    challenge_line,
    hello_seal,
    is_nonce,
    new_nonce,
    read,
    session_seals,
)
from trainer.protocol.messages.agents import (
    FROM_AGENT,
    HELLO,
    PROTOCOL,
    FromAgent,
    Hello,
    Refused,
    Welcome,
    installed_release,
    why_foreign,
)
from trainer.protocol.messages.codec import encode
from trainer.protocol.requests import Request


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentJoined:
    """Inbox message: an agent was admitted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentLost:
    """Inbox message: the connection to an agent has ended."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentRefused:
    """Inbox message: an agent with a different protocol tried to join."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Inbox message: a second has passed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptFenced:
    """Inbox message: the attempt's launch token was revoked, deleted or replaced."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestFound:
    """Inbox message: a request was found in the run directory."""

    request: Request


InboxMessage = FromAgent | AgentJoined | AgentLost | AgentRefused | Tick | AttemptFenced | RequestFound

AGENT_TIMEOUT_SECONDS = 60.0
"""Seconds of silence after which an agent or coordinator counts as lost. Live peers send every few seconds."""
STALLED_TIMEOUT_SECONDS = 10.0
"""The same limit while no rank is moving, for example because a node has lost its network and its peers are waiting."""
POLL_SECONDS = 2.0
"""Interval of a listener's checks."""
LATE_SECONDS = 3.0
"""If a check is delayed by more than this, this process was suspended or starved of CPU time."""


class PeerTimeout:
    """Silence timer for one peer.
    Restarts after a pause of this process: the peer may have been suspended too, and may resume later.
    """

    def __init__(self, now: float) -> None:
        self._since = self._looked = now

    def record_message(self, now: float) -> None:
        self._since = self._looked = now

    def seconds_silent(self, now: float) -> float:
        """Return the seconds of silence; a check is due POLL_SECONDS after the last check or message."""
        if now - self._looked > POLL_SECONDS + LATE_SECONDS:
            self._since = now
        self._looked = now
        return now - self._since


HELLO_SECONDS = 5.0
LONGEST_HELLO = 1 << 12
MAX_UNAUTHENTICATED = 256
_AT_ONCE = 64
_PAUSE = 0.01
"""Connections accepted per burst and the pause after each. Together they limit a flood's share of the loop's time."""
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Admit = Callable[[Hello, AgentPeer], str]
"""Callback that admits an agent and returns the reason for a refusal, or an empty string."""
Serve = Callable[[Hello, AgentPeer], Awaitable[None]]


class _UnauthenticatedPeer:
    """Connection that has not yet proved that it has the token. It has only a socket and buffered bytes, no task."""

    def __init__(self, connection: socket.socket, due: float) -> None:
        self.connection, self.due, self.challenge = connection, due, new_nonce()
        self._received = bytearray()
        with contextlib.suppress(OSError):  # reading reveals a closed connection
            connection.send(challenge_line(self.challenge))

    def hello(self) -> tuple[bytes, bytes] | None:
        """Return the first line and the bytes after it, or None if it is incomplete. Raises OSError or WireError."""
        with contextlib.suppress(BlockingIOError):
            data = self.connection.recv(LONGEST_HELLO)
            if not data:
                raise ConnectionResetError("the peer closed the connection")
            self._received += data
        line, end, rest = self._received.partition(b"\n")
        if len(line) > LONGEST_HELLO:
            raise WireError("an overlong hello")
        return (bytes(line), bytes(rest)) if end else None


class ControlServer:
    """Server that admits peers with a valid token.
    A new connection displaces the oldest unauthenticated one, so idle connections cannot block an agent.
    """

    def __init__(
        self, token: str, *, admit: Admit, serve: Serve, on_foreign: Callable[[Hello, str], None] | None = None,
        patience: float = HELLO_SECONDS,
    ) -> None:  # fmt: skip
        """`on_foreign` gets the hello from an agent that speaks a different protocol, and why it was refused."""
        self.token, self._admit, self._serve, self._patience = token, admit, serve, patience
        self._on_foreign = on_foreign
        self._unauthenticated: OrderedDict[int, _UnauthenticatedPeer] = OrderedDict()  # by descriptor, oldest first
        self._listener: socket.socket | None = None
        self._clock: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, host: str) -> int:
        """Listen on a free port of this address only and return the port."""
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
            self._drop(next(iter(self._unauthenticated)))
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- unauthenticated peers ---------------------------------------------------------------------------------------

    def _listen(self) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
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
            self._add(connection)
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._listener)
        loop.call_later(_PAUSE, self._listen)

    def _add(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        self._make_room(MAX_UNAUTHENTICATED - 1)
        self._unauthenticated[connection.fileno()] = _UnauthenticatedPeer(connection, loop.time() + self._patience)
        loop.add_reader(connection, self._read_hello, connection.fileno())
        if self._clock is None:
            self._clock = loop.call_later(self._patience, self._expire)

    def _make_room(self, places: int) -> None:
        while len(self._unauthenticated) > places:
            oldest = next(iter(self._unauthenticated))
            # Its hello may have only just arrived, so read before dropping the connection.
            self._read_hello(oldest)
            if oldest in self._unauthenticated:
                self._drop(oldest)

    def _expire(self) -> None:
        """Drop expired connections; they are ordered by arrival."""
        loop = asyncio.get_running_loop()
        self._clock = None
        for descriptor, peer in list(self._unauthenticated.items()):
            if peer.due > loop.time():
                self._clock = loop.call_at(peer.due, self._expire)
                return
            self._drop(descriptor)

    def _read_hello(self, descriptor: int) -> None:
        peer = self._unauthenticated[descriptor]
        try:
            received = peer.hello()
            if received is None:
                return
            hello = self._verify_hello(received[0], peer.challenge)
        except (OSError, WireError):
            self._drop(descriptor)
            return
        asyncio.get_running_loop().remove_reader(descriptor)
        del self._unauthenticated[descriptor]
        task = asyncio.get_running_loop().create_task(self._serve_peer(peer, hello, received[1]))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _drop(self, descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        self._unauthenticated.pop(descriptor).connection.close()

    def _verify_hello(self, line: bytes, challenge: str) -> Hello:
        """Return the hello that answers this connection's challenge. Raises WireError for anything else."""
        text = hello_seal(self.token, challenge).verify(line)
        if text is None:
            raise Unproven("a hello without a valid proof")
        hello = read(HELLO, text)
        if not is_nonce(hello.nonce):
            raise WireError("no hello")
        return hello

    # -- agents ------------------------------------------------------------------------------------------------------

    async def _serve_peer(self, stranger: _UnauthenticatedPeer, hello: Hello, rest: bytes) -> None:
        peer: AgentPeer | None = None
        connection, seals = stranger.connection, session_seals(self.token, stranger.challenge, hello.nonce)
        try:
            loop = asyncio.get_running_loop()
            _, peer = await loop.connect_accepted_socket(lambda: AgentPeer(FROM_AGENT, rest, seals), connection)
            welcome = Welcome(protocol=PROTOCOL, release=installed_release())
            foreign = why_foreign(hello, welcome)
            if foreign and self._on_foreign is not None:
                self._on_foreign(hello, foreign)
            if refusal := foreign or self._admit(hello, peer):
                peer.send_line(encode(Refused(reason=refusal, protocol=PROTOCOL, release=welcome.release)))
            else:
                peer.send_line(encode(welcome))
                await self._serve(hello, peer)
            await peer.close()
        except (asyncio.CancelledError, OSError):
            pass
        finally:
            connection.close() if peer is None else peer.drop()
