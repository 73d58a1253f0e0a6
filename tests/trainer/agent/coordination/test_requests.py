"""Requests to a live job, and what the coordinator answers."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage.durable import read_json
from tests.checkpointing.proofs.mounts import fill, small_tmpfs
from tests.trainer.agent.coordination.test_coordinator import Scene, hear, started
from tests.trainer.agent.fake_roster import FakePeer
from trainer.agent.attempt_state.attempt_state import GenerationState, RunningAttempt
from trainer.agent.control.tcp_transport import CoordinatorPeer
from trainer.agent.coordination.requests import RequestHandlers, newest_begun_save, newest_own_save
from trainer.protocol.command_progress import CommandCheckpointsConfig
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.recipe_config import ClusterShape
from trainer.protocol.events import EventKind, EventLog, read_events
from trainer.protocol.failures.outcome import AttemptOutcome, ExitCode, Failure, FailureKind
from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.heartbeat import AttemptStage
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.messages import agents
from trainer.protocol.messages.agents import Hello
from trainer.protocol.messages.ranks import Saves
from trainer.protocol.node_identity import NodeIdentity
from trainer.protocol.rank_progress.progress import StopReason
from trainer.protocol.requests import Request, RequestKind
from trainer.protocol.run_dir import RunDir


class Desk:
    """The handlers of an attempt whose second generation of two nodes is at step 7."""

    def __init__(self, folder: Path, **config: Any) -> None:
        run = RunDir(folder / "run-1")
        run.make()
        attempt = run.attempt(1)
        attempt.make()
        self.log = attempt.event_file("coordinator")
        self.events = EventLog(self.log, "coordinator", 1)
        self.state = RunningAttempt(
            run=run, attempt=attempt, config=JobConfig(cluster=ClusterShape(nodes=2, ranks_per_node=2), **config),
            identity=NodeIdentity(kind="slurm", job_id="7", node=0, nodes=2, name="n0"), events=self.events,
            token=LaunchToken(attempt=1, epoch=1, job_id="7", nonce="0badcafe"), started=time.monotonic(),
        )  # fmt: skip
        self.peers = [FakePeer(), FakePeer()]
        for node, peer in enumerate(self.peers):
            refusal = self.state.roster.admit(Hello(node=node, name=f"n{node}", attempt=1), peer)  # type: ignore[arg-type]
            assert not refusal
        self.state.generation = GenerationState(number=2)
        self.report(step=7)
        self.handlers = RequestHandlers(self.state)

    @property
    def told(self) -> list[agents.ToAgent]:
        """What every agent was sent."""
        assert self.peers[0].sent == self.peers[1].sent
        return self.peers[0].sent

    def report(self, **fields: Any) -> None:
        for member in self.state.roster.members.values():
            member.progress = agents.ProgressReport(generation=2, **fields)

    def ask(self, kind: RequestKind, **fields: Any) -> str | None:
        request = Request(**{"kind": kind, "attempt": 1, "reason": "why", "name": f"{kind}.001.abcd.json", **fields})
        return self.handlers.handle(request, now=50.0, wall=1000.0)

    def finished(self, now: float) -> list[tuple[str, str]]:
        return list(self.handlers.finished(now))


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    made = Desk(tmp_path)
    yield made
    made.events.close()


def test_a_stop_and_a_deadline(desk) -> None:
    assert desk.ask(RequestKind.STOP) == "the ranks were asked to save and stop"
    (order,) = desk.told
    assert isinstance(order, agents.AskStop)
    assert order.reason is StopReason.CANCEL
    (event,) = read_events(desk.log)[0]
    assert (event.kind, event.data["reason"]) == (EventKind.STOP_REQUESTED, "why")
    assert desk.ask(RequestKind.DEADLINE, value=1300.0) == "the job ends in 300 s"
    assert desk.state.stopping.end == 350.0
    started = desk.state.stopping._started
    answer = desk.ask(RequestKind.DEADLINE, value=1300.0 - 7200, detail="3600")
    assert desk.state.stopping.end == started + 3420.0
    assert answer.endswith(" s; this node's clock is off: by its time of day, the end would be in -6900 s")
    assert desk.ask(RequestKind.DEADLINE) == "refused: a deadline request needs a value"


def test_a_save_is_answered_when_it_is_there(desk) -> None:
    assert desk.ask(RequestKind.SAVE) is None
    assert isinstance(desk.told[0], agents.AskStop)
    desk.report(step=8, saved=7)
    assert desk.finished(51.0) == []
    desk.report(step=9, saved=9)
    assert desk.finished(52.0) == [("save.001.abcd.json", "saved at step 9")]
    assert desk.finished(53.0) == []


@pytest.mark.parametrize(("fields", "ranks"), [({}, None), ({"value": 2}, (2,)), ({"detail": "1"}, (2, 3))])
def test_stacks_are_answered_with_their_folder_when_all_have_written(desk, fields, ranks) -> None:
    assert desk.ask(RequestKind.STACKS, **fields) is None
    (order,) = desk.told
    assert isinstance(order, agents.CollectEvidence)
    assert (order.incident, order.full, order.generation) == ("attach-abcd", ranks, 2)
    collected = agents.EvidenceCollected(generation=2, incident="attach-abcd")
    desk.handlers.evidence_collected(0, collected)
    assert desk.finished(51.0) == []
    desk.handlers.evidence_collected(1, collected)
    assert desk.finished(51.0) == [("stacks.001.abcd.json", "attempts/001/evidence/attach-abcd")]


def test_stacks_of_a_node_that_never_answers_are_not_waited_for(desk) -> None:
    desk.ask(RequestKind.STACKS)
    assert desk.finished(55.0) == []
    assert [name for name, _ in desk.finished(62.0)] == ["stacks.001.abcd.json"]


@pytest.mark.parametrize("fields", [{"value": 4}, {"value": -1}, {"detail": "2"}, {"detail": "x"}])
def test_stacks_of_nobody_are_refused(desk, fields) -> None:
    assert desk.ask(RequestKind.STACKS, **fields) == "refused: no such rank or node"


def test_a_command_that_answers_requests_is_asked_to_save(tmp_path) -> None:
    desk = Desk(tmp_path, command=("true",))
    desk.report(step=7, answers=True)
    assert desk.ask(RequestKind.SAVE) is None
    (asked,) = desk.told
    assert asked == agents.AskStop(reason=StopReason.SAVE_AND_GO_ON, seconds=3600.0)
    assert desk.ask(RequestKind.STOP) == "the ranks were asked to save and stop"
    desk.events.close()


def test_a_program_that_has_not_saved_for_long_is_asked(tmp_path) -> None:
    desk = Desk(tmp_path, command=("true",), checkpoints=CommandCheckpointsConfig(save_minutes=10.0))
    desk.handlers.ask_due_save(100.0)
    desk.report(step=7, answers=True)
    for now in (110.0, 600.0, 699.0):
        desk.handlers.ask_due_save(now)
    assert desk.told == [], "counted since it answers"
    desk.handlers.ask_due_save(700.0)
    assert desk.told == [agents.AskStop(reason=StopReason.SAVE_AND_GO_ON, seconds=3600.0)]
    desk.report(step=9, answers=True, saved=8)
    for now in (800.0, 1300.0, 1399.0):
        desk.handlers.ask_due_save(now)
    assert len(desk.told) == 1, "its own save counts"
    desk.handlers.ask_due_save(1400.0)
    assert len(desk.told) == 2
    desk.state.request_stop(desk.state.stopping.on_request("why", 1401.0))
    desk.handlers.ask_due_save(9999.0)
    assert len(desk.told) == 3, "a stop saves anyway"
    desk.events.close()


def test_without_an_interval_a_program_is_never_asked(tmp_path) -> None:
    desk = Desk(tmp_path, command=("true",))
    desk.report(step=7, answers=True)
    for now in (0.0, 1e6):
        desk.handlers.ask_due_save(now)
    assert desk.told == []
    desk.events.close()


def test_of_a_command_neither_saves_nor_stacks(tmp_path) -> None:
    desk = Desk(tmp_path, command=("true",))
    assert "own command" in str(desk.ask(RequestKind.SAVE))
    assert "own command" in str(desk.ask(RequestKind.STACKS))
    assert desk.told == []
    desk.events.close()


def trains(desk: Desk) -> Desk:
    desk.state.stage = AttemptStage.RUNNING
    desk.report(step=7, stepped=True)
    return desk


def test_every_drill_has_its_own_number(desk) -> None:
    trains(desk)
    assert desk.ask(RequestKind.DRILL, detail="nan", value=1) == "nan strikes rank 1"
    desk.ask(RequestKind.DRILL, detail="nan", value=1)
    assert [order.serial for order in desk.told] == [1, 2]
    assert str(desk.ask(RequestKind.DRILL, detail="meteor")).startswith("refused: ")
    assert len(desk.told) == 2


def test_a_drill_waits_until_every_rank_of_the_generation_trains(desk) -> None:
    assert desk.ask(RequestKind.DRILL, detail="kill-rank", value=1) is None
    desk.state.stage = AttemptStage.RUNNING
    desk.report(step=7, stepped=True)
    desk.state.roster.members[1].progress = agents.ProgressReport(generation=2, step=7)
    assert desk.finished(51.0) == []
    desk.state.roster.members[1].progress = agents.ProgressReport(generation=1, stepped=True)
    assert desk.finished(52.0) == [], "that was the generation before"
    assert desk.told == []
    trains(desk)
    assert desk.finished(53.0) == [("drill.001.abcd.json", "kill-rank strikes rank 1")]
    assert [(order.kind, order.generation) for order in desk.told] == [("kill-rank", 2)]
    assert desk.finished(54.0) == []


def test_a_drill_that_comes_when_an_earlier_one_can_strike_takes_no_answer_from_it(desk) -> None:
    assert desk.ask(RequestKind.DRILL, detail="kill-rank", value=1, name="drill.001.1111.json") is None
    trains(desk)
    assert desk.ask(RequestKind.DRILL, detail="nan", value=1) is None
    assert [name for name, _ in desk.finished(51.0)] == ["drill.001.1111.json", "drill.001.abcd.json"]


def test_a_drill_hits_no_generation_that_has_just_failed(desk) -> None:
    trains(desk)
    desk.state.fail(Failure(kind=FailureKind.HANG, reason="rank 1 hangs"))
    assert desk.ask(RequestKind.DRILL, detail="kill-rank", value=1) is None
    assert desk.finished(51.0) == []


def test_a_drill_of_a_command_needs_no_step(tmp_path) -> None:
    desk = Desk(tmp_path, command=("true",))
    desk.state.stage = AttemptStage.RUNNING
    assert desk.ask(RequestKind.DRILL, detail="kill-rank", value=1) == "kill-rank strikes rank 1"
    desk.events.close()


def test_a_job_that_stops_is_not_hit(desk) -> None:
    trains(desk)
    desk.ask(RequestKind.STOP)
    assert desk.ask(RequestKind.DRILL, detail="kill-rank", value=1) == "refused: the job is being stopped"


@pytest.mark.parametrize(("kind", "behind"), [("kill-rank", "kill-rank"), ("slow-rank", "")])
def test_what_follows_a_drill_is_attributed_to_it(desk, kind, behind) -> None:
    trains(desk)
    desk.ask(RequestKind.DRILL, detail=kind, value=1)
    killed = Failure(kind=FailureKind.RANK_KILLED, reason="killed", rank=1, node="n0", signal=9)
    found = desk.state.with_drill(killed)
    assert (found.drill, desk.state.situation(None).drill) == (behind, behind)
    limit = desk.state.with_drill(Failure(kind=FailureKind.TIME_LIMIT, reason="the time limit"))
    assert limit.drill == ""
    desk.state.begin_generation()
    after = desk.state.with_drill(killed)
    assert after.drill == "", "the next generation fails by itself"


SAVE = StopReason.SAVE_AND_GO_ON


def at(**fields: int) -> agents.ProgressReport:
    return agents.ProgressReport(generation=1, **fields)


def asked(scene: Scene) -> None:
    Request(kind=RequestKind.SAVE, attempt=1, reason="?").write(scene.run.requests)


def stands(peers: list[CoordinatorPeer], generation: int, step: int, saved: int, restored: int = 0) -> None:
    for peer in peers:
        peer.send(agents.ProgressReport(generation=generation, step=step, saved=saved, restored=restored, stepped=True))


async def answers(scene: Scene, peer: CoordinatorPeer, pings: int) -> list[str]:
    """What was answered, at the latest so many seconds from now."""
    for _ in range(pings):
        if scene.events(EventKind.REQUEST_ANSWERED):
            break
        await hear(peer, agents.Ping)
    return [event.data["answer"] for event in scene.events(EventKind.REQUEST_ANSWERED)]


async def known(scene: Scene, peer: CoordinatorPeer, step: int) -> None:
    while any(member.progress.step != step for member in scene.state.roster.members.values()):
        await hear(peer, agents.Ping)


async def test_a_save_that_is_under_way_when_one_is_asked_for_is_not_the_answer(tmp_path: Path) -> None:
    async with Scene(tmp_path).led() as scene:
        peers = await started(scene)
        stands(peers, 1, step=1000, saved=800)
        await known(scene, peers[0], 1000)
        asked(scene)
        assert (await hear(peers[1], agents.AskStop)).reason == SAVE
        stands(peers, 1, step=1001, saved=900)
        assert await answers(scene, peers[0], 3) == []
        stands(peers, 1, step=1003, saved=1002)
        assert await answers(scene, peers[0], 5) == ["saved at step 1002"]


async def test_ranks_that_start_after_a_save_was_asked_for_hear_of_it(tmp_path: Path) -> None:
    async with Scene(tmp_path).led() as scene:
        peers = [await scene.join(0), await scene.join(1, ready=False)]
        asked(scene)
        await hear(peers[0], agents.AskStop)
        peers[1].send(agents.Ready(warm=True))
        for generation in (1, 2):
            await hear(peers[1], agents.StartGeneration)
            assert (await hear(peers[1], agents.AskStop)).reason == SAVE
            # What an attempt begins with is no answer, nor is what was found after a restart.
            stands(peers, generation, step=900, saved=900, restored=900)
            assert await answers(scene, peers[0], 2) == []
            if generation == 1:
                stands(peers, 1, step=1000, saved=900, restored=900)
                peers[0].send(RankEnd(generation=1, rank=0, step=1000, exit_code=None, signal=9, reported=False))
                for peer in peers:
                    peer.send(agents.GenerationGone(generation=1))
        stands(peers, 2, step=902, saved=901, restored=900)
        assert await answers(scene, peers[0], 5) == ["saved at step 901"]


@pytest.mark.parametrize(
    ("reports", "total", "step"),
    [([], 0, 0), ([at(step=5), at(step=6, saved=4)], 0, 6), ([at(step=6)], 9, 6), ([at(step=9)], 9, 8)],
)
def test_the_step_that_the_run_stands_at_may_be_in_a_save_already_but_for_the_last(reports, total, step):
    assert newest_begun_save(reports, total) == step


def test_what_was_found_was_not_saved_anew():
    assert newest_own_save([at(saved=5), at(saved=0)], 5) == 0
    assert newest_own_save([at(saved=6), at()], 5) == 6
    assert newest_own_save([], 0) == 0


HANGS, FULL = "saves failing since step 7: it hangs", "saves failing since step 5: disk full (/r)"


async def begun(scene: Scene) -> list[CoordinatorPeer]:
    peers = await started(scene)
    await heard(scene, "")
    return peers


async def heard(scene: Scene, words: str) -> None:
    """Until the heartbeat says this of the saves."""
    async with asyncio.timeout(10):
        while not scene.attempt.heartbeat.exists() or read_json(scene.attempt.heartbeat)["saves_failing"] != words:
            await asyncio.sleep(0.02)


async def test_saves_that_fail_stand_in_the_heartbeat_until_one_works(tmp_path: Path) -> None:
    async with Scene(tmp_path).led() as scene:
        peers = await begun(scene)
        peers[1].send(agents.RankSaves(generation=1, rank=3, saves=Saves(reason=HANGS, size=0)))
        await heard(scene, HANGS)
        peers[0].send(agents.RankSaves(generation=1, rank=0, saves=Saves(reason=FULL, size=2048)))
        await heard(scene, FULL)
        peers[0].send(agents.RankSaves(generation=1, rank=0, saves=Saves(reason="", size=2048)))
        await heard(scene, "")


def test_an_attempt_that_ends_on_a_full_disk_keeps_its_outcome(tmp_path: Path) -> None:
    async def script(folder: Path) -> None:
        async with Scene(folder).led() as scene:
            peers = await begun(scene)
            fill(folder)
            peers[0].send(agents.RankSaves(generation=1, rank=0, saves=Saves(reason=FULL, size=4096)))
            await heard(scene, FULL)
            said = {"exception": "SaveFailed", "message": "the last checkpoint was not saved", "secondary": False}
            for rank, peer in enumerate(peers):
                end = {"step": 9, "exit_code": 1, "signal": None, "reported": True, **said}
                peer.send(RankEnd(generation=1, rank=rank, **end))
                peer.send(agents.GenerationGone(generation=1))
            assert (await hear(peers[1], agents.End)).code == ExitCode.STORAGE
            failure = AttemptOutcome.read(scene.attempt.outcome).failure
            assert (failure.kind, failure.room) == (FailureKind.STORAGE, 4096)

    with small_tmpfs(tmp_path / "disk", "1m") as folder:
        asyncio.run(script(folder))
