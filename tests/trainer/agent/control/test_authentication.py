"""Who is let in at the coordinator's port, and whom an agent believes: real sockets, forged and replayed lines."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from tests.trainer.agent.control.open_server import OpenServer, answered, closing
from tests.trainer.agent.control.raw_agent import RawAgent, challenged, sealed
from trainer.agent.control import tcp_transport
from trainer.agent.control.tcp_transport import NotGreeted, WireError, challenge_line, connect
from trainer.protocol.messages.agents import PROTOCOL, Hello, SignalReceived

FIRST, SECOND = SignalReceived(name="first"), SignalReceived(name="second")


async def test_only_the_one_address_is_listened_on():
    assert tcp_transport.rendezvous_address("local", "", {}) == "127.0.0.1"

    async with OpenServer() as house:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", house.port), 2)


@pytest.mark.parametrize("token", ["", "Secret", "secre", "secret ", "secret\0", "\ud800", "s" * 3000])
async def test_a_wrong_token_is_hung_up_on_without_a_word(token):
    async with OpenServer() as house:
        with pytest.raises(NotGreeted):
            await connect("127.0.0.1", house.port, token, Hello(protocol=PROTOCOL))
        assert house.members == []


async def test_a_member_that_has_no_place_is_told_so_and_does_not_try_again():
    async with OpenServer(refusal="this attempt has no place") as house:
        with pytest.raises(WireError, match="the coordinator refuses: this attempt has no place"):
            await house.member()


async def test_a_hello_comes_in_only_as_often_as_the_roster_lets_it():
    seats = ["first"]
    async with OpenServer() as house:
        house.door._admit = lambda hello, peer: "" if seats and seats.pop() else "no seat"
        first = await house.member()
        with pytest.raises(WireError, match="refuses"):
            await house.member()
        await answered(first)
        await first.close()


async def ended(connection: socket.socket) -> bool:
    """Whether the listener has hung up, with nothing but its challenge before."""
    said = b""
    with suppress(ConnectionResetError):
        while more := await asyncio.wait_for(asyncio.get_running_loop().sock_recv(connection, 4096), 5):
            said += more
    return b"welcome" not in said


async def test_a_replayed_hello_answers_no_other_challenge():
    async with OpenServer() as house:
        with closing([house.stranger(), house.stranger()]) as (agent, thief):
            raw = RawAgent(await challenged(agent), name="a")
            spoken = raw.hello + raw.line(FIRST)
            agent.sendall(spoken)
            while not house.heard:
                await asyncio.sleep(0.01)
            await challenged(thief)
            thief.sendall(spoken)
            assert await ended(thief)
        assert (len(house.members), house.heard) == (1, [("a", "first")])


async def test_lines_that_are_forged_repeated_left_out_exchanged_or_sent_back_lose_that_connection():
    async with OpenServer() as house:
        for number, spoil in enumerate((
            lambda raw: b"0" * 64 + b" " + raw.line(SECOND)[65:],
            lambda raw: raw.line(SECOND)[65:],
            lambda raw: raw.line(SECOND).replace(b"second", b"others"),
            lambda raw: 2 * raw.line(FIRST),
            lambda raw: raw.line(FIRST) and raw.line(SECOND),
            lambda raw: sealed(raw.listeners, SECOND),
            lambda raw: raw.hello,
        ), 1):  # fmt: skip
            with closing([house.stranger()]) as (agent,):
                raw = RawAgent(await challenged(agent))
                agent.sendall(raw.hello + spoil(raw))
                while len(house.lost) < number:
                    await asyncio.sleep(0.01)
        assert set(house.lost) == {": a line without a valid proof"}
        assert [say for _, say in house.heard] == ["first"], "the first of the two that were the same"


@asynccontextmanager
async def another_listener(answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]) -> AsyncIterator[int]:
    """Who is no coordinator listens on this port."""
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with suppress(ConnectionError):
                await answer(reader, writer)
        finally:
            writer.transport.abort()
            ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    await asyncio.wait_for(ended.wait(), 5)
    server.close()
    await server.wait_closed()
    await asyncio.sleep(0.01)  # what was aborted is closed in the next turn of the loop


async def test_who_listens_without_the_token_learns_nothing_and_is_not_believed():
    heard = b""

    async def impostor(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        writer.write(challenge_line("0" * 64))
        heard = await reader.readline()
        writer.write(heard + b'{"say":"welcome"}\n')  # sent back, and plain
        await writer.drain()
        await reader.read()

    async with another_listener(impostor) as port:
        with pytest.raises(NotGreeted, match="not this attempt's coordinator"):
            await connect("127.0.0.1", port, "secret", Hello(protocol=PROTOCOL, name="a"))
    assert heard.endswith(b"}\n")
    assert b"secret" not in heard


@pytest.mark.parametrize("said", [b'{"say":"welcome"}\n', b"SSH-2.0-x\n", b'{"say":"challenge"}\n', b"x" * (1 << 18)])
async def test_an_agent_that_is_not_challenged_says_nothing_of_itself(said):
    heard = b"?"

    async def another(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal heard
        heard = b""
        writer.write(said)
        heard = await reader.read()

    async with another_listener(another) as port:
        with pytest.raises(NotGreeted):
            await connect("127.0.0.1", port, "secret", Hello(protocol=PROTOCOL, name="a"))
    assert heard == b""
