"""Authenticated JSON lines over TCP between agents and coordinator.

The listener sends a challenge. The hello answers it, and brings the agent's own nonce; from both nonces and the token
come two keys, one for each direction. Every line carries an HMAC over its number and its text: a line that is forged,
changed, replayed, left out or sent back does not match.
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

from trainer.contract.config_sections.scheduler_kinds import traits
from trainer.contract.messages.agents import (
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
from trainer.contract.messages.codec import Direction, MessageError, encode

_SIOCGIFADDR = 0x8915


def reachable(kind: str, interface: str, environ: Mapping[str, str] = os.environ) -> str:
    """IPv4 address for rendezvous; raises RuntimeError when the named interface has none."""
    if interface:
        return of_interface(interface)
    if traits(kind).simulated_nodes:
        return "127.0.0.1"
    launcher = environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    candidates = [_of_name(socket.gethostname()), _towards(launcher) if launcher else ""]
    # Debian gives a host's own name a loopback address: useful only when every node is on this host.
    outward = [address for address in candidates if address and not address.startswith("127.")]
    return next(iter([*outward, *filter(None, candidates)]), "127.0.0.1")


def of_interface(interface: str) -> str:
    """The IPv4 address of a network interface."""
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


def _of_name(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _towards(address: str) -> str:
    """The address with which this node would speak to `address`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError:
            return ""
        host: str = probe.getsockname()[0]
        return host


PROOF_BYTES = 65
"""Bytes by which a line grows: 64 digits and a space."""
_NONCE_DIGITS = 64


class Seal:
    """The proofs of one direction, in the order of its lines."""

    def __init__(self, key: bytes) -> None:
        self._key, self._count = key, 0

    def sealed(self, line: bytes) -> bytes:
        """The line with its proof before it."""
        return self._proof(line) + b" " + line

    def opened(self, line: bytes) -> bytes | None:
        """The line without its proof; None when that is not the one of the next line."""
        proof, space, text = line[: PROOF_BYTES - 1], line[PROOF_BYTES - 1 : PROOF_BYTES], line[PROOF_BYTES:]
        return text if space == b" " and hmac.compare_digest(proof, self._proof(text)) else None

    def _proof(self, text: bytes) -> bytes:
        self._count += 1
        return hmac.digest(self._key, self._count.to_bytes(8, "big") + text, "sha256").hex().encode()


