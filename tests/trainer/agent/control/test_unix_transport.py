"""Messages between an agent and its fork server: of any length, with their descriptors."""

import os

import pytest

from trainer.agent.control import unix_transport
from trainer.protocol.messages.fork_server import FROM_FORK_SERVER, TO_FORK_SERVER, ImportFailed, StartRank


@pytest.fixture
def link():
    ends = unix_transport.pair()
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
        unix_transport.send(ours, order, [reading] * 8)
        received, descriptors = unix_transport.receive(theirs, TO_FORK_SERVER)
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
    unix_transport.send(link[0], failed)
    assert unix_transport.receive(link[1], FROM_FORK_SERVER) == (failed, [])
