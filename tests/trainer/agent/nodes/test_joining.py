"""An agent that says hello again: it had waited in vain for its welcome, while the coordinator stood still."""

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.control.raw_agent import RawAgent, challenged
from tests.trainer.agent.coordination.test_coordinator import Scene, hear
from trainer.agent.control.tcp_transport import WireError
from trainer.agent.nodes.roster import Member
from trainer.protocol.events import EventKind
from trainer.protocol.messages import agents


def led(folder: Path, script: Callable[[Scene], Any], **timeouts: float) -> None:
    async def whole() -> None:
        async with Scene(folder, **timeouts).led() as scene:
            await script(scene)

    asyncio.run(whole())


async def knock(scene: Scene) -> None:
    """Say the hello of node 1 and be gone before it is heard: the coordinator runs in this very loop."""
    found = json.loads(scene.attempt.coordinator.read_text())
    with socket.create_connection((found["host"], found["port"])) as connection:
        raw = RawAgent(await challenged(connection), found["token"], node=1, name="n1", attempt=1)
        connection.sendall(raw.hello)


async def known(scene: Scene) -> Member:
    """Node 1, when the coordinator has seen it come and go."""
    members = scene.state.roster.members
    async with asyncio.timeout(5):
        while 1 not in members or not members[1].peer.hung_up():
            await asyncio.sleep(0.01)
    return members[1]


@pytest.mark.parametrize("seen", [False, True], ids=["at_once", "when_its_first_connection_was_seen_to_end"])
def test_an_agent_that_gave_up_waiting_for_its_welcome_may_say_hello_again(tmp_path, seen):
    async def script(scene: Scene) -> None:
        await knock(scene)
        if seen:
            await known(scene)
        peers = [await scene.join(node) for node in (1, 0)]
        for peer in peers:
            await hear(peer, agents.StartGeneration)
        for _ in range(3):  # one a second, longer than its return was waited for
            await hear(peers[0], agents.Ping)
        assert not scene.events(EventKind.AGENT_LOST)
        assert sorted(event.data["node"] for event in scene.events(EventKind.AGENT_JOINED)) == [0, 1]

    led(tmp_path, script, rejoin=1.0)


def test_one_that_does_not_come_again_is_lost(tmp_path):
    async def script(scene: Scene) -> None:
        await knock(scene)
        await known(scene)
        assert await asyncio.wait_for(asyncio.shield(scene.leading), 10) == 75
        (lost,) = scene.events(EventKind.AGENT_LOST)
        assert (lost.data["node"], lost.data["reason"]) == (1, "its connection ended")

    led(tmp_path, script, rejoin=0.1)


def test_nobody_takes_the_place_of_an_agent_that_has_spoken(tmp_path):
    async def script(scene: Scene) -> None:
        first = await scene.join(1)
        async with asyncio.timeout(5):
            while not scene.state.roster.members[1].has_sent:
                await asyncio.sleep(0.01)
        with pytest.raises(WireError, match="no place for this agent"):
            await scene.join(1)
        await scene.join(0)
        await hear(first, agents.StartGeneration)

    led(tmp_path, script)
