"""The coordinator's door: strangers are dropped, whatever they send, and members notice nothing."""

import asyncio
import json
import os
import socket
import threading
import time

import pytest

from tests.trainer.agent.control.open_server import OpenServer, answered
from tests.trainer.agent.job import until
from trainer.agent.control.tcp_transport import LONGEST_LINE
from trainer.protocol.messages.agents import SignalReceived
from trainer.protocol.messages.ranks import (
    FROM_FORK_SERVER,
    TO_FORK_SERVER,
    ImportFailed,
    StartRank,
    packet_pair,
    receive_packet,
    send_packet,
)

GARBAGE = [
    b"\n",
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x00\xff\xfe" * 100 + b"\n",
    b"[" * 60_000 + b"\n",
    b"9" * 60_000 + b"\n",
    b'{"say": ["hello"]}\n',
    b'{"say": "hello"}\n',
    b'{"say": "hello", "token": 7}\n',
    b'{"say": "hello", "token": "\\ud800"}\n',
    b'{"say": "hello", "token": "wrong", "node": 1, "name": "x"}\n',
    b"x" * (LONGEST_LINE + 10),
]


async def hung_up(reader: asyncio.StreamReader) -> bool:
    """Whether the other side has ended the connection with no word but its challenge, within two seconds."""
    try:
        return (await asyncio.wait_for(reader.read(), 2.0)).count(b"\n") <= 1
    except ConnectionResetError:
        return True


async def test_a_text_that_utf_8_cannot_encode_arrives_without_what_it_cannot():
    ours, theirs = packet_pair()
    send_packet(ours, ImportFailed(exception="OSError", message="bad \udcff name", traceback=""))
    assert receive_packet(theirs, FROM_FORK_SERVER)[0].message == "bad ? name"
    ours.close()
    theirs.close()
    async with OpenServer() as house:
        member = await house.member()
        member.send(SignalReceived(name="bad \udcff name"))
        assert (await asyncio.wait_for(member.receive(), 5)).reason == "bad ? name"
        await member.close()


async def test_a_member_is_served_while_strangers_send_garbage():
    async with OpenServer() as house:
        member = await house.member()
        for garbage in GARBAGE:
            reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
            writer.write(garbage)
            assert await hung_up(reader), garbage[:30]
            writer.close()
            await answered(member)
        member.drop()


def test_a_job_under_attack_finishes_and_its_file_is_private(job):
    work = job("kill@1@1", "hang@*@1").start()
    work.go()
    until(work.attempt.coordinator.exists, 10, work.story)
    assert work.attempt.coordinator.stat().st_mode & 0o777 == 0o600
    found = json.loads(work.attempt.coordinator.read_text())
    over = threading.Event()

    def attack() -> None:
        held = []
        while not over.is_set():
            for garbage in GARBAGE:
                try:
                    stranger = socket.create_connection((found["host"], found["port"]), 1)
                    stranger.sendall(garbage)
                except OSError:
                    continue
                held.append(stranger)
            time.sleep(0.1)
            while len(held) > 50:
                held.pop(0).close()
        for stranger in held:
            stranger.close()

    attacker = threading.Thread(target=attack)
    attacker.start()
    try:
        assert work.wait() == [0, 0], work.story()
    finally:
        over.set()
        attacker.join(10)
    assert work.outcome().generations == 2


@pytest.fixture
def link():
    ends = packet_pair()
    yield ends
    for end in ends:
        end.close()


@pytest.mark.parametrize("words", [("a",), ("a" * 131_071,), ("b" * 100_000,) * 50, ("c",) * 10_000])
def test_an_order_of_any_length_arrives_with_its_descriptors(link, words):
    ours, theirs = link
    before = len(os.listdir("/proc/self/fd"))
    order = StartRank(rank=3, generation=1, env={f"V{number}": "x" for number in range(5000)}, command=words)
    reading, writing = os.pipe()
    try:
        send_packet(ours, order, [reading] * 8)
        received, descriptors = receive_packet(theirs, TO_FORK_SERVER)
        assert received == order
        assert {os.fstat(one).st_ino for one in descriptors} == {os.fstat(reading).st_ino}
        assert len(descriptors) == 8
        for one in descriptors:
            os.close(one)
    finally:
        os.close(reading)
        os.close(writing)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_traceback_whose_signs_each_take_twelve_bytes_arrives(link):
    failed = ImportFailed(exception="OSError", message="\U0001f600" * 4000, traceback="\U0001f600" * 16_000)
    send_packet(link[0], failed)
    assert receive_packet(link[1], FROM_FORK_SERVER) == (failed, [])
