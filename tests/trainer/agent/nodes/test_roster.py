"""Who sits where: seats, spares and silence, on tables and with a clock of the test's own."""

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.control.raw_agent import RawAgent, challenged
from tests.trainer.agent.coordination.test_coordinator import Scene, hear
from tests.trainer.agent.fake_roster import FakePeer, make_roster
from trainer.agent.control.control_server import AGENT_TIMEOUT_SECONDS, STALLED_TIMEOUT_SECONDS
from trainer.agent.control.tcp_transport import WireError
from trainer.agent.nodes.roster import LATE_SECONDS, Member, Replacement, Roster, assign_node_ranks_to, replacements
from trainer.protocol.events import EventKind
from trainer.protocol.messages import agents
from trainer.protocol.messages.agents import Hello, NodeRank, PreflightFault, ProgressReport, StartGeneration

FAULT = PreflightFault(check="open files", reason="few", shared=False)


@pytest.mark.parametrize(
    ("count", "fit", "node_ranks", "reason"),
    [
        (2, {0, 1, 2}, {0: 0, 1: 1}, "2 of 3 node(s) that can train have a node rank"),
        (2, {0, 2, 3}, {0: 0, 1: 2}, "2 of 3 node(s) that can train have a node rank"),
        (2, {0}, None, "1 node(s) can train, 2 are needed"),
        (1, {1, 2}, None, "node 0, which leads the job, cannot train"),
    ],
)
def test_the_first_seating(count, fit, node_ranks, reason):
    assert assign_node_ranks_to(count, fit) == (node_ranks, reason)


TREE = {0: ("top", "s1"), 1: ("top", "s2"), 2: ("top", "s1"), 3: ("top", "s2")}
TWO_LEVELS = {0: ("a", "a1"), 1: ("b", "b1"), 2: ("a", "a2"), 3: ("b", "b2"), 4: ("a", "a1"), 5: ("b", "b1")}


@pytest.mark.parametrize(
    ("count", "fit", "switches", "order"),
    [
        (4, {0, 1, 2, 3}, TREE, [0, 2, 1, 3]),
        (3, {0, 1, 2, 3}, TREE, [0, 2, 1]),  # the spare is alone under its switch
        (2, {0, 1, 3}, TREE, [0, 1]),
        (6, {0, 1, 2, 3, 4, 5}, TWO_LEVELS, [0, 4, 2, 1, 5, 3]),
        (5, {0, 1, 2, 4, 5}, TWO_LEVELS, [0, 4, 2, 1, 5]),
        (3, {0, 1, 2}, {}, [0, 1, 2]),
        (4, {0, 1, 2, 3}, {0: ("top", "s1"), 2: ("top", "s1")}, [0, 2, 1, 3]),  # of two nodes nothing is known
        (3, {0, 1, 2}, {0: ("x", "same"), 1: ("y", "same"), 2: ("x", "same")}, [0, 2, 1]),  # names within one switch
    ],
)
def test_nodes_under_one_switch_have_neighbouring_node_ranks(count, fit, switches, order):
    node_ranks, _ = assign_node_ranks_to(count, fit, switches)
    assert node_ranks == dict(enumerate(order))


def test_the_order_by_switches_is_what_agents_say_when_they_greet():
    made = Roster(4, 1, lambda *_: None, node_ranks=3)
    for node, path in TREE.items():
        assert made.admit(Hello(node=node, name=f"n{node}", attempt=1, switches=path), FakePeer()) == ""
        made.members[node].faults = []
    made.assign_node_ranks()
    assert made.node_ranks == {0: 0, 1: 2, 2: 1}
    made.members[2].lost = "its connection ended"
    made.replace_nodes()
    assert made.node_ranks == {0: 0, 1: 3, 2: 1}  # a spare replaces one node; the others keep their node ranks


@pytest.mark.parametrize(
    ("fit", "ready", "moves", "reason"),
    [
        ({0, 1, 2, 3, 4}, {3, 4}, (), "no node needs to be replaced"),
        ({0, 2, 3, 4}, {3, 4}, (Replacement(node_rank=1, node=3, instead=1),), "1 of 2 spare node(s) take a node rank"),
        ({0, 2, 3, 4}, {4}, (Replacement(node_rank=1, node=4, instead=1),), "1 of 2 spare node(s) take a node rank"),
        (
            {0, 3, 4},
            {3, 4},
            (Replacement(node_rank=1, node=3, instead=1), Replacement(node_rank=2, node=4, instead=2)),
            "2 of 2 ",
        ),
        ({0, 4}, {4}, (), "2 node(s) must be replaced, 1 spare node(s) are left"),
        ({1, 2, 3, 4}, {3, 4}, (), "node 0, which leads the job, is lost"),
    ],
)
def test_which_spare_replaces_which_node(fit, ready, moves, reason):
    found, why = replacements({0: 0, 1: 1, 2: 2}, fit, ready)
    assert found == moves
    assert why.startswith(reason)


def node_ranks_told(made: Roster, kind: type[NodeRank] | type[StartGeneration]) -> dict[int, list[int]]:
    """By node, in the messages of this kind."""
    told = {node: [one for one in member.peer.sent if isinstance(one, kind)] for node, member in made.members.items()}
    return {node: [one.node_rank for one in messages] for node, messages in told.items() if messages}


def test_every_seat_is_told_and_only_they_start():
    made = make_roster(n1={"faults": [FAULT]})
    made.assign_node_ranks()
    assert made.node_ranks == {0: 0, 1: 2}
    made.start_generation(StartGeneration(generation=1))
    assert node_ranks_told(made, StartGeneration) == {0: [0], 2: [1]}
    assert node_ranks_told(made, NodeRank) == {0: [0], 2: [1]}
    assert made.names() == ["n0", "n2", "n1"]


