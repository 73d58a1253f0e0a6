"""Agents and coordinators of different versions: each refuses the other by name, at once."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.control.open_server import OpenServer, answered, closing
from tests.trainer.agent.control.raw_agent import RawAgent, challenged
from tests.trainer.agent.control.test_authentication import another_listener
from tests.trainer.agent.coordination.test_coordinator import Scene, hear
from trainer.agent import main
from trainer.agent.control.tcp_transport import ForeignProtocol, challenge_line, connect, session_seals
from trainer.agent.coordination.launch_gate import LaunchRefused
from trainer.agent.main import Agent
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import AgentEnd, AgentReport, AttemptOutcome, FailureKind
from trainer.protocol.messages import agents
from trainer.protocol.messages.agents import PROTOCOL, Hello, Welcome, installed_release
from trainer.protocol.messages.codec import encode
from trainer.protocol.node_identity import NodeIdentity

OURS = f"{PROTOCOL} (orch {installed_release()})"
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"protocol": PROTOCOL + 1, "release": "9.0.0"}, f"{PROTOCOL + 1} (orch 9.0.0)"),
    ({"protocol": 0}, "0 (orch of an unknown release)"),
    ({"protocol": PROTOCOL + 1, "release": "9.0.0", "node": 0, "more": [1]}, f"{PROTOCOL + 1} (orch 9.0.0)"),
]
DO = "all nodes must start the same installation of orch"


@pytest.mark.parametrize(("told", "spoken"), OTHERS, ids=["newer", "older", "newer, which says more"])
async def test_an_agent_of_another_protocol_is_refused_and_told_what_to_do(told: dict[str, Any], spoken: str) -> None:
    foreign: list[str] = []

    async with OpenServer() as house:
        house.door._on_foreign = lambda hello, reason: foreign.append(f"{hello.name}: {reason}")
        with closing([house.stranger()]) as (agent,):
            raw = RawAgent(await challenged(agent), name="n1", **told)
            agent.sendall(raw.hello)
            said = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(agent, 4096), 5)
            answer = raw.heard(said)
        assert (answer["say"], answer["protocol"]) == ("refused", PROTOCOL)
        assert answer["reason"] == f"this agent speaks protocol {spoken}, the coordinator {OURS}: {DO}"
        assert house.members == []
        assert foreign == [f"n1: {answer['reason']}"]
        await answered(await house.member())


def test_a_hello_without_a_version_is_an_older_one() -> None:
    assert Hello().protocol != PROTOCOL


@pytest.mark.parametrize("welcome", [Welcome(), Welcome(protocol=PROTOCOL + 1, release="9.0.0")], ids=["old", "new"])
async def test_an_agent_leaves_a_coordinator_of_another_protocol(welcome: Welcome) -> None:
    async def coordinator(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        challenge = "0" * 64
        writer.write(challenge_line(challenge))
        hello = json.loads((await reader.readline())[65:])
        listeners, _ = session_seals("secret", challenge, hello["nonce"])
        writer.write(listeners.sign(encode(welcome).encode()) + b"\n")
        assert await reader.read() == b"", "the agent has nothing more to say"

    async with another_listener(coordinator) as port:
        with pytest.raises(ForeignProtocol, match=rf"^this agent speaks protocol {PROTOCOL} .*, the coordinator "):
            await connect("127.0.0.1", port, "secret", Hello(protocol=PROTOCOL, name="a"))


async def test_a_refused_agent_ends_at_once_with_the_reason_in_its_report(tmp_path: Path, monkeypatch: Any) -> None:
    async with Scene(tmp_path).led() as scene:
        monkeypatch.setattr(main, "PROTOCOL", PROTOCOL + 1)
        agent = Agent(scene.run, scene.attempt, [])
        identity = NodeIdentity(kind="slurm", job_id="7", node=1, nodes=2, name="n1")
        with pytest.raises(LaunchRefused, match=DO):
            await asyncio.wait_for(agent._join(identity), 10)
        report = AgentReport.read(scene.attempt.agent_report(1))
        assert report.end is AgentEnd.REFUSED
        assert report.reason.startswith("n1: the coordinator refuses: this agent speaks protocol ")


async def knock(scene: Scene, node: int) -> None:
    """The agent of this node, of another protocol, wants to join."""
    hello = Hello(protocol=PROTOCOL + 1, release="9.0.0", node=node, name=f"n{node}", attempt=1)
    found = json.loads(scene.attempt.coordinator.read_text())
    with pytest.raises(ForeignProtocol):
        await connect(found["host"], found["port"], found["token"], hello)


async def test_an_attempt_that_needs_a_refused_agent_ends_with_the_reason_at_once(tmp_path: Path) -> None:
    async with Scene(tmp_path).led() as scene:
        peer = await scene.join(0)
        await knock(scene, 1)
        assert (await hear(peer, agents.End)).code == 78
        await peer.close()
        await asyncio.wait_for(scene.leading, 10)
        failure = AttemptOutcome.read(scene.attempt.outcome).failure
        assert (failure.kind, failure.node) == (FailureKind.INSTALLATION, "n1")
        assert DO in failure.reason


async def test_a_foreign_agent_takes_no_place_of_one_that_has_joined(tmp_path: Path) -> None:
    async with Scene(tmp_path).led() as scene:
        peers = [await scene.join(0), await scene.join(1, ready=False)]
        await knock(scene, 1)
        peers[1].send(agents.Ready(warm=True))
        assert (await hear(peers[1], agents.StartGeneration)).generation == 1


async def test_an_attempt_that_has_nodes_enough_goes_on_without_a_refused_agent(tmp_path: Path) -> None:
    async with Scene(tmp_path, spares=1, more_nodes=0.2).led() as scene:
        await knock(scene, 1)
        peers = [await scene.join(node) for node in (0, 2)]
        assert (await hear(peers[1], agents.StartGeneration)).node_rank == 1
        (decision,) = scene.events(EventKind.DECISION)
        assert decision.data["action"] == "refuse"
        assert DO in decision.data["reason"]
