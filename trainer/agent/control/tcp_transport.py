"""Authenticated JSON lines over TCP between agents and coordinator.
The listener sends a challenge. The hello answers it and carries the agent's own nonce. Two keys, one per direction, are
derived from both nonces and the token. Every line carries an HMAC over its number and text, so forged, changed,
replayed, omitted or reflected lines are detected.
"""

import asyncio
import fcntl
import hashlib
import hmac
import os
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Generic, TypeVar

from trainer.protocol.config_sections.scheduler_kinds import traits
from trainer.protocol.messages.agents import (
    ANSWER,
    CHALLENGE,
    TO_AGENT,
    Challenge,
    FromAgent,
    Hello,
    Refused,
    ToAgent,
    Welcome,
    why_foreign,
)
from trainer.protocol.messages.codec import Direction, MessageError, encode

_SIOCGIFADDR = 0x8915


def rendezvous_address(kind: str, interface: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the IPv4 address for rendezvous. Raises RuntimeError if the named interface has none."""
    if interface:
        return interface_address(interface)
    if traits(kind).simulated_nodes:
        return "127.0.0.1"
    launcher = environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    candidates = [_resolve_name(socket.gethostname()), _local_address(launcher) if launcher else ""]
    # Debian maps a host's own name to a loopback address, usable only if every node is on this host.
    outward = [address for address in candidates if address and not address.startswith("127.")]
    return next(iter([*outward, *filter(None, candidates)]), "127.0.0.1")


def interface_address(interface: str) -> str:
    """Return the IPv4 address of a network interface. Raises RuntimeError if it has none."""
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise RuntimeError(
                f"cluster.interface={interface}: {error.strerror} on this node, which has {names}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _resolve_name(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _local_address(address: str) -> str:
    """Return the local address from which `address` is reached, without sending anything."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return ""
        host: str = probe.getsockname()[0]
        return host


PROOF_BYTES = 65
"""Bytes added to each line: 64 digits and a space."""
_NONCE_DIGITS = 64


class Seal:
    """Signs and verifies the lines of one direction, in order."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def sign(self, line: bytes) -> bytes:
        return self._proof(line) + b" " + line

    def verify(self, line: bytes) -> bytes | None:
        """Return the line without its proof, or None if the proof is not that of the next line."""
        proof, space, text = line[: PROOF_BYTES - 1], line[PROOF_BYTES - 1 : PROOF_BYTES], line[PROOF_BYTES:]
        return text if space == b" " and hmac.compare_digest(proof, self._proof(text)) else None

    def _proof(self, text: bytes) -> bytes:
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8, "big") + text, "sha256").hex().encode()


def new_nonce() -> str:
    return secrets.token_hex(_NONCE_DIGITS // 2)


def is_nonce(text: str) -> bool:
    return len(text) == _NONCE_DIGITS


def challenge_line(nonce: str) -> bytes:
    """Return the first line that a listener sends to every connection."""
    return (encode(Challenge(nonce=nonce)) + "\n").encode()


def hello_seal(token: str, challenge: str) -> Seal:
    """Return the seal for an agent's first line, valid only for this challenge."""
    return Seal(_key(token, "hello", challenge))


def session_seals(token: str, challenge: str, nonce: str) -> tuple[Seal, Seal]:
    """Return the seals for the listener's lines and the agent's lines."""
    return Seal(_key(token, "listener", challenge, nonce)), Seal(_key(token, "agent", challenge, nonce))


def _key(token: str, *parts: str) -> bytes:
    # HMAC pads a short key with zeros, which makes two keys equal; a digest always has full length.
    secret = hashlib.sha256(token.encode(errors="replace")).digest()
    return hmac.digest(secret, "\0".join(("orch control/2", *parts)).encode(errors="replace"), "sha256")


LONGEST_LINE = 1 << 17
"""Maximum bytes of a message, including its proof."""
WELCOME_SECONDS, GREETING_SECONDS = 10.0, 5.0
"""Time limits for setting up a connection, and for the greetings alone."""
_LARGEST_BACKLOG = 1 << 20
_LARGEST_PILE = 2 * LONGEST_LINE
_BURST, _A_SECOND = 2048.0, 512.0
"""Message budget of one peer: burst size, then rate per second. Anything above that waits in the socket."""

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class WireError(Exception):
    """Raised if the received bytes are not a message."""


class Unproven(WireError):
    """Raised if the sender does not have the token, or the line is not the next one in its sequence."""


class NotGreeted(ConnectionError):
    """Raised if the peer sends no greeting. It may be busy, of an older release, or a different program."""


class ForeignProtocol(WireError):
    """Raised if the coordinator uses a different protocol; retrying is pointless."""


class Peer(asyncio.Protocol, Generic[Sent, Received]):
    """Connection to a peer.
    Sending never blocks; a peer that does not read is dropped, and a flooding peer is throttled.
    """

    def __init__(
        self, direction: Direction[Received], first: bytes = b"", seals: tuple[Seal, Seal] | None = None
    ) -> None:
        """`first` holds bytes already read after the hello. `seals` are for sent and received lines, in that order."""
        self._direction = direction
        self._own_seal: Seal | None
        self._peer_seal: Seal | None
        self._own_seal, self._peer_seal = seals or (None, None)
        self.host = ""
        self._transport: asyncio.Transport
        self._lines: deque[bytes | bytearray] = deque()
        self._torn, self._pile = bytearray(), 0
        self._ended = self._paused = False
        self._waiter: asyncio.Future[None] | None = None
        self._closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._allowance, self._refilled = _BURST, time.monotonic()
        if first:
            self._take(first)

    # -- called by the event loop -----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.host = transport.get_extra_info("sockname")[0]
        self._hold()

    def data_received(self, data: bytes) -> None:
        self._take(data)
        self._hold()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended = True
        if not self._closed.done():
            self._closed.set_result(None)
        self._wake()

    def eof_received(self) -> None:
        self._ended = True
        self._wake()

    def _take(self, data: bytes) -> None:
        self._pile += len(data)
        head, *more = data.split(b"\n")
        if not more:
            self._torn += head
            return
        self._lines.append(self._torn + head if self._torn else head)
        self._torn = bytearray(more.pop())
        self._lines.extend(more)

    def _hold(self) -> None:
        """Pause reading while received lines are still to be handled, to limit memory use."""
        if not self._paused and self._pile > _LARGEST_PILE:
            self._paused = True
            self._transport.pause_reading()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- called by the owner ----------------------------------------------------------------------------------------

    def secure(self, own: Seal, peers: Seal | None) -> None:
        """Start sealing outgoing lines with `own` and verifying incoming lines with `peers`."""
        self._own_seal, self._peer_seal = own, peers

    def send(self, message: Sent) -> None:
        """Queue one message; messages to a lost peer are dropped, since its reader notices the loss."""
        self.send_line(encode(message))

    def send_line(self, text: str) -> None:
        if self._transport.is_closing():
            return
        # Lone surrogates are replaced: the receiver could not encode them when writing to a file.
        line = text.encode(errors="replace")
        self._transport.write((self._own_seal.sign(line) if self._own_seal else line) + b"\n")
        if self._transport.get_write_buffer_size() > _LARGEST_BACKLOG:
            self._transport.abort()

    async def receive(self) -> Received | None:
        """Return the next message, or None if the connection has ended. Raises WireError."""
        line = await self.receive_line()
        return None if line is None else read(self._direction, line)

    async def receive_line(self) -> bytes | bytearray | None:
        """Return the next line as its sender wrote it, or None if the connection has ended. Raises WireError."""
        while not self._lines:
            if len(self._torn) > LONGEST_LINE:
                raise WireError(f"a line of more than {LONGEST_LINE} bytes")
            if self._ended:
                return None
            await self._more()
        await self._afford()
        line = self._lines.popleft()
        self._pile -= len(line) + 1
        if self._paused and self._pile <= LONGEST_LINE:
            self._paused = False
            self._transport.resume_reading()
        if len(line) > LONGEST_LINE:
            raise WireError(f"a line of more than {LONGEST_LINE} bytes")
        return self._open(line)

    def _open(self, line: bytes | bytearray) -> bytes | bytearray:
        if self._peer_seal is None:
            return line
        text = self._peer_seal.verify(bytes(line))
        if text is None:
            raise Unproven("a line without a valid proof")
        return text

    async def _more(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def _afford(self) -> None:
        """Wait while this peer has exceeded its message budget."""
        now = time.monotonic()
        self._allowance = min(_BURST, self._allowance + (now - self._refilled) * _A_SECOND) - 1.0
        self._refilled = now
        if self._allowance < 0.0:
            await asyncio.sleep(-self._allowance / _A_SECOND)

    def hung_up(self) -> bool:
        """Return whether the peer has closed the connection and everything it sent has been read."""
        return (self._ended and not self._lines) or self._transport.is_closing()

    async def close(self) -> None:
        """Send queued data, then close the connection."""
        self._transport.close()
        try:
            await asyncio.wait_for(asyncio.shield(self._closed), 2.0)
        except TimeoutError:
            self._transport.abort()

    def drop(self) -> None:
        self._transport.abort()


AgentPeer = Peer[ToAgent, FromAgent]
"""Connection to an agent, on the coordinator's side."""
CoordinatorPeer = Peer[FromAgent, ToAgent]
"""Connection to the coordinator, on an agent's side."""


def read(direction: Direction[Received], line: bytes | bytearray) -> Received:
    """Return the message that a line holds. Raises WireError."""
    try:
        return direction.read(line)
    except MessageError as error:
        raise WireError(str(error)) from error


async def connect(host: str, port: int, token: str, hello: Hello) -> CoordinatorPeer:
    """Connect, prove possession of the token, send the hello (with a fresh nonce) and wait for the welcome.
    Raises OSError if that fails, the connection is closed, or the listener does not have the token. The caller should
    retry: a coordinator under attack may drop a connection before it reads the hello. Raises WireError if the
    coordinator read the hello and refused it, and ForeignProtocol if the refusal is permanent.
    """
    async with asyncio.timeout(WELCOME_SECONDS):  # TimeoutError is an OSError
        _, peer = await asyncio.get_running_loop().create_connection(lambda: CoordinatorPeer(TO_AGENT), host, port)
        welcome = False
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                answer = await _introduce(peer, token, hello)
            foreign = why_foreign(hello, answer)
            if isinstance(answer, Refused):
                raise (ForeignProtocol if foreign else WireError)(f"the coordinator refuses: {answer.reason}")
            if foreign:
                raise ForeignProtocol(foreign)
            welcome = True
        except TimeoutError as error:
            raise NotGreeted(f"the coordinator sent no greeting within {GREETING_SECONDS:g} s") from error
        except Unproven as error:
            raise NotGreeted("the listener is not this attempt's coordinator") from error
        finally:
            if not welcome:
                peer.drop()
    return peer


async def _introduce(peer: CoordinatorPeer, token: str, hello: Hello) -> Welcome | Refused:
    """Answer the challenge and return the coordinator's answer. Raises NotGreeted or Unproven."""
    try:
        challenge = read(CHALLENGE, await _receive_greeting(peer))
    except WireError as error:
        raise Unproven("no challenge") from error
    if not is_nonce(challenge.nonce):
        raise Unproven("no challenge")
    hello = replace(hello, nonce=new_nonce())
    peer.secure(hello_seal(token, challenge.nonce), None)
    peer.send_line(encode(hello))
    listeners, own = session_seals(token, challenge.nonce, hello.nonce)
    peer.secure(own, listeners)
    return read(ANSWER, await _receive_greeting(peer))


async def _receive_greeting(peer: CoordinatorPeer) -> bytes | bytearray:
    if (line := await peer.receive_line()) is None:
        raise NotGreeted("the coordinator closed the connection before its greeting")
    return line
