"""An agent that has the token and means harm, or is broken: it is lost alone, and the coordinator goes on."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.coordination.test_coordinator import Scene, hear
from trainer.agent.control import message_schema
from trainer.agent.control.tcp_transport import Peer, WireError
from trainer.contract.events import EventKind
from trainer.contract.outcome import AttemptOutcome, FailureKind

ROW = [1, 5, "forward", False, 9, 0.25, 0.25, "R", 0.0, False]
REPORT = {"say": "progress", "generation": 1, "step": 5, "phase": "forward", "loss": 1.5, "saved": 0, "total": 9}
DEEP: Any = "x"
for _ in range(200):
    DEEP = [DEEP]

HARMFUL: list[dict[str, Any]] = [
    {"say": "tick"},
    {"say": "fenced"},
    {"say": "joined"},
    {"say": "lost", "reason": "me"},
    {"say": "request", "request": {"kind": "stop"}},
    {"say": "unknown"},
    {"say": "fit", "faults": 7},
    {"say": "fit", "faults": [7]},
    {"say": "fit", "faults": [{"check": 1, "reason": [], "shared": {}}]},
    {"say": "fit", "faults": [{"no": "such"}]},
    {"say": "fit", "faults": [], "wall": "noon"},
    {"say": "fit", "faults": [], "machine": {}},
    {"say": "signal"},
    {"say": "signal", "name": {"a": 1}},
    {"say": "exit", "generation": 1},
    {"say": "exit", "generation": 1, "rank": "0", "step": 1, "reported": True},
    {"say": "exit", "generation": 1, "rank": 0, "step": 1, "reported": True, "exit_code": "0"},
    {"say": "exit", "generation": 1, "rank": 0, "step": 1, "reported": True, "exception": ["x"]},
    {"say": "store", "generation": 1, "host": 5, "port": 1},
    {"say": "broken", "generation": 1},
    {"say": "broken", "generation": 1, "reason": DEEP},
    {"say": "ready", "warm": True, "generation": "1"},
    REPORT | {"step": "5"},
    REPORT | {"step": None},
    REPORT | {"step": 5.5},
    REPORT | {"step": True},
    REPORT | {"phase": 3},
    REPORT | {"loss": DEEP},
    REPORT | {"saved": "all"},
    REPORT | {"save_seconds": "long"},
    REPORT | {"sightings": 7},
    REPORT | {"sightings": [7]},
    REPORT | {"sightings": [[]]},
    REPORT | {"sightings": [ROW[:-1]]},
    REPORT | {"sightings": [[*ROW[:5], "old", *ROW[6:]]]},
    REPORT | {"sightings": [["2", *ROW[1:]]]},
    REPORT | {"sightings": [[*ROW[:2], ["forward"], *ROW[3:]]]},
    REPORT | {"sightings": [ROW] * 5000},
    REPORT | {"p99": [1]},
    REPORT | {"p99": {"forward": "x"}},
    REPORT | {"work": [[0, "x", 1, 2, 3, 4]]},
    REPORT | {"work": {"0": 1}},
    {"say": "flight", "generation": 1, "serial": 1, "flights": [{}], "unanswered": []},
    {"say": "flight", "generation": 1, "serial": 1, "flights": [], "unanswered": ["x"]},
    {"say": "fitness", "generation": 1, "rank": 0},
    {"say": "fitness", "generation": 1, "rank": 10**18, "matmul": 1.0, "memory": 1.0, "pairs": []},
    {"say": "fitness", "generation": 1, "rank": 0, "matmul": "fast", "memory": 1.0, "pairs": []},
    {"say": "fitness", "generation": 1, "rank": 0, "matmul": 1.0, "memory": 1.0, "pairs": [[1]]},
]  # fmt: skip

HARMLESS: list[dict[str, Any]] = [
    {"say": "unknown", "generation": 1},
    {"say": "gone", "generation": 0},
    {"say": "progress", "generation": 99, "step": 2},
    REPORT | {"sightings": [ROW], "p99": {"forward": 0.5}, "more": DEEP},
    REPORT | {"sightings": [[*ROW[:5], 10**18, 1e117, *ROW[7:]]]},
    REPORT | {"loss": "nan"},
    REPORT | {"step": 2**62},
]


def told(message: dict[str, Any]) -> str:
    return json.dumps(message)[:70]


@pytest.fixture
def play(tmp_path: Path) -> Callable[[Callable[[Scene], Any]], None]:
    def run(script: Callable[[Scene], Any]) -> None:
        async def whole() -> None:
            async with Scene(tmp_path).led() as scene:
                await script(scene)

        asyncio.run(whole())

    return run


async def started(scene: Scene) -> list[Peer]:
    peers = [await scene.join(node) for node in (0, 1)]
    for peer in peers:
        await hear(peer, "start")
    return peers


@pytest.mark.parametrize("message", HARMFUL, ids=told)
def test_a_harmful_word_loses_that_agent_only_and_is_told(play, message):
    async def script(scene: Scene) -> None:
        good, bad = await started(scene)
        bad.send(**message)
        await hear(good, "kill")
        (lost,) = scene.events(EventKind.AGENT_LOST)
        assert lost.data["name"] == "n1"
        assert lost.data["reason"].startswith("it sent "), lost.data["reason"]
        assert not scene.leading.done()

    play(script)


def test_an_attempt_that_loses_a_hostile_agent_ends_as_for_any_lost_one(play):
    async def script(scene: Scene) -> None:
        good, bad = await started(scene)
        bad.send(**HARMFUL[0])
        await hear(good, "kill")
        good.send("gone", generation=1)
        await hear(good, "end")
        await good.close()
        assert await asyncio.wait_for(scene.leading, 15) == 75
        failure = AttemptOutcome.read(scene.attempt.outcome).failure
        assert failure is not None
        assert (failure.kind, failure.node) == (FailureKind.AGENT_LOST, "n1")

    play(script)


def test_what_is_odd_but_harmless_changes_nothing(play):
    async def script(scene: Scene) -> None:
        good, bad = await started(scene)
        for message in HARMLESS:
            bad.send(**message)
        for _ in range(3):  # the clock looks at what was told, the heartbeat is written from it
            await hear(good, "ping", 5)
        assert not scene.leading.done()
        assert scene.events(EventKind.AGENT_LOST) == []

    play(script)


@pytest.mark.parametrize("line", [b"\x00" * 50, b'{"say": "progress", "generation": 1, "step": 1e999}', b"[" * 9000])
def test_bytes_that_are_no_message_lose_that_agent_only(play, line):
    async def script(scene: Scene) -> None:
        good, bad = await started(scene)
        assert bad._own_seal is not None
        bad._transport.write(bad._own_seal.sealed(line) + b"\n")
        await hear(good, "kill")
        assert scene.events(EventKind.AGENT_LOST)[0].data["reason"].startswith("it sent no JSON")

    play(script)


def test_what_real_agents_say_is_allowed():
    for message in (
        REPORT | {"sightings": [ROW], "work": [[0, 5, 1, 2, 3, 4]], "p99": {"forward": 1}, "restored": 0},
        {"say": "fit", "faults": [{"check": "data", "reason": "gone", "shared": True, "full": False}], "wall": 1e9},
        {"say": "exit", "rank": 1, "exit_code": None, "signal": 9, "exception": None, "message": None, "step": 2},
        {"say": "flight", "serial": 1, "flights": ["{}"], "unanswered": [3]},
    ):
        message_schema.check(message)


def test_a_refusal_names_the_word():
    with pytest.raises(WireError, match="a 'progress' whose step is 'five'"):
        message_schema.check(REPORT | {"step": "five"})
