"""Requests to a live job, and what the coordinator answers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer.agent.coordination.request_handlers import RequestHandlers
from trainer.agent.coordination.request_inbox import RequestInbox
from trainer.contract.config import ClusterShape, JobConfig
from trainer.contract.requests import Request, RequestKind
from trainer.contract.run_dir import RunDir


class Desk:
    """The coordinator's answers, without a coordinator."""

    def __init__(self, folder: Path, **config: Any) -> None:
        self.told: list[tuple[str, dict[str, Any]]] = []
        self.stopping = SimpleNamespace(stop=None, asked=lambda reason, now: "stop", correct=self.correct)
        self.stops: list[Any] = []
        members = [SimpleNamespace(node=0), SimpleNamespace(node=1)]
        roster = SimpleNamespace(
            broadcast=lambda say, **fields: self.told.append((say, fields)), training_members=lambda: members
        )
        shape = ClusterShape(nodes=2, ranks_per_node=2)
        run = RunDir(folder / "run-1")
        self.handlers = RequestHandlers(
            JobConfig(cluster=shape, **config), attempt=run.attempt(1), stopping=self.stopping,  # type: ignore[arg-type]
            request_inbox=RequestInbox(run.requests, 1, lambda *_: None), ask_stop=self.stops.append,
            roster=roster, wall=lambda: 1000.0,  # type: ignore[arg-type]
        )  # fmt: skip
        self.corrected = 0.0

    def correct(self, end: float) -> None:
        self.corrected = end

    def ask(self, kind: RequestKind, **fields: Any) -> str | None:
        request = Request(kind=kind, attempt=1, reason="why", name=f"{kind}.001.abcd.json", **fields)
        return self.handlers.to(request, 50.0, begun=7, generation=2)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_a_stop_and_a_deadline(desk) -> None:
    assert desk.ask(RequestKind.STOP) == "the ranks are told to save and stop"
    assert desk.stops == ["stop"]
    assert desk.ask(RequestKind.DEADLINE, value=1300.0) == "the job ends in 300 s"
    assert desk.corrected == 350.0
    assert desk.ask(RequestKind.DEADLINE) == "refused: a deadline request needs a value"


def test_a_save_is_answered_when_it_is_there(desk) -> None:
    assert desk.ask(RequestKind.SAVE) is None
    assert desk.told[0][0] == "ask"
    assert list(desk.handlers.late(51.0, 7)) == []
    assert list(desk.handlers.late(52.0, 9)) == [("save.001.abcd.json", "saved at step 9")]
    assert list(desk.handlers.late(53.0, 9)) == []


@pytest.mark.parametrize(("fields", "ranks"), [({}, [0, 1, 2, 3]), ({"value": 2}, [2]), ({"detail": "1"}, [2, 3])])
def test_stacks_are_answered_with_their_folder_when_all_have_written(desk, fields, ranks) -> None:
    assert desk.ask(RequestKind.STACKS, **fields) is None
    ((say, order),) = desk.told
    assert (say, order["incident"], order["full"], order["generation"]) == ("evidence", "attach-abcd", ranks, 2)
    desk.handlers.evidence_collected(0, {"incident": "attach-abcd"})
    assert list(desk.handlers.late(51.0, 7)) == []
    desk.handlers.evidence_collected(1, {"incident": "attach-abcd"})
    assert list(desk.handlers.late(51.0, 7)) == [("stacks.001.abcd.json", "attempts/001/evidence/attach-abcd")]


def test_stacks_of_a_node_that_never_answers_are_not_waited_for(desk) -> None:
    desk.ask(RequestKind.STACKS)
    assert list(desk.handlers.late(55.0, 7)) == []
    assert [name for name, _ in desk.handlers.late(62.0, 7)] == ["stacks.001.abcd.json"]


@pytest.mark.parametrize("fields", [{"value": 4}, {"value": -1}, {"detail": "2"}, {"detail": "x"}])
def test_stacks_of_nobody_are_refused(desk, fields) -> None:
    assert desk.ask(RequestKind.STACKS, **fields) == "refused: there is no such rank or node"


def test_of_a_command_neither_saves_nor_stacks(tmp_path) -> None:
    desk = Desk(tmp_path, command=("true",))
    assert "own command" in str(desk.ask(RequestKind.SAVE))
    assert "own command" in str(desk.ask(RequestKind.STACKS))


def test_every_drill_has_its_own_number(desk) -> None:
    assert desk.ask(RequestKind.DRILL, detail="nan", value=1) == "nan strikes rank 1"
    desk.ask(RequestKind.DRILL, detail="nan", value=1)
    assert [fields["serial"] for _, fields in desk.told] == [1, 2]
    assert str(desk.ask(RequestKind.DRILL, detail="meteor")).startswith("refused: ")
    assert len(desk.told) == 2
