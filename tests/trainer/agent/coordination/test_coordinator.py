"""The coordinator alone: agents that the test plays, files that answer late."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest

from trainer.agent.attempt_state.attempt_state import RunningAttempt, Timeouts
from trainer.agent.attempt_state.published_files import AttemptProgress, Outbox
from trainer.agent.control.tcp_transport import CoordinatorPeer, connect
from trainer.agent.coordination.coordinator import Coordinator
from trainer.agent.ladder.in_job_policy import record_skip
from trainer.agent.main import NonBlockingEventLog
from trainer.protocol import skipped_batches
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.recipe_config import ClusterShape
from trainer.protocol.events import Event, EventKind, EventLog, read_events
from trainer.protocol.failures.outcome import AttemptOutcome, Failure, FailureKind
from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.heartbeat import Heartbeat
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.logs.line_file import LineFile
from trainer.protocol.messages import agents
from trainer.protocol.messages.agents import PROTOCOL, Hello
from trainer.protocol.node_identity import NodeIdentity
from trainer.protocol.requests import Request, RequestKind
from trainer.protocol.run_dir import RunDir
from trainer.protocol.skipped_batches import Skip

M = TypeVar("M")


class Scene:
    """One coordinator of two nodes and the agents that have joined it."""

    def __init__(
        self, folder: Path, spares: int = 0, log: type[EventLog] = EventLog, checkpoints: tuple[str, ...] = (),
        **timeouts: float,
    ) -> None:  # fmt: skip
        self.run = RunDir(folder / "run-1")
        self.run.make()
        self.attempt = self.run.attempt(1)
        self.attempt.make()
        self._token = LaunchToken(attempt=1, epoch=1, job_id="7", nonce="0badcafe", checkpoints=checkpoints)
        self._token.write(self.attempt.go)
        self._events = log(self.attempt.event_file("coordinator"), "coordinator", 1)
        self.state = RunningAttempt(
            run=self.run, attempt=self.attempt, config=JobConfig(cluster=ClusterShape(nodes=2, spare_nodes=spares)),
            identity=NodeIdentity(kind="slurm", job_id="7", node=0, nodes=2 + spares, name="n0"), events=self._events,
            token=self._token, started=time.monotonic(), timeouts=Timeouts(**timeouts),
        )  # fmt: skip
        self.leader = Coordinator(self.state)
        self._found: dict[str, Any] = {}
        self._peers: list[CoordinatorPeer] = []
        self.leading: asyncio.Task[int]

    @asynccontextmanager
    async def led(self) -> AsyncIterator["Scene"]:
        self._found = await self.leader.open("127.0.0.1")
        self.leading = asyncio.get_running_loop().create_task(self.leader.run())
        try:
            yield self
        finally:
            for peer in self._peers:
                await peer.close()
            self.leading.cancel()
            await asyncio.gather(self.leading, return_exceptions=True)
            self._events.close()

    async def join(self, node: int, *, fit: bool = True, ready: bool = True) -> CoordinatorPeer:
        hello = Hello(protocol=PROTOCOL, node=node, name=f"n{node}", attempt=1)
        peer = await connect(self._found["host"], self._found["port"], self._found["token"], hello)
        self._peers.append(peer)
        if fit:
            peer.send(agents.PreflightReport(faults=()))
        if ready:
            peer.send(agents.Ready(warm=True))
        return peer

    def events(self, kind: EventKind) -> list[Event]:
        return [event for event in read_events(self.attempt.event_file("coordinator"))[0] if event.kind == kind]


async def hear(peer: CoordinatorPeer, kind: type[M], seconds: float = 10.0) -> M:
    """The next message of this kind."""
    async with asyncio.timeout(seconds):
        while (message := await peer.receive()) is not None:
            if isinstance(message, kind):
                return message
    raise AssertionError(f"the coordinator hung up before it said {kind.__name__}")


async def started(scene: Scene) -> list[CoordinatorPeer]:
    """Let both nodes join, and wait until the first generation starts."""
    peers = [await scene.join(node) for node in (0, 1)]
    for peer in peers:
        await hear(peer, agents.StartGeneration)
    return peers


async def test_agents_hear_from_a_coordinator_whose_file_system_hangs(tmp_path, monkeypatch):
    back = threading.Event()
    monkeypatch.setattr(Heartbeat, "write", lambda *_: back.wait(20))
    monkeypatch.setattr(LineFile, "append", lambda *_: back.wait(20))

    async with Scene(tmp_path, log=NonBlockingEventLog).led() as scene:
        peer = await scene.join(1)
        try:
            for _ in range(3):
                await hear(peer, agents.Ping, 5)
        finally:
            back.set()


@pytest.mark.parametrize("hung", ["heartbeat", "outcome", "events", "all"])
async def test_agents_are_told_to_end_although_the_run_directory_hangs(tmp_path, monkeypatch, hung):
    back = threading.Event()
    writes = (("heartbeat", Heartbeat, "write"), ("outcome", AttemptOutcome, "write"), ("events", LineFile, "append"))
    for name, what, how in writes:
        if hung in (name, "all"):
            monkeypatch.setattr(what, how, lambda *_: back.wait(60))

    async with Scene(tmp_path, log=NonBlockingEventLog, heartbeat=0.5, outcome=0.5).led() as scene:
        peers = await started(scene)
        await leave(peers, 78)
        try:
            assert (await hear(peers[1], agents.End)).code == 78
            for peer in peers:
                await peer.close()
            assert await asyncio.wait_for(scene.leading, 10) == 78
        finally:
            back.set()


async def leave(peers: list[CoordinatorPeer], exit_code: int, generation: int = 1) -> None:
    """All ranks end, and nothing of them is left."""
    for rank, peer in enumerate(peers):
        peer.send(RankEnd(generation=generation, rank=rank, step=3, exit_code=exit_code, signal=None, reported=True))
        peer.send(agents.GenerationGone(generation=generation))


async def test_heartbeats_never_overtake_one_another_and_the_last_one_stands(tmp_path, monkeypatch):
    slow, written = threading.Event(), []

    def write(beat: Heartbeat, path: Path) -> None:
        if beat.seq == 1:
            slow.wait(10)
        written.append(beat.seq)

    monkeypatch.setattr(Heartbeat, "write", write)
    standing = AttemptProgress(1, "7", time.time)

    keeper = Outbox(RunDir(tmp_path).attempt(1), heartbeat=0.2, outcome=10.0)
    for _ in range(3):  # the second and the third are left out
        await keeper.publish_status(lambda: (standing.beat(generation=1, nodes=[], state="running"), None))
    slow.set()
    await keeper.publish_status(lambda: (standing.beat(generation=1, nodes=[], state="ended"), None))
    assert written == [1, 2]


def test_a_batch_is_left_out_although_that_cannot_be_written_down_in_time(tmp_path, monkeypatch):
    back = threading.Event()
    monkeypatch.setattr(skipped_batches, "add", lambda *_: back.wait(60))
    log = EventLog(tmp_path / "events.jsonl", "coordinator", 1)
    one = Skip(step=3, position=24, reason="loss nan")
    try:
        asyncio.run(asyncio.wait_for(record_skip(one, RunDir(tmp_path).attempt(1), log, seconds=0.2), 5))
    finally:
        back.set()
        log.close()
    assert [event.data["position"] for event in read_events(tmp_path / "events.jsonl")[0]] == [24]


async def test_an_attempt_began_with_the_first_process_of_its_job(tmp_path):
    seen = []

    async with Scene(tmp_path).led() as scene:
        peers = await started(scene)
        seen.extend(scene.events(EventKind.ATTEMPT_STARTED))
        await leave(peers, 0)
    (event,) = seen
    began = event.data["began"]
    assert abs(began - psutil.Process().create_time()) < 1.5  # the kernel's boot time has whole seconds
    assert began < event.time


async def test_a_save_that_is_asked_for_after_a_stop_is_answered_by_the_stop(tmp_path):
    async with Scene(tmp_path).led() as scene:
        peers = await started(scene)
        Request(kind=RequestKind.STOP, attempt=1, reason="enough").write(scene.run.requests)
        await hear(peers[1], agents.AskStop)
        name = Request(kind=RequestKind.SAVE, attempt=1, reason="?").write(scene.run.requests)
        while not (answers := [e for e in scene.events(EventKind.REQUEST_ANSWERED) if e.data["name"] == name]):
            await hear(peers[1], agents.Ping)
        assert answers[0].data["answer"] == "a stop with a save is under way"


@pytest.mark.parametrize(
    ("timeout", "says", "words"),
    [
        ("preflight", {"fit": False}, "n1 was not examined within"),
        ("ready", {"ready": False}, "n1 had no fork server ready within"),
    ],
)
async def test_a_node_that_does_not_answer_is_not_taken_for_fit_and_is_named(tmp_path, timeout, says, words):
    async with Scene(tmp_path, **{timeout: 1.5}).led() as scene:
        await scene.join(0)
        await scene.join(1, **says)
        assert await asyncio.wait_for(scene.leading, 15) == 75
        outcome = AttemptOutcome.read(scene.attempt.outcome)
        assert words in outcome.reason
        assert outcome.failure.node == "n1"


async def test_agents_hear_when_a_stop_is_due_and_save_times_bring_it_forward(tmp_path):
    async with Scene(tmp_path).led() as scene:
        peers = [await scene.join(node) for node in (0, 1)]
        started = await hear(peers[1], agents.StartGeneration)
        assert started.suspects == ()
        # An hour by default, 120 s of lead, 60 s by which Slurm's signal may be early.
        assert (await hear(peers[1], agents.ExpectStop)).seconds == pytest.approx(3600 - 180, abs=15)
        peers[0].send(agents.ProgressReport(generation=1, step=3, save_seconds=600.0, step_seconds=10.0))
        assert (await hear(peers[1], agents.ExpectStop)).seconds == pytest.approx(3600 - 5 - 60 - 20 - 600, abs=15)


async def test_a_generation_after_a_doubted_checkpoint_is_told_to_leave_it_out(tmp_path):
    async with Scene(tmp_path).led() as scene:
        peers = [await scene.join(node) for node in (0, 1)]
        for generation in (1, 2, 3, 4):
            started = await hear(peers[1], agents.StartGeneration)
            assert (started.generation, started.suspects) == (generation, (100,) if generation == 3 else ())
            restored = 90 if generation == 3 else 100
            saved = 100  # in the third generation anew
            peers[1].send(
                agents.ProgressReport(generation=generation, step=103, restored=restored, saved=saved, stepped=True)
            )
            for rank, peer in enumerate(peers):
                peer.send(
                    RankEnd(generation=generation, rank=rank, step=103, exit_code=None, signal=11, reported=False)
                )
            for peer in peers:
                peer.send(agents.GenerationGone(generation=generation))
        (event,) = scene.events(EventKind.CHECKPOINT_SUSPECT)
        assert event.data["step"] == 100


@pytest.mark.parametrize(
    ("checkpoints", "restored", "again"),
    [
        ((), 0, False),
        (("step-00000000.000-0badcafe",), 0, False),  # brought in from elsewhere: of this run nothing has worked yet
        (("step-00000400.001-0badcafe",), 0, True),
        ((), 400, True),
    ],
)
async def test_an_exception_at_the_start_is_tried_again_when_the_run_has_trained_before(
    tmp_path, checkpoints, restored, again
):
    async with Scene(tmp_path, checkpoints=checkpoints).led() as scene:
        peers = [await scene.join(node) for node in (0, 1)]
        raised = {
            "step": restored,
            "exit_code": 1,
            "signal": None,
            "exception": "KeyError",
            "message": "?",
            "reported": True,
        }
        for generation in (1, 2) if again else (1,):
            assert (await hear(peers[1], agents.StartGeneration)).generation == generation
            for rank, peer in enumerate(peers):
                peer.send(agents.ProgressReport(generation=generation, step=restored, restored=restored, stepped=False))
                peer.send(RankEnd(generation=generation, rank=rank, **raised))
                peer.send(agents.GenerationGone(generation=generation))
        assert await asyncio.wait_for(scene.leading, 15) == 78
        words = f"for the second time at step {restored}" if again else "before the first step"
        assert words in AttemptOutcome.read(scene.attempt.outcome).reason


@pytest.mark.parametrize("first", ["broken", "hang"])
async def test_a_node_that_gets_no_fork_server_after_a_restart_was_decided_ends_the_attempt(tmp_path, first):
    async with Scene(tmp_path).led() as scene:
        peers = await started(scene)
        if first == "hang":
            scene.state.fail(Failure(kind=FailureKind.HANG, reason="rank 1 on n1 stopped first", node="n1"))
        peers[1].send(agents.Unready(reason="killed"))
        if first == "broken":
            peers[1].send(agents.ForkServerDied(generation=1, reason="killed"))
        await leave(peers, 1)
        while not scene.events(EventKind.GENERATION_ENDED):
            await hear(peers[0], agents.Ping)
        peers[1].send(agents.AgentFailed(reason="its fork server died 3 times in a row"))
        assert await asyncio.wait_for(scene.leading, 15) == 75
        failure = AttemptOutcome.read(scene.attempt.outcome).failure
        assert (failure.node, failure.reason) == ("n1", "its fork server died 3 times in a row")


async def test_a_reason_of_any_length_reaches_the_agents(tmp_path):
    async with Scene(tmp_path).led() as scene:
        peers = await started(scene)
        scene.state.fail(Failure(kind=FailureKind.DESYNC, reason="rank 0 called \u2026" * 10_000))
        await hear(peers[1], agents.KillGeneration)
        for peer in peers:
            peer.send(agents.GenerationGone(generation=1))
        end = await hear(peers[1], agents.End)
        assert (end.code, len(end.reason)) == (78, 2000)
        assert AttemptOutcome.read(scene.attempt.outcome).reason == end.reason
        assert end.reason.endswith("...")


async def die_stuck(scene: Scene, peers: list[CoordinatorPeer], stop: bool = False) -> None:
    """A rank of n0 is killed, and n1 never says that nothing of it is left."""
    await hear(peers[1], agents.StartGeneration)
    if stop:
        Request(kind=RequestKind.STOP, attempt=1, reason="enough").write(scene.run.requests)
        await hear(peers[1], agents.AskStop)
    peers[0].send(RankEnd(generation=1, rank=0, step=3, exit_code=None, signal=9, reported=False))
    await hear(peers[0], agents.KillGeneration)
    peers[0].send(agents.GenerationGone(generation=1))


async def test_a_spare_takes_the_place_of_a_node_on_which_a_rank_cannot_be_killed(tmp_path):

    async with Scene(tmp_path, spares=1, kill=1.0).led() as scene:
        peers = [await scene.join(node) for node in (0, 1, 2)]
        await die_stuck(scene, peers)
        start = await hear(peers[2], agents.StartGeneration, 10)
        assert (start.generation, start.node_rank) == (2, 1)
        (used,) = scene.events(EventKind.SPARE_USED)
        assert (used.data["name"], used.data["instead"]) == ("n2", "n1")
        assert (used.data["reason"], used.data["kind"]) == (
            "n1: its ranks could not be killed within 1 s",
            "node_suspect",
        )


@pytest.mark.parametrize("stop", [False, True])
async def test_without_a_spare_or_time_the_node_on_which_a_rank_cannot_be_killed_is_named(tmp_path, stop):

    async with Scene(tmp_path, spares=int(stop), kill=1.0).led() as scene:
        peers = [await scene.join(node) for node in (range(3) if stop else range(2))]
        await die_stuck(scene, peers, stop)
        assert await asyncio.wait_for(scene.leading, 15) == 77
        outcome = AttemptOutcome.read(scene.attempt.outcome)
        assert (outcome.failure.kind, outcome.failure.node) == (FailureKind.NODE_SUSPECT, "n1")
        assert "rank 0 on n0 was killed by SIGKILL" in outcome.reason
        assert "n1: its ranks could not be killed within 1 s" in outcome.reason


async def test_a_blamed_node_whose_rank_cannot_be_killed_does_not_hold_up_the_spare(tmp_path):
    async with Scene(tmp_path, spares=1).led() as scene:
        peers = [await scene.join(node) for node in (0, 1, 2)]
        await hear(peers[0], agents.StartGeneration)
        blamed = Failure(kind=FailureKind.NODE_SUSPECT, reason="n1: slow", node="n1")
        scene.state.fail(blamed)
        await hear(peers[0], agents.KillGeneration)
        peers[0].send(agents.GenerationGone(generation=1))  # n1 says nothing: its rank is in a driver for ever
        assert (await hear(peers[2], agents.StartGeneration, 5)).node_rank == 1
        (used,) = scene.events(EventKind.SPARE_USED)
        assert (used.data["name"], used.data["instead"]) == ("n2", "n1")


@pytest.mark.parametrize(
    ("error", "kind"), [(ZeroDivisionError("its own"), "unknown"), (OSError(28, "full"), "storage")]
)
async def test_an_exception_of_the_coordinator_ends_the_attempt_and_is_its_cause(tmp_path, monkeypatch, error, kind):
    async with Scene(tmp_path).led() as scene:

        def fail() -> None:
            raise error

        peers = [await scene.join(node) for node in range(2)]
        monkeypatch.setattr(scene.leader._monitor, "check", fail)
        end = await hear(peers[1], agents.End)
        for peer in peers:
            await peer.close()
        await asyncio.wait_for(scene.leading, 10)
        outcome = AttemptOutcome.read(scene.attempt.outcome)
        assert outcome.failure.kind == kind
        assert outcome.reason == end.reason
        assert f"the coordinator failed: {type(error).__name__}: " in outcome.reason


async def test_an_agent_that_reports_its_own_failure_and_leaves_is_lost_for_that_cause(tmp_path):
    async with Scene(tmp_path).led() as scene:
        peers = await started(scene)
        peers[1].send(agents.AgentFailed(reason="the agent of n1 failed: KeyError: 7"))
        await peers[1].close()
        await hear(peers[0], agents.KillGeneration)
        peers[0].send(agents.GenerationGone(generation=1))
        end = await hear(peers[0], agents.End)
        await peers[0].close()
        assert "the agent of n1 failed: KeyError: 7" in end.reason
        await asyncio.wait_for(scene.leading, 10)
