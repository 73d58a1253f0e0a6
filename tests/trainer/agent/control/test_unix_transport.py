"""Messages between an agent and its fork server: of any length, with their descriptors."""

import os

import pytest

from trainer.protocol.messages.ranks import (
    FROM_FORK_SERVER,
    TO_FORK_SERVER,
    ImportFailed,
    StartRank,
    packet_pair,
    receive_packet,
    send_packet,
)


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