def new_nonce() -> str:
    """A number that is used once."""
    return secrets.token_hex(_NONCE_DIGITS // 2)


def is_nonce(text: str) -> bool:
    return len(text) == _NONCE_DIGITS


def challenge_line(nonce: str) -> bytes:
    """What a listener sends first to everybody who connects."""
    return (encode(Challenge(nonce=nonce)) + "\n").encode()


def hello_seal(token: str, challenge: str) -> Seal:
    """What an agent's first line is sealed with: it answers this challenge and no other."""
    return Seal(_key(token, "hello", challenge))


def session_seals(token: str, challenge: str, nonce: str) -> tuple[Seal, Seal]:
    """The seals of the listener's lines and of the agent's."""
    return Seal(_key(token, "listener", challenge, nonce)), Seal(_key(token, "agent", challenge, nonce))


def _key(token: str, *parts: str) -> bytes:
    # HMAC fills a short key up with zeros, so that two would be the same: a digest has its full length.
    secret = hashlib.sha256(token.encode(errors="replace")).digest()
    return hmac.digest(secret, "\0".join(("orch control/2", *parts)).encode(errors="replace"), "sha256")


LONGEST_LINE = 1 << 17
"""Bytes of a message, its proof included."""
WELCOME_SECONDS, GREETING_SECONDS = 10.0, 5.0
"""How long a connection may take as a whole, and the greetings on it."""
_LARGEST_BACKLOG = 1 << 20
_LARGEST_PILE = 2 * LONGEST_LINE
_BURST, _A_SECOND = 2048.0, 512.0
"""Messages that one peer may send at once, and in every second after that: the rest waits in its socket."""

Sent = TypeVar("Sent")
Heard = TypeVar("Heard")


class WireError(Exception):
    """What was received is not a message."""


class Unproven(WireError):
    """What was received is not from a process that has the token, or not what that sent next."""


class NotGreeted(ConnectionError):
    """Raised when the peer sends no greeting: it is busy, an older release, or another program."""


class ForeignProtocol(WireError):
    """The coordinator speaks another protocol: no later try is of use."""


class Peer(asyncio.Protocol, Generic[Sent, Heard]):
    """One connection; sending never blocks, a peer that does not read is dropped, one that floods is read slowly."""

    def __init__(self, heard: Direction[Heard], first: bytes = b"", seals: tuple[Seal, Seal] | None = None) -> None:
        """`first`: what was read already, after the hello; `seals`: of the lines sent and received."""
        self._heard = heard
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

    # -- what the event loop calls -----------------------------------------------------------------------------------

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
        """Stop reading while what was received is not handled: memory stays small."""
        if not self._paused and self._pile > _LARGEST_PILE:
            self._paused = True
            self._transport.pause_reading()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- what its owner calls ----------------------------------------------------------------------------------------

    def secure(self, own: Seal, peers: Seal | None) -> None:
        """Seal what is sent from now on with `own`, and open what is received with `peers`."""
        self._own_seal, self._peer_seal = own, peers

    def send(self, message: Sent) -> None:
        """Queue one message; a message for a lost peer is dropped, its reader notices the loss."""
        self.send_line(encode(message))

    def send_line(self, text: str) -> None:
        """Queue a message that is encoded already."""
        if self._transport.is_closing():
            return
        # A lone surrogate is replaced: the receiver could not encode it when it writes it to a file.
        line = text.encode(errors="replace")
        self._transport.write((self._own_seal.sealed(line) if self._own_seal else line) + b"\n")
        if self._transport.get_write_buffer_size() > _LARGEST_BACKLOG:
            self._transport.abort()

    async def receive(self) -> Heard | None:
        """The next message; None when the connection has ended. Raises WireError."""
        line = await self.receive_line()
        return None if line is None else read(self._heard, line)

    async def receive_line(self) -> bytes | bytearray | None:
        """The next line as its sender wrote it; None when the connection has ended. Raises WireError."""
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
        text = self._peer_seal.opened(bytes(line))
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
        """Wait while this peer has sent more than its share."""
        now = time.monotonic()
        self._allowance = min(_BURST, self._allowance + (now - self._refilled) * _A_SECOND) - 1.0
        self._refilled = now
        if self._allowance < 0.0:
            await asyncio.sleep(-self._allowance / _A_SECOND)

    def hung_up(self) -> bool:
        """Whether the peer has closed the connection and everything that it sent was read."""
        return (self._ended and not self._lines) or self._transport.is_closing()

    async def close(self) -> None:
        """Send what is queued, then close the connection."""
        self._transport.close()
        try:
            await asyncio.wait_for(asyncio.shield(self._closed), 2.0)
        except TimeoutError:
            self._transport.abort()

    def drop(self) -> None:
        self._transport.abort()


AgentPeer = Peer[ToAgent, FromAgent]
"""An agent, as the coordinator has it."""
CoordinatorPeer = Peer[FromAgent, ToAgent]
"""The coordinator, as an agent has it."""


def read(direction: Direction[Heard], line: bytes | bytearray) -> Heard:
    """The message in one line; raises WireError."""
    try:
        return direction.read(line)
    except MessageError as error:
        raise WireError(str(error)) from error


async def connect(host: str, port: int, token: str, hello: Hello) -> CoordinatorPeer:
    """Connect, prove the token, say hello (with a nonce of its own) and wait for the welcome.

    Raises OSError when that fails, the connection is closed, or who listens there does not have the token: a
    coordinator under attack may drop a connection whose hello it has not read yet, so trying again is right then.
    Raises WireError when it has read the hello and refuses, ForeignProtocol when that is for good.
    """
    async with asyncio.timeout(WELCOME_SECONDS):  # TimeoutError is an OSError
        _, peer = await asyncio.get_running_loop().create_connection(lambda: CoordinatorPeer(TO_AGENT), host, port)
        answer: Welcome | Refused | None = None
        foreign = ""
        try:
            async with asyncio.timeout(GREETING_SECONDS):
                answer = await _introduce(peer, token, hello)
            foreign = "" if answer is None else why_foreign(hello, answer)
        except TimeoutError as error:
            raise NotGreeted(f"the coordinator has not greeted within {GREETING_SECONDS:g} s") from error
        except Unproven as error:
            raise NotGreeted("what listens there is not this attempt's coordinator") from error
        finally:
            if foreign or not isinstance(answer, Welcome):
                peer.drop()
    if answer is None:
        raise NotGreeted("the coordinator closed the connection before its greeting")
    if foreign:
        raise ForeignProtocol(f"the coordinator refuses: {answer.reason}" if isinstance(answer, Refused) else foreign)
    if isinstance(answer, Refused):
        raise WireError(f"the coordinator refuses: {answer.reason}")
    return peer


async def _introduce(peer: CoordinatorPeer, token: str, hello: Hello) -> Welcome | Refused | None:
    """Answer the challenge; returns what the coordinator says to that, None when it hangs up. Raises Unproven."""
    try:
        line = await peer.receive_line()
        challenge = None if line is None else read(CHALLENGE, line)
    except WireError as error:
        raise Unproven("no challenge") from error
    if challenge is None:
        return None
    if not is_nonce(challenge.nonce):
        raise Unproven("no challenge")
    hello = replace(hello, nonce=new_nonce())
    peer.secure(hello_seal(token, challenge.nonce), None)
    peer.send_line(encode(hello))
    listeners, own = session_seals(token, challenge.nonce, hello.nonce)
    peer.secure(own, listeners)
    answer = await peer.receive_line()
    return None if answer is None else read(ANSWER, answer)
