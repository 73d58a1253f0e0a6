"""Attacks on the coordinator's door with real sockets: members come in and are served, and the cost is counted."""

import asyncio
import resource
import socket
import threading
import time
from contextlib import suppress

import pytest

from tests.trainer.agent.control.open_server import OpenServer, answered, closing, descriptors
from tests.trainer.agent.control.raw_agent import RawAgent, challenged, sealed
from trainer.agent.control import control_server, tcp_transport
from trainer.agent.control.control_server import (
    LATE_SECONDS,
    LONGEST_HELLO,
    MAX_UNAUTHENTICATED,
    POLL_SECONDS,
    PeerTimeout,
)
from trainer.agent.control.tcp_transport import LONGEST_LINE
from trainer.protocol.messages.agents import SignalReceived, StartGeneration

# -- strangers ---------------------------------------------------------------------------------------------------------


async def test_silent_strangers_on_every_place_keep_nobody_out():
    async with OpenServer() as house:
        held = [house.stranger(b'{"say": "hel') for _ in range(MAX_UNAUTHENTICATED + 50)]
        with closing(held):
            await answered(await house.member())
            # It has not waited until the strangers' time was up: they are still there.
            assert MAX_UNAUTHENTICATED // 2 < len(house.door._unauthenticated) <= MAX_UNAUTHENTICATED


async def test_an_agent_among_hundreds_that_knock_at_once_is_listened_to_before_it_is_displaced(monkeypatch):
    monkeypatch.setattr(control_server, "_AT_ONCE", 10_000)

    async with OpenServer() as house:
        before = [house.stranger() for _ in range(200)]
        agent = house.stranger()
        raw = RawAgent(await challenged(agent))
        agent.sendall(raw.hello)
        after = [house.stranger() for _ in range(500)]
        with closing([*before, agent, *after]):
            said = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(agent, 200), 5)
            assert raw.heard(said)["say"] == "welcome"


async def test_an_endless_hello_is_cut_off():
    async with OpenServer() as house:
        with closing([house.stranger()]) as (loris,):
            loris.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # what is sent has left this process
            loris.setblocking(False)
            loop, sent = asyncio.get_running_loop(), 0
            with suppress(ConnectionError):
                while sent < 1 << 20:
                    await loop.sock_sendall(loris, b"x" * 512)
                    sent += 512
                    await asyncio.sleep(0.001)
            assert sent <= 4 * LONGEST_HELLO


async def test_slow_strangers_are_parted_with_when_their_time_is_up_however_they_dribble():
    async with OpenServer(patience=0.3) as house:
        with closing([house.stranger() for _ in range(20)]) as dribblers:
            ended = time.monotonic() + 1.0
            while time.monotonic() < ended:
                for each in dribblers:
                    try:
                        each.send(b"{")
                    except OSError:
                        continue
                await asyncio.sleep(0.05)
            assert len(house.door._unauthenticated) == 0


async def test_a_flood_of_connections_has_a_bounded_share_of_time_and_descriptors():
    over, made = threading.Event(), [0]

    def flood(port: int) -> None:
        while not over.is_set():
            try:
                socket.create_connection(("127.0.0.1", port), 0.5).close()
            except OSError:
                continue
            made[0] += 1

    async with OpenServer() as house:
        member = await house.member("old")
        flooder = threading.Thread(target=flood, args=(house.port,))
        before, most, cpu = descriptors(), 0, time.thread_time()
        flooder.start()
        try:
            started = time.monotonic()
            newcomer = await house.member("new")
            joined = time.monotonic() - started
            for _ in range(100):
                await answered(member)
                await asyncio.sleep(0.01)
                most = max(most, descriptors())
            await answered(newcomer)
            share = (time.thread_time() - cpu) / (time.monotonic() - started)
        finally:
            over.set()
            flooder.join(30)
        assert made[0] > 200, "no flood"
        assert joined < 5.0
        assert most - before < MAX_UNAUTHENTICATED + 20
        assert share < 0.7
        assert house.late < 0.5