def test_a_spare_takes_the_lost_nodes_seat_and_the_others_keep_theirs():
    made = make_roster(nodes=4, node_ranks=3)
    made.assign_node_ranks()
    made.members[1].lost = "its connection ended"
    assert not made.all_ready()
    assert made.is_needed(1)
    (move,), _ = made.replace_nodes()
    assert (move.node_rank, move.node, move.instead) == (1, 3, 1)
    assert made.node_ranks == {0: 0, 1: 3, 2: 2}
    assert [member.name for member in made.training_members()] == ["n0", "n3", "n2"]
    assert made.spares() == []
    assert made.names() == ["n0", "n3", "n2"]
    assert made.all_ready()
    assert not made.is_needed(1)


@pytest.mark.parametrize(
    ("members", "can", "could"),
    [
        ({}, True, True),
        ({"n1": {"faults": [FAULT]}}, True, True),
        ({"n1": {"faults": None}, "n2": {"faults": None}}, False, True),
        ({"n1": {"faults": [FAULT]}, "n2": {"lost": "gone"}}, False, False),
        ({"n0": {"faults": [FAULT]}}, False, False),
        ({"n2": {"excluded": "its fork server died"}}, True, True),
    ],
)
def test_whether_there_are_nodes_enough(members, can, could):
    made = make_roster(**members)
    assert (made.can_train(), made.could_train()) == (can, could)


def test_before_the_seats_are_given_only_a_loss_too_many_matters():
    made = make_roster()
    made.members[1].lost = "gone"
    assert not made.is_needed(1)
    made.members[2].lost = "gone"
    assert made.is_needed(2)


def test_everything_is_gone_but_for_a_node_that_is_given_up():
    made = make_roster(nodes=3, node_ranks=2, n0={"gone": 4}, n1={"gone": 3})
    assert not made.all_gone(4)
    assert made.all_gone(4, but="n1")
    assert not made.all_gone(4, but="n0")


def last_message_at(made: Roster, node: int, now: float, **report: Any) -> None:
    message = ProgressReport(generation=1, phase="forward", **report)
    made._note(made.members[node], message, now)
    made.members[node].progress = message


def began(now: float) -> Roster:
    made = make_roster()
    made.assign_node_ranks()
    made._moved = now
    return made


def test_a_silent_agent_is_lost_soon_when_the_job_stands_still():
    made = began(100.0)
    for node in (0, 1, 2):
        last_message_at(made, node, 100.0, step=5)
    for at in range(101, 113):
        last_message_at(made, 0, float(at), step=5)
        last_message_at(made, 2, float(at), step=5)
    assert made.find_timed_out(100.0 + STALLED_TIMEOUT_SECONDS) is None
    found = made.find_timed_out(112.0)
    assert found is not None
    assert (found[0].name, found[1]) == ("n1", "it has been silent for 12 s while no rank moved")


def test_a_silent_agent_has_a_minute_while_the_others_get_on():
    made = began(100.0)
    last_message_at(made, 1, 100.0, step=5)
    for at in range(101, 162):
        last_message_at(made, 0, float(at), step=at)
        last_message_at(made, 2, float(at), step=at)
        assert made.find_timed_out(float(at)) is None or at > 100.0 + AGENT_TIMEOUT_SECONDS
    found = made.find_timed_out(161.0)
    assert found is not None
    assert (found[0].name, found[1]) == ("n1", "it has been silent for 61 s")


def test_before_anything_trains_silence_has_its_minute_too():
    made = make_roster(n1={"last_message_at": 0.0}, n0={"last_message_at": 50.0}, n2={"last_message_at": 50.0})
    assert made.find_timed_out(50.0) is None


def test_a_coordinator_that_was_stopped_itself_takes_nobody_for_lost():
    made = began(100.0)
    for node in (0, 1, 2):
        last_message_at(made, node, 100.0, step=5)
    assert made.find_timed_out(900.0) is None


@pytest.mark.parametrize("pause", [LATE_SECONDS + 1.5, 30.0, 900.0])
def test_after_a_pause_of_the_whole_job_the_last_to_wake_is_not_lost(pause):
    made = began(100.0)
    for at in range(100, 110):
        for node in (0, 1, 2):
            last_message_at(made, node, float(at), step=5)
        made.tick(float(at))
    woken = 109.0 + pause
    made.tick(woken)
    last_message_at(made, 0, woken, step=5)
    last_message_at(made, 2, woken + 0.1, step=5)
    assert made.find_timed_out(woken + 0.1) is None
    # From then on all are measured as before.
    for at in range(1, 13):
        made.tick(woken + at)
        last_message_at(made, 0, woken + at, step=5)
        last_message_at(made, 2, woken + at, step=5)
        assert made.find_timed_out(woken + at) is None or at > STALLED_TIMEOUT_SECONDS
    found = made.find_timed_out(woken + 12)
    assert found is not None
    assert found[0].name == "n1"


def test_ticks_that_are_a_little_late_hide_nobody():
    made = began(100.0)
    for at in range(100, 118, 3):  # two seconds late each
        made.tick(float(at))
        for node in (0, 2):
            last_message_at(made, node, float(at), step=5)
        if at == 100:
            last_message_at(made, 1, 100.0, step=5)
    found = made.find_timed_out(115.0)
    assert found is not None
    assert found[0].name == "n1"


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
