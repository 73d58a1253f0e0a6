"""One agent alone: what it tells the coordinator of its ranks and its fork server."""

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from trainer.agent import node_agent
from trainer.agent.attempt_state.attempt_state import Timeouts
from trainer.agent.control import control_server
from trainer.agent.node_agent import NodeAgent
from trainer.agent.nodes import preflight
from trainer.agent.processes.background_tasks import report_exceptions
from trainer.agent.processes.log_pipes import LogPipes
from trainer.agent.rank_processes import rank_exit
from trainer.agent.rank_processes.local_ranks import LocalRanks
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.recipe_config import ClusterShape
from trainer.protocol.events import EventLog
from trainer.protocol.failures.rank_end import RankEnd, append_outcome
from trainer.protocol.messages import agents
from trainer.protocol.messages.agents import PreflightFault
from trainer.protocol.messages.ranks import RendezvousStore, send_message
from trainer.protocol.node_identity import NodeIdentity
from trainer.protocol.rank_progress.progress import StopReason
from trainer.protocol.run_dir import RunDir

M = TypeVar("M")


class Told:
    """Stands for the connection to the coordinator: remembers what was said."""

    def __init__(self) -> None:
        self.messages: list[agents.FromAgent] = []

    def send(self, message: agents.FromAgent) -> None:
        self.messages.append(message)

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.messages if isinstance(message, kind)]

    def names(self) -> list[str]:
        """Of all but progress."""
        return [type(one).__name__ for one in self.messages if not isinstance(one, agents.ProgressReport)]


class LostLink:
    """A fork server that has just died."""

    lost = True


class Alone:
    """An agent of two ranks whose coordinator and fork server the test plays."""

    def __init__(self, folder: Path, **config: Any) -> None:
        run = RunDir(folder / "run-1")
        run.make()
        self.attempt = run.attempt(1)
        self.attempt.make()
        self.events = EventLog(self.attempt.event_file("agent-0000"), "agent-0000", 1)
        self.agent = NodeAgent(
            run=run, attempt=self.attempt, config=JobConfig(cluster=ClusterShape(ranks_per_node=2), **config),
            identity=NodeIdentity(kind="slurm", job_id="7", node=0, nodes=1, name="n0"), events=self.events, environ={},
            logs=LogPipes(),
        )  # fmt: skip
        # What this process has started for other tests is no rank's.
        self.agent.other_children = tuple(child.pid for child in psutil.Process().children())
        self.told = self.agent._peer = Told()
        self.ranks = self.agent._ranks = LocalRanks(1, range(2))
        self.agent._node_rank = 0

    def ended(self, exit_code: int | None, number: int | None = None) -> RankEnd:
        async def end() -> None:
            self.agent._on_ended(RankEnd(rank=0, exit_code=exit_code, signal=number, reported=False))
            await asyncio.wait([self.agent._last_exit_report])

        asyncio.run(end())
        return self.told.of(RankEnd)[-1]

    def close(self) -> None:
        self.agent._ranks.close()
        self.events.close()


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Alone]:
    made = Alone(tmp_path)
    yield made
    made.close()


LAST = RankEnd(rank=0, exit_code=1, exception="OSError", message="[Errno 28] full", step=9)


def test_a_rank_that_could_not_write_its_outcome_is_believed_by_its_socket(alone):
    theirs = alone.ranks.by_rank[0].theirs
    send_message(theirs, RendezvousStore(host="h", port=1, key="00"))
    send_message(theirs, LAST)
    end = alone.ended(1)
    assert (end.exit_code, end.exception, end.message, end.step) == (1, "OSError", "[Errno 28] full", 9)
    assert end.reported


def test_the_outcome_file_comes_before_the_socket(alone):
    send_message(alone.ranks.by_rank[0].theirs, LAST)
    node = alone.agent._node.name
    append_outcome(alone.attempt, RankEnd(rank=0, generation=1, node=node, step=10, exit_code=0, time=0.0))
    # It died in the interpreter's teardown.
    end = alone.ended(None, 6)
    assert (end.exit_code, end.signal, end.step, end.reported) == (0, None, 10, True)