async def test_a_process_without_descriptors_makes_room_for_its_agents():
    async with OpenServer() as house:
        clients = [socket.socket() for _ in range(100)]
        agent = socket.socket()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        with closing([*clients, agent]):
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors() + 20, limits[1]))
            try:
                for each in clients:
                    each.connect(("127.0.0.1", house.port))
                agent.connect(("127.0.0.1", house.port))
                raw = RawAgent(await challenged(agent))
                agent.sendall(raw.hello)
                said = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(agent, 200), 10)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert raw.heard(said)["say"] == "welcome"


# -- members that turn bad ---------------------------------------------------------------------------------------------


async def test_a_member_that_floods_is_read_slowly_and_costs_the_others_nothing(monkeypatch):
    monkeypatch.setattr(tcp_transport, "_BURST", 200.0)
    monkeypatch.setattr(tcp_transport, "_A_SECOND", 100.0)

    async with OpenServer() as house:
        bad, good = await house.member("bad"), await house.member("good")
        flood = b"".join(sealed(bad._own_seal, SignalReceived(name="x")) for _ in range(20_000))
        bad._transport.write(flood)
        started, cpu = time.monotonic(), time.thread_time()
        for _ in range(50):
            await answered(good)
            await asyncio.sleep(0.02)
        seconds = time.monotonic() - started
        flooded = sum(1 for name, _ in house.heard if name == "bad")
        assert flooded <= 200 + 100 * (seconds + 0.5)
        assert time.thread_time() - cpu < 0.6 * seconds
        assert house.members[0]._pile < 5 * LONGEST_LINE, "what waits is not in our memory"
        bad.drop()


async def test_a_member_with_a_giant_line_is_lost_alone():
    async with OpenServer() as house:
        bad, good = await house.member("bad"), await house.member("good")
        bad._transport.write(b"x" * (LONGEST_LINE + 10))
        while not house.lost:
            await answered(good)
            await asyncio.sleep(0.01)
        assert house.lost == [f"bad: a line of more than {LONGEST_LINE} bytes"]
        worse = await house.member("worse")
        worse._transport.write(b"x" * (LONGEST_LINE + 10) + b"\n")
        while len(house.lost) < 2:
            await answered(good)
            await asyncio.sleep(0.01)


async def test_a_member_that_never_reads_is_dropped_before_it_costs_memory():
    async with OpenServer() as house:
        with closing([house.stranger()]) as (silent,):
            silent.sendall(RawAgent(await challenged(silent)).hello)
            while not house.members:
                await asyncio.sleep(0.01)
            (deaf,) = house.members
            for _ in range(5000):
                deaf.send(StartGeneration(generation=1, suspects=(7,) * 2000))
                if deaf.hung_up():
                    break
                await asyncio.sleep(0)
            assert deaf.hung_up()


async def test_messages_in_pieces_and_in_bunches_are_the_same_messages():
    async with OpenServer() as house:
        member = await house.member()
        text = b"".join(sealed(member._own_seal, SignalReceived(name=f"m{number}")) for number in range(300))
        for at in range(0, len(text), 7):
            member._transport.write(text[at : at + 7])
            if at % 70 == 0:
                await asyncio.sleep(0)
        while len(house.heard) < 300:
            await asyncio.sleep(0.01)
        assert [say for _, say in house.heard] == [f"m{number}" for number in range(300)]
        await member.close()


LATEST = POLL_SECONDS + LATE_SECONDS


@pytest.mark.parametrize(
    ("looks", "lasted"),
    [
        ([102, 104, 106], 6),
        ([102 + at for at in range(0, 62, 2)], 62),
        # Late, but not so late that the process was stopped.
        ([100 + LATEST * at for at in range(1, 13)], 60),
        # Stopped for a minute, for a night, twice.
        ([102, 162], 0),
        ([40_000], 0),
        ([102, 162, 164, 224, 226], 2),
    ],
)
def test_time_in_which_the_listener_stood_still_is_no_silence(looks, lasted):
    silence = PeerTimeout(100.0)
    assert [silence.seconds_silent(float(now)) for now in looks][-1] == lasted


def test_a_word_ends_it():
    silence = PeerTimeout(100.0)
    assert silence.seconds_silent(102.0) == 2.0
    silence.record_message(103.0)
    assert silence.seconds_silent(105.0) == 2.0
