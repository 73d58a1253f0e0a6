"""Spares that replace lost, blamed and stuck nodes: the real roster, with agents that only listen."""

from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.agent.fake_roster import make_roster
from trainer.agent.ladder.spare_nodes import can_replace, left_behind, replace, replace_unkillable_nodes
from trainer.protocol.events import EventKind, EventLog, read_events
from trainer.protocol.failures.decision import Action, Decision
from trainer.protocol.failures.outcome import Culprit, Failure, FailureKind

LOST = Failure(kind=FailureKind.AGENT_LOST, reason="the agent of n1 is lost", node="n1")
UNFIT = Failure(kind=FailureKind.NODE_SUSPECT, reason="n1 is slow", node="n1", step=7)
HANG = Failure(kind=FailureKind.HANG, reason="rank 1 stopped first", node="n1", step=7)


class Scene:
    def __init__(self, folder: Path, **shape: int) -> None:
        self.path, self.roster = folder / "events.jsonl", make_roster(**{"nodes": 4, **shape})
        self.events = EventLog(self.path, "coordinator", 1)

    def replaces(self, failure: Failure, *, drill: str = "", **fields: Any) -> Decision | None:
        decision = Decision(action=Action.REPLACE, reason="so it is", failure=failure, **fields)
        return replace(decision, self.roster, self.events, drill=drill)

    def told(self) -> list[dict[str, Any]]:
        return [event.data for event in read_events(self.path)[0] if event.kind == EventKind.SPARE_USED]


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def test_a_lost_node_is_replaced_by_a_spare(scene: Scene) -> None:
    scene.roster.members[1].lost = "reset"
    assert scene.replaces(LOST) is None
    assert scene.roster.node_ranks == {0: 0, 1: 2}
    (told,) = scene.told()
    assert told == {"node": 2, "name": "n2", "instead": "n1", "reason": LOST.reason, "kind": "agent_lost"}
    assert scene.roster.members[1].excluded == "", "it is gone by itself"


def test_a_blamed_node_is_excluded_and_replaced(scene: Scene) -> None:
    assert scene.replaces(UNFIT, drill="slow-rank") is None
    assert scene.roster.members[1].excluded == "n1 is slow"
    (told,) = scene.told()
    assert (told["reason"], told["kind"], told["drill"]) == ("n1 is slow", "node_suspect", "slow-rank")
    assert [type(message).__name__ for message in scene.roster.members[2].peer.sent] == ["NodeRank"]


def test_only_the_nodes_that_the_decision_names_are_excluded(scene: Scene) -> None:
    culprits = tuple(Culprit(rank=rank, node=f"n{rank}", kind="hang", reason="") for rank in (0, 1))
    both = changed(HANG, node="n0", culprits=culprits)
    assert scene.replaces(both, lost=("n1",)) is None
    assert [member.excluded for member in scene.roster.members.values()] == ["", HANG.reason, "", ""]


def test_each_replaced_node_has_its_own_reason_and_kind(tmp_path: Path) -> None:
    scene = Scene(tmp_path, nodes=6, node_ranks=3)
    scene.roster.members[0].faults = []
    scene.roster.members[2].lost = "its connection ended"
    assert scene.replaces(UNFIT) is None
    assert {told["instead"]: (told["kind"], told["reason"]) for told in scene.told()} == {
        "n1": ("node_suspect", "n1 is slow"), "n2": ("agent_lost", "n1 is slow"),
    }  # fmt: skip
    stuck = Scene(tmp_path / "b", nodes=6, node_ranks=3) if (tmp_path / "b").mkdir() is None else scene
    stuck.roster.members[2].excluded = "cannot be killed"
    assert stuck.replaces(UNFIT) is None
    assert {told["instead"]: (told["kind"], told["reason"]) for told in stuck.told()} == {
        "n1": ("node_suspect", "n1 is slow"), "n2": ("node_suspect", "cannot be killed"),
    }  # fmt: skip


def test_without_a_spare_the_attempt_ends_with_the_failure(tmp_path: Path) -> None:
    scene = Scene(tmp_path, nodes=2, node_ranks=2)
    scene.roster.members[1].lost = "reset"
    decision = scene.replaces(LOST)
    assert (decision.action, decision.failure) == (Action.END, LOST)
    assert decision.reason.startswith("so it is; ")
    assert scene.told() == []


def test_ranks_of_a_node_that_is_replaced_are_not_waited_for() -> None:
    decision = Decision(action=Action.REPLACE, reason="", failure=UNFIT)
    assert left_behind(decision) == ("n1",)
    assert left_behind(changed(decision, lost=("n0",))) == ("n0",)
    assert left_behind(changed(decision, action=Action.RESTART)) == ()
    assert left_behind(Decision(action=Action.REPLACE, reason="")) == ()


@pytest.mark.parametrize(
    ("action", "stopping", "wanted"),
    [
        (Action.RESTART, False, Action.REPLACE),
        (Action.RESTART, True, Action.END),
        (Action.ROLL_BACK, False, Action.REPLACE),
    ],
)
def test_a_node_whose_ranks_cannot_be_killed_must_not_train(action: Action, stopping: bool, wanted: Action) -> None:
    made = make_roster(4)
    made.members[0].gone, made.members[1].gone = 3, 2
    decision = Decision(action=action, reason="rank 0 died", failure=HANG)
    instead = replace_unkillable_nodes(decision, made, 3, seconds=60.0, stopping=stopping)
    assert instead.action is wanted
    assert instead.reason == "rank 0 died; n1: its ranks could not be killed within 60 s"
    assert instead.failure == Failure(
        kind=FailureKind.NODE_SUSPECT, reason="n1: its ranks could not be killed within 60 s", node="n1", step=7
    )
    assert [member.excluded for member in made.members.values()] == [
        "", "n1: its ranks could not be killed within 60 s", "", "",
    ]  # fmt: skip


def test_a_stuck_node_beside_one_that_is_replaced_is_named_alone() -> None:
    made = make_roster(4)
    decision = Decision(action=Action.REPLACE, reason="n1 is slow", failure=UNFIT)
    instead = replace_unkillable_nodes(decision, made, 1, seconds=5.0, stopping=False)
    assert instead.failure.node == "n0"
    assert [made.members[node].excluded for node in (0, 1)] == [
        "n0: its ranks could not be killed within 5 s", "n1 is slow",
    ]  # fmt: skip


def test_between_two_generations_a_node_alone_can_be_replaced() -> None:
    made = make_roster(4)

    def says(failure: Failure | None, action: Action = Action.END) -> bool:
        return can_replace(Decision(action=action, reason="", failure=failure), made)

    assert says(LOST)
    assert not says(LOST, Action.RESTART)
    assert not says(None)
    assert not can_replace(None, made)
    assert not says(UNFIT), "nothing is wrong with the node itself"
    made.members[1].excluded = "slow"
    assert says(UNFIT)
    assert not says(changed(UNFIT, kind=FailureKind.USER_ERROR)), "it will not load on a spare either"
    assert not says(changed(UNFIT, node="elsewhere"))
    for node in (2, 3):
        made.members[node].lost = "gone"
    assert not says(LOST), "no spare is left"
