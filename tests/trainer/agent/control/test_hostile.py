"""An agent that has the token and means harm, or is broken: it is lost alone, and the coordinator goes on."""

import asyncio
import json
from typing import Any

import pytest

from tests.trainer.agent.coordination.test_coordinator import Scene, hear, started
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import AttemptOutcome, FailureKind
from trainer.protocol.messages import agents

ROW = [1, 5, "forward", False, 9, 0.25, 0.25, "R", 0.0, False]
REPORT = {"say": "progress_report", "generation": 1, "step": 5, "phase": "forward", "loss": 1.5, "saved": 0, "total": 9}
SPEEDS = {"matmul": 1.0, "memory": 1.0, "pairs": []}
DEEP: Any = "x"
for _ in range(200):
    DEEP = [DEEP]

HARMFUL: list[dict[str, Any]] = [
    {"say": "tick"},
    {"say": "fenced"},
    {"say": "agent_joined"},
    {"say": "agent_lost", "reason": "me"},
    {"say": "request_found", "request": {"kind": "stop"}},
    {"say": "hello", "protocol": 1, "node": 0},
    {"say": "end", "code": 0},
    {"say": "store", "host": "h", "port": 1, "key": "00"},
    {"say": "unknown"},
    {"say": "unknown", "generation": 1},
    {"say": "preflight_report", "faults": 7},
    {"say": "preflight_report", "faults": [7]},
    {"say": "preflight_report", "faults": [{"check": 1, "reason": [], "shared": {}}]},
    {"say": "preflight_report", "faults": [{"no": "such"}]},
    {"say": "preflight_report", "faults": [], "wall": "noon"},
    {"say": "preflight_report", "faults": [], "machine": {}},
    {"say": "signal_received"},
    {"say": "signal_received", "name": {"a": 1}},
    {"say": "rank_end", "generation": 1},
    {"say": "rank_end", "generation": 1, "rank": "0", "step": 1, "reported": True},
    {"say": "rank_end", "generation": 1, "rank": 0, "step": 1, "reported": True, "exit_code": "0"},
    {"say": "rank_end", "generation": 1, "rank": 0, "step": 1, "reported": True, "exception": ["x"]},
    {"say": "generation_store", "generation": 1, "store": {"host": 5, "port": 1, "key": "00"}},
    {"say": "fork_server_died", "generation": 1},
    {"say": "fork_server_died", "generation": 1, "reason": DEEP},
    {"say": "ready", "warm": 1},
    REPORT | {"step": "5"},
    REPORT | {"step": None},
    REPORT | {"step": 5.5},
    REPORT | {"step": True},
    REPORT | {"phase": 3},
    REPORT | {"loss": DEEP},
    REPORT | {"saved": "all"},
    REPORT | {"save_seconds": "long"},
    REPORT | {"samples": 7},
    REPORT | {"samples": [7]},
    REPORT | {"samples": [[]]},
    REPORT | {"samples": [ROW[:-1]]},
    REPORT | {"samples": [[*ROW[:5], "old", *ROW[6:]]]},
    REPORT | {"samples": [["2", *ROW[1:]]]},
    REPORT | {"samples": [[*ROW[:2], ["forward"], *ROW[3:]]]},
    REPORT | {"samples": [ROW] * 5000},
    REPORT | {"p99": [1]},
    REPORT | {"p99": {"forward": "x"}},
    REPORT | {"work": [[0, "x", 1, 2, 3, 4]]},
    REPORT | {"work": {"0": 1}},
    {"say": "flight_records", "generation": 1, "serial": 1, "flights": [{}], "unanswered": []},
    {"say": "flight_records", "generation": 1, "serial": 1, "flights": [], "unanswered": ["x"]},
    {"say": "rank_speeds", "generation": 1, "rank": 0},
    {"say": "rank_speeds", "generation": 1, "rank": 10**18, "speeds": SPEEDS},
    {"say": "rank_speeds", "generation": 1, "rank": 0, "speeds": [1.0, 1.0, []]},
    {"say": "rank_speeds", "generation": 1, "rank": 0, "speeds": SPEEDS | {"matmul": "fast"}},
    {"say": "rank_speeds", "generation": 1, "rank": 0, "speeds": SPEEDS | {"pairs": [[1]]}},
    {"say": "rank_saves", "generation": 1, "rank": 0, "saves": {"reason": 1, "size": 0}},
]  # fmt: skip

HARMLESS: list[dict[str, Any]] = [
    {"say": "generation_gone", "generation": 0},
    {"say": "progress_report", "generation": 99, "step": 2},
    REPORT | {"samples": [ROW], "p99": {"forward": 0.5}, "more": DEEP},
    REPORT | {"samples": [[*ROW[:5], 10**18, 1e117, *ROW[7:]]]},
    REPORT | {"loss": "nan"},
    {"say": "ready", "warm": True, "generation": "1"},
    REPORT | {"step": 2**62},
]


def told(message: dict[str, Any]) -> str:
    return json.dumps(message)[:70]


@pytest.mark.parametrize("message", HARMFUL, ids=told)
async def test_a_harmful_word_loses_that_agent_only_and_is_told(tmp_path, message):
    async with Scene(tmp_path).led() as scene:
        good, bad = await started(scene)
        bad.send_line(json.dumps(message))
        await hear(good, agents.KillGeneration)
        (lost,) = scene.events(EventKind.AGENT_LOST)
        assert lost.data["name"] == "n1"
        assert lost.data["reason"].startswith("it sent "), lost.data["reason"]
        assert not scene.leading.done()


async def test_an_attempt_that_loses_a_hostile_agent_ends_as_for_any_lost_one(tmp_path):
    async with Scene(tmp_path).led() as scene:
        good, bad = await started(scene)
        bad.send_line(json.dumps(HARMFUL[0]))
        await hear(good, agents.KillGeneration)
        good.send(agents.GenerationGone(generation=1))
        await hear(good, agents.End)
        await good.close()
        assert await asyncio.wait_for(scene.leading, 15) == 75
        failure = AttemptOutcome.read(scene.attempt.outcome).failure
        assert (failure.kind, failure.node) == (FailureKind.AGENT_LOST, "n1")


async def test_what_is_odd_but_harmless_changes_nothing(tmp_path):
    async with Scene(tmp_path).led() as scene:
        good, bad = await started(scene)
        for message in HARMLESS:
            bad.send_line(json.dumps(message))
        for _ in range(3):  # the clock looks at what was told, the heartbeat is written from it
            await hear(good, agents.Ping, 5)
        assert not scene.leading.done()
        assert scene.events(EventKind.AGENT_LOST) == []


@pytest.mark.parametrize(
    "line", [b"\x00" * 50, b'{"say": "progress_report", "generation": 1, "step": 1e999}', b"[" * 9000]
)
async def test_bytes_that_are_no_message_lose_that_agent_only(tmp_path, line):
    async with Scene(tmp_path).led() as scene:
        good, bad = await started(scene)
        assert bad._own_seal is not None
        bad._transport.write(bad._own_seal.sign(line) + b"\n")
        await hear(good, agents.KillGeneration)
        assert scene.events(EventKind.AGENT_LOST)[0].data["reason"].startswith("it sent no JSON")
