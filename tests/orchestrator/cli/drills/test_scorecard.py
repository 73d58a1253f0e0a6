"""The score of a drill, from events: what was noticed, who was blamed, when it was over."""

from typing import Any

import pytest

from orchestrator.cli.drills.scorecard import ALIASES, EXPECTED, Scorecard, score
from orchestrator.states import RunState
from trainer.protocol.config_sections.fault_detection_config import KINDS
from trainer.protocol.events import Event, EventKind


class Tape:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def add(self, time: float, what: EventKind, /, generation: int = 1, attempt: int = 1, **data: Any) -> "Tape":
        seq = len(self.events)
        self.events.append(
            Event(time=time, source="s", seq=seq, kind=what, attempt=attempt, generation=generation, data=data)
        )
        return self

    def score(self, kind: str, **more: Any) -> Scorecard:
        return score(kind, self.events, more.pop("steps", [lines(1, 25)]), **more)


def lines(generation: int, step: int, attempt: int = 1) -> dict[str, Any]:
    return {"step": step, "attempt": attempt, "generation": generation, "loss": 1.0}


def fell(kind: str, **more: Any) -> dict[str, Any]:
    return {"reason": "r", "step": 25, "failure": {"kind": kind, "reason": "r", "rank": 1, "node": "n1", **more}}


def killed(rank: int = 1) -> Tape:
    tape = Tape().add(100.0, EventKind.DRILL, kind="kill-rank", rank=1, step=25)
    tape.add(100.1, EventKind.RANK_EXITED, rank=rank, node="n1", exit_code=None, signal=9, reason="killed by SIGKILL")
    tape.add(100.4, EventKind.DECISION, action="restart", reason="rank 1 was killed")
    return tape.add(100.5, EventKind.GENERATION_ENDED, **fell("rank_killed", rank=rank))


def test_score_of_killed_rank() -> None:
    tape = killed().add(102.0, EventKind.GENERATION_FIRST_STEP, generation=2, step=21, seconds=1.4)
    card = tape.score("kill-rank")
    assert (card.detected_s, card.back_s, card.back_step, card.steps_lost) == (0.1, 2.0, 21, 5)
    assert (card.noticed, card.named, card.culprit_right) == ("rank 1 on n1 ended: killed by SIGKILL", "rank 1", True)
    assert (card.failure, card.kind_right, card.decision) == ("rank_killed", True, "restart: rank 1 was killed")
    assert (card.over, card.passed, card.verdict) == (True, True, "noticed, rightly named, and training again")


def test_it_is_not_over_before_it_trains_again() -> None:
    card = killed().score("kill-rank", state=RunState.RUNNING)
    assert (card.over, card.passed, card.verdict) == (False, False, "it did not train again")
    same = killed().add(100.2, EventKind.GENERATION_FIRST_STEP, step=1, seconds=9.0)
    assert not same.score("kill-rank", state=RunState.RUNNING).over, "that was the generation that fell"
    ended = killed().score("kill-rank", state=RunState.FAILED)
    assert (ended.over, ended.passed) == (True, False)


def test_lost_steps_of_the_hit_generation_only() -> None:
    tape = Tape().add(100.0, EventKind.DRILL, generation=2, kind="kill-rank", rank=1, step=97)
    tape.add(100.1, EventKind.RANK_EXITED, generation=2, rank=1, node="n1", exit_code=None, signal=9, reason="killed")
    tape.add(100.5, EventKind.GENERATION_ENDED, generation=2, **fell("rank_killed"))
    tape.add(102.0, EventKind.GENERATION_FIRST_STEP, generation=3, step=91, seconds=1.4)
    # The first generation came to step 142 and was rolled back to 90.
    trained = [lines(1, 142), *(lines(2, step) for step in range(91, 98))]
    assert tape.score("kill-rank", steps=trained).steps_lost == 7


def test_lost_steps_without_metrics() -> None:
    tape = Tape().add(100.0, EventKind.DRILL, kind="full-disk", rank=0, step=20)
    tape.add(100.5, EventKind.GENERATION_ENDED, **{**fell("storage"), "step": 41})
    tape.add(102.0, EventKind.GENERATION_FIRST_STEP, attempt=2, step=21, seconds=1.4)
    assert tape.score("full-disk", steps=[lines(1, 34)]).steps_lost == 21


def test_a_command_is_back_when_its_ranks_run_on() -> None:
    tape = Tape().add(100.0, EventKind.DRILL, kind="kill-rank", rank=1, step=None, node="n1")
    tape.add(100.1, EventKind.RANK_EXITED, rank=1, node="n1", exit_code=None, signal=9, reason="killed by SIGKILL")
    tape.add(100.5, EventKind.GENERATION_ENDED, **fell("rank_killed"))
    tape.add(103.0, EventKind.GENERATION_STARTED, generation=2, world=2, nodes=2)

    def at(now: float) -> Scorecard:
        return tape.score("kill-rank", steps=[], state=RunState.RUNNING, now=now, running_for=5.0)

    assert not at(107.9).over, "it may end at once again"
    card = at(108.0)
    assert (card.over, card.passed, card.back_s, card.back_step, card.steps_lost) == (True, True, 3.0, None, None)
    assert card.verdict == "noticed, rightly named, and its ranks run again"
    assert card.struck == "rank 1 on n1"
    tape.add(107.0, EventKind.GENERATION_ENDED, generation=2, **fell("rank_killed"))
    assert not at(200.0).over
    assert not tape.score("kill-rank", now=200.0).over, "a workload of orch says itself when it trains"