def test_a_rank_that_leaves_with_zero_and_says_nothing_has_not_said_so(alone):
    assert not alone.ended(0).reported
    assert not alone.ended(76).reported


def test_a_last_word_that_cannot_be_read_is_none(alone):
    alone.ranks.by_rank[0].theirs.send(b'{"say": "rank_end", "mess')
    alone.ranks.by_rank[0].theirs.send(b'{"say": "rank_end", "exit_code": 0}')
    assert not alone.ended(0).reported


def test_a_command_needs_no_word(tmp_path):
    alone = Alone(tmp_path, command=["true"])
    assert alone.ended(0).reported
    alone.close()


async def test_a_start_that_meets_a_dead_fork_server_breaks_the_generation(alone):
    alone.agent._link = LostLink()
    alone.ranks.close()
    alone.agent._ranks = None
    alone.agent._start_generation(agents.StartGeneration(generation=2, node_rank=0))
    assert [message.generation for message in alone.told.of(agents.ForkServerDied)] == [2]
    alone.agent._kill(2)
    assert [message.generation for message in alone.told.of(agents.GenerationGone)] == [2]


class Line(Told):
    """A connection on which the test speaks."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        super().__init__()
        self._said: asyncio.Queue[agents.ToAgent | None] = asyncio.Queue()

    def say(self, message: agents.ToAgent) -> None:
        self._said.put_nowait(message)

    async def receive(self) -> agents.ToAgent | None:
        return await self._said.get()


@pytest.fixture
def hasty(monkeypatch) -> None:
    """A minute of silence takes a third of a second."""
    monkeypatch.setattr(node_agent, "AGENT_TIMEOUT_SECONDS", 0.3)
    for place in (node_agent, control_server):
        monkeypatch.setattr(place, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(control_server, "LATE_SECONDS", 0.1)


async def test_an_agent_that_was_stopped_itself_does_not_take_its_coordinator_for_lost(alone, hasty):
    line = alone.agent._peer = Line()
    listening = asyncio.create_task(alone.agent._listen())
    await asyncio.sleep(0.05)
    time.sleep(1.0)  # noqa: ASYNC251  # all of the process stands still
    asyncio.get_running_loop().call_later(0.1, lambda: line.say(agents.End(code=0)))
    assert await listening == 0


async def test_a_coordinator_that_says_nothing_is_lost(alone, hasty):
    alone.agent._peer = Line()
    assert await asyncio.wait_for(alone.agent._listen(), 5) == 75


def test_an_agent_speaks_while_its_node_is_examined_and_can_be_told_to_end(alone, monkeypatch):
    answered = threading.Event()
    fault = PreflightFault(check="GPUs", reason="0 GPU(s)", shared=False)
    monkeypatch.setattr(preflight, "examine", lambda *_: answered.wait(20) and [fault])

    async def heard(line: Line, kind: type) -> None:
        async with asyncio.timeout(5):
            while not line.of(kind):
                await asyncio.sleep(0.01)

    async def scene(*, driver: bool) -> Line:
        answered.clear()
        line, alone.agent._ranks = Line(), None
        serving = asyncio.create_task(alone.agent.serve(line))
        await heard(line, agents.ProgressReport)
        assert not line.of(agents.PreflightReport)
        if driver:
            answered.set()
            await heard(line, agents.PreflightReport)
        line.say(agents.End(code=0))
        assert await asyncio.wait_for(serving, 5) == 0
        answered.set()
        return line

    try:
        assert not asyncio.run(scene(driver=False)).of(agents.PreflightReport)
        assert [message.faults for message in asyncio.run(scene(driver=True)).of(agents.PreflightReport)] == [(fault,)]
    finally:
        alone.agent._ranks = alone.ranks  # closed by the fixture


def test_a_driver_that_hangs_is_found_out_before_its_node_is_given_up():
    assert Timeouts().preflight > 4 * preflight._DRIVER_SECONDS


def test_a_file_system_that_stands_still_when_ranks_die_stops_no_agent(alone, monkeypatch):
    reading, back = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        reading.set()
        back.wait(3)

    monkeypatch.setattr(rank_exit, "_READ_SECONDS", 1.5)
    monkeypatch.setattr(rank_exit, "find_outcome", hang)
    send_message(alone.ranks.by_rank[1].theirs, LAST)

    async def scene() -> None:
        before = time.monotonic()
        alone.agent._on_ended(RankEnd(rank=1, exit_code=1))
        while not reading.is_set():
            await asyncio.sleep(0.01)
        # The other's reading is given up at once, but it died later.
        monkeypatch.setattr(rank_exit, "_READ_SECONDS", 0.0)
        alone.agent._on_ended(RankEnd(rank=0, signal=9))
        await asyncio.sleep(0.01)
        for rank in (0, 1):
            alone.agent._gone(rank)
        alone.agent._kill(1)
        assert time.monotonic() - before < 1.0
        assert not alone.told.of(RankEnd) + alone.told.of(agents.GenerationGone)
        await asyncio.wait([alone.agent._last_exit_report])

    try:
        asyncio.run(scene())
    finally:
        back.set()
    assert alone.told.names() == ["RankEnd", "RankEnd", "GenerationGone"]
    first, second = alone.told.of(RankEnd)
    assert (first.rank, first.reported, first.exception) == (1, True, "OSError")
    assert (second.rank, second.reported, second.signal) == (0, False, 9)


async def test_an_end_is_not_told_of_a_generation_that_is_over(alone):
    alone.agent._on_ended(RankEnd(rank=0, exit_code=1))
    alone.agent._ranks = None
    await asyncio.wait([alone.agent._last_exit_report])
    alone.agent._ranks = alone.ranks
    assert not alone.told.of(RankEnd)


async def test_who_ended_before_its_fork_server_is_told_of_before_it(alone):
    alone.agent._startup_failures = 9  # no other fork server
    alone.agent._on_ended(RankEnd(rank=0, exit_code=1))
    alone.agent._on_fork_server_lost("killed by SIGKILL")
    async with asyncio.timeout(5):
        while not alone.told.of(agents.GenerationGone):
            await asyncio.sleep(0.01)
    assert alone.told.names() == ["Unready", "RankEnd", "ForkServerDied", "RankEnd", "GenerationGone"]


def test_a_fork_server_that_cannot_be_started_ends_the_attempt_with_the_cause(alone, monkeypatch):
    monkeypatch.setattr(preflight, "examine", lambda *_: [])
    monkeypatch.setattr(alone.agent, "_environ", {"LONG": "x" * (1 << 17)})

    async def scene() -> agents.AgentFailed:
        report_exceptions(alone.agent.fail)
        line, alone.agent._ranks = Line(), None
        serving = asyncio.create_task(alone.agent.serve(line))
        async with asyncio.timeout(20):
            while not line.of(agents.AgentFailed):
                await asyncio.sleep(0.01)
        line.say(agents.End(code=0))
        assert await serving == 0
        return line.of(agents.AgentFailed)[0]

    before = threading.excepthook
    try:
        reason = asyncio.run(scene()).reason
    finally:
        threading.excepthook, alone.agent._ranks = before, alone.ranks
    assert reason.startswith("the agent of n0 failed: OSError: [Errno 7] Argument list too long")


async def test_an_order_that_an_agent_cannot_carry_out_is_reported_before_it_leaves(alone, monkeypatch):
    fault = PreflightFault(check="GPUs", reason="0 GPU(s)", shared=False)
    monkeypatch.setattr(preflight, "examine", lambda *_: [fault])
    line, alone.agent._ranks = Line(), None
    serving = asyncio.create_task(alone.agent.serve(line))
    line.say(agents.AskStop(reason=StopReason.CANCEL, seconds="soon"))  # type: ignore[arg-type]
    alone.agent._ranks = alone.ranks
    await asyncio.wait([serving])
    assert isinstance(serving.exception(), TypeError)
    alone.agent._ranks = LocalRanks(1, range(2))  # the agent has closed the first ones
    assert [one.reason.split(" (")[0] for one in line.of(agents.AgentFailed)] == [
        "the agent of n0 failed: TypeError: unsupported operand type(s) for +: 'float' and 'str'"
    ]
