"""Requests to a live job, and what the coordinator answers."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer.agent.attempt_state.attempt_state import AttemptState, GenerationState
from trainer.agent.coordination.requests import RequestHandlers
from trainer.protocol.config import JobConfig
from trainer.protocol.config_sections.recipe_config import ClusterShape
from trainer.protocol.events import EventKind, EventLog, read_events
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.heartbeat import AttemptStage
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.messages import agents
from trainer.protocol.messages.agents import Hello
from trainer.protocol.node_identity import NodeIdentity
from trainer.protocol.rank_progress.progress import StopReason
from trainer.protocol.requests import Request, RequestKind
from trainer.protocol.run_dir import RunDir


class FakePeer:
    """An agent's connection: remembers what was sent."""

    def __init__(self) -> None:
        self.sent: list[agents.ToAgent] = []

    def send(self, message: agents.ToAgent) -> None:
        self.sent.append(message)


class Desk:
    """The handlers of an attempt whose second generation of two nodes is at step 7."""

    def __init__(self, folder: Path, **config: Any) -> None:
        run = RunDir(folder / "run-1")
        run.make()
        attempt = run.attempt(1)
        attempt.make()
        self.log = attempt.event_file("coordinator")
        self.events = EventLog(self.log, "coordinator", 1)
        self.state = AttemptState(
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
        request = Request(kind=kind, attempt=1, reason="why", name=f"{kind}.001.abcd.json", **fields)
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
    assert answer.endswith(" s; the clock of this node is off: by its time of day it would be in -6900 s")
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
    assert desk.ask(RequestKind.STACKS, **fields) == "refused: there is no such rank or node"


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
    assert found is not None
    assert (found.drill, desk.state.situation(None).drill) == (behind, behind)
    limit = desk.state.with_drill(Failure(kind=FailureKind.TIME_LIMIT, reason="the time limit"))
    assert limit is not None
    assert limit.drill == ""
    desk.state.begin_generation()
    after = desk.state.with_drill(killed)
    assert after is not None
    assert after.drill == "", "the next generation fails by itself"