def test_the_wrong_rank_fails_the_drill() -> None:
    tape = killed(rank=3).add(102.0, EventKind.GENERATION_FIRST_STEP, generation=2, step=21, seconds=1.4)
    card = tape.score("kill-rank")
    assert (card.passed, card.culprit_right, card.verdict) == (False, False, "rank 3 was blamed")


def test_the_wrong_kind_fails_the_drill() -> None:
    tape = Tape().add(100.0, EventKind.DRILL, kind="stop-rank", rank=1, step=25)
    tape.add(104.0, EventKind.INCIDENT, rank=1, node="n1", kind="stopped", reason="rank 1 stopped first", evidence="e")
    tape.add(105.0, EventKind.GENERATION_ENDED, **fell("rank_killed"))
    tape.add(106.0, EventKind.GENERATION_FIRST_STEP, generation=2, step=26, seconds=1.4)
    card = tape.score("stop-rank")
    assert (card.passed, card.verdict) == (False, "it was taken for rank_killed, not for hang")
    assert (card.detected_s, card.steps_lost, card.evidence) == (4.0, 0, "e")


def test_withdrawn_incident_is_no_detection() -> None:
    tape = Tape().add(100.0, EventKind.DRILL, kind="stop-rank", rank=1, step=25)
    tape.add(104.0, EventKind.INCIDENT, rank=1, kind="stopped", reason="?", withdrawn=True)
    card = tape.score("stop-rank", state=RunState.RUNNING)
    assert (card.noticed, card.verdict, card.over) == (None, "it was not noticed", False)


def test_a_desync_is_right_when_the_run_is_held() -> None:
    tape = Tape().add(100.0, EventKind.DRILL, kind="desync-shape", rank=1, step=25)
    tape.add(101.0, EventKind.INCIDENT, rank=1, kind="desync", reason="rank 1 reduced 2 elements, its peers 1")
    tape.add(101.5, EventKind.GENERATION_ENDED, **fell("desync"))
    assert not tape.score("desync", state=RunState.RUNNING).over
    card = tape.score("desync", state=RunState.HELD)
    assert (card.passed, card.over, card.verdict) == (True, True, "noticed, and held for a person")
    assert card.back_s is None
    assert tape.score("desync", state=RunState.FAILED).verdict == "the run was not held"


def test_a_straggler_is_named_and_training_goes_on() -> None:
    tape = Tape().add(100.0, EventKind.DRILL, kind="slow-rank", rank=1, step=25)
    tape.add(105.0, EventKind.STRAGGLER, rank=1, node="n1", section="forward", ratio=1.4, over=False)
    card = tape.score("slow-rank", state=RunState.RUNNING)
    assert (card.passed, card.over, card.kind_right) == (True, True, None)
    assert card.noticed == "rank 1 on n1 is slow: forward takes 1.40 x its peers' time"
    tape.events[-1].data["over"] = True
    assert tape.score("slow-rank").verdict == "it was not noticed"


def test_a_bad_loss_names_its_step() -> None:
    tape = Tape().add(100.0, EventKind.DRILL, kind="nan", rank=1, step=25)
    tape.add(100.2, EventKind.BATCH_SKIPPED, step=25, position=800, reason="loss nan")
    tape.add(100.3, EventKind.GENERATION_ENDED, **fell("numeric", rank=None))
    tape.add(101.0, EventKind.GENERATION_FIRST_STEP, generation=2, step=21, seconds=0.5)
    assert (tape.score("nan").passed, tape.score("nan").named) == (True, "step 25")
    tape.events[1].data["step"] = 24
    assert tape.score("nan").verdict == "step 24 was blamed"


def test_score_of_node_loss_seen_by_controller() -> None:
    tape = Tape().add(100.0, EventKind.DRILL, kind="kill-node", rank=None, node="n1", step=25)
    tape.add(130.0, EventKind.ATTEMPT_STARTED, attempt=2, generation=0, nodes=["n2", "n3"])
    tape.add(135.0, EventKind.GENERATION_FIRST_STEP, attempt=2, step=21, seconds=4.0)
    assert tape.score("kill-node").verdict == "it was taken for nothing, not for agent_lost or node_lost"
    card = tape.score("kill-node", failure={"kind": "node_lost", "reason": "NODE_FAIL", "node": "n1"})
    assert (card.passed, card.named, card.noticed, card.back_s) == (True, "node n1", "attempt 2 began", 35.0)


def test_only_the_newest_drill_counts() -> None:
    tape = killed().add(102.0, EventKind.GENERATION_FIRST_STEP, generation=2, step=21, seconds=1.4)
    tape.add(110.0, EventKind.DRILL, generation=2, kind="kill-rank", rank=0, step=30)
    card = tape.score("kill-rank")
    assert (card.rank, card.over, card.noticed) == (0, False, None)


def test_a_fault_that_never_came() -> None:
    assert Tape().score("kill-rank", state=RunState.RUNNING).over is False
    card = Tape().score("kill-rank", state=RunState.SUCCEEDED)
    assert (card.over, card.passed, card.verdict) == (True, False, "the fault never struck")


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_fault_can_be_scored(kind: str) -> None:
    assert kind in {ALIASES.get(name, name) for name in EXPECTED}
