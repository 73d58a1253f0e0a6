"""The wire between agents and coordinator: JSON lines over TCP, each with a proof that its sender has the token."""

import asyncio
import json
import math
import socket
import time
from collections import deque
from typing import Any, NoReturn

from checkpointing.storage.durable import dump_line
from trainer.agent.control.authentication import Seal, hello_seal, is_nonce, new_nonce, session_seals

LONGEST_LINE = 1 << 17
"""Bytes of a message, its proof included."""
WELCOME_SECONDS = 10.0
_LARGEST_BACKLOG = 1 << 20
_LARGEST_PILE = 2 * LONGEST_LINE
_BURST, _A_SECOND = 2048.0, 512.0
"""Messages that one peer may send at once, and in every second after that: the rest waits in its socket."""
_DIGITS, _LONG, _EXPONENT = bytes.maketrans(b"123456789E", b"000000000e"), b"0" * 19, b"e000"

Message = dict[str, Any]


class WireError(Exception):
    """What was received is not a message."""


class Unproven(WireError):
    """What was received is not from a process that has the token, or not what that sent next."""


def parse(line: bytes | bytearray) -> Message:
    """The message in one line; its numbers fit into 64 bits and are finite. Raises WireError."""
    try:
        # Checking every number costs as much as all the rest, so it is done only where one could be too large.
        message = (_CAREFUL if _is_doubtful(line) else _QUICK).decode(line.decode())
    except (ValueError, RecursionError) as error:  # deep nesting exhausts the parser's stack
        raise WireError(f"no JSON: {bytes(line[:40])!r}") from error
    if not isinstance(message, dict) or not isinstance(message.get("say"), str):
        raise WireError(f"no message: {bytes(line[:40])!r}")
    return message


def _is_doubtful(line: bytes | bytearray) -> bool:
    """Whether a number in it may be out of range, by 19 digits in a row or an exponent of three."""
    shapes = line.translate(_DIGITS, b"+")
    return _LONG in shapes or _EXPONENT in shapes


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"not a number: {text[:20]}")


def _integer(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= int(text) < 1 << 63:
        _refuse(text)
    return int(text)


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        _refuse(text)
    return value


_QUICK = json.JSONDecoder(parse_constant=_refuse)
_CAREFUL = json.JSONDecoder(parse_constant=_refuse, parse_int=_integer, parse_float=_real)


class Peer(asyncio.Protocol):
    """One connection; sending never blocks, a peer that does not read is dropped, one that floods is read slowly."""

    def __init__(self, first: bytes = b"", seals: tuple[Seal, Seal] | None = None) -> None:
        """`first`: what was read already, after the hello; `seals`: of the lines sent and received."""
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

    def send(self, say: str, **fields: Any) -> None:
        """Queue one message; a message for a lost peer is dropped, its reader notices the loss."""
        if self._transport.is_closing():
            return
        # A lone surrogate is replaced: the receiver could not encode it when it writes it to a file.
        line = dump_line({"say": say, **fields}).encode(errors="replace")
        self._transport.write((self._own_seal.sealed(line) if self._own_seal else line) + b"\n")
        if self._transport.get_write_buffer_size() > _LARGEST_BACKLOG:
            self._transport.abort()

    async def receive(self) -> Message | None:
        """The next message; None when the connection has ended. Raises WireError."""
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
        return parse(self._open(line))

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


async def connect(host: str, port: int, token: str, hello: Message) -> Peer:
    """Connect, prove the token, say hello and wait for the welcome.

    Raises OSError when that fails, the connection is closed, or who listens there does not have the token: a
    coordinator under attack may drop a connection whose hello it has not read yet, so trying again is right then.
    Raises WireError when it has read the hello and refuses.
    """
    async with asyncio.timeout(WELCOME_SECONDS):  # TimeoutError is an OSError
        _, peer = await asyncio.get_running_loop().create_connection(Peer, host, port)
        welcome = False
        try:
            answer = await _introduce(peer, token, hello)
            welcome = answer is not None and answer["say"] == "welcome"
        except Unproven as error:
            raise ConnectionRefusedError("what listens there is not this attempt's coordinator") from error
        finally:
            if not welcome:
                peer.drop()
    if answer is None:
        raise ConnectionResetError("the coordinator hung up before it said welcome")
    if not welcome:
        raise WireError(f"the coordinator refuses: {answer.get('reason')}")
    return peer


async def _introduce(peer: Peer, token: str, hello: Message) -> Message | None:
    """Answer the challenge; returns what the coordinator says to that, None when it hangs up. Raises Unproven."""
    try:
        challenge = await peer.receive()
    except WireError as error:
        raise Unproven("no challenge") from error
    if challenge is None:
        return None
    if challenge["say"] != "challenge" or not is_nonce(challenge.get("nonce")):
        raise Unproven("no challenge")
    nonce = new_nonce()
    peer.secure(hello_seal(token, challenge["nonce"]), None)
    peer.send("hello", **hello, nonce=nonce)
    listeners, own = session_seals(token, challenge["nonce"], nonce)
    peer.secure(own, listeners)
    return await peer.receive()
