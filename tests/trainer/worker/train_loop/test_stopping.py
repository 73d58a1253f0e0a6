"""Stops: requested from one rank, agreed by all at the same step, served with a save."""

import pytest

from tests.trainer.conftest import new_run
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import ExitCode

pytestmark = pytest.mark.multi

STEPS = 10


def events(run, kind: EventKind):
    found = run.events()
    return [event for event in found if event.kind == kind]


def ask(reason: str, *, rank: int, at: int) -> dict:
    return {"do": "ask", "reason": reason, "rank": rank, "of_rank": 0, "at_step": at}


def waiting(step: int) -> dict:
    """Delay a step, so that an earlier request arrives in time."""
    return {"events": [{"kind": "hang-in-data", "rank": 0, "step": step, "value": 1, "generation": 1}]}


TWO = {"parallel": {"dp_shard": 2}, "train": {"steps": STEPS}, "drill": waiting(7)}


@pytest.fixture(scope="module")
def saved_and_gone_on(ranks, text_tokens, tmp_path_factory):
    run = new_run(ranks, tmp_path_factory.mktemp("asked") / "run", text_tokens, 2, {**TWO, "checkpoint": {"every": 0}})
    # The agent never clears its request here: it must be served once all the same.
    both = [ask("SAVE_AND_GO_ON", rank=rank, at=5) for rank in (0, 1)]
    assert run.train(both)["codes"] == [0, 0], run.log()
    return run


@pytest.mark.parametrize("asked", [pytest.param(0, marks=pytest.mark.proof), 1])
def test_all_ranks_stop_after_the_same_step_with_every_tier_reached_and_go_on_with_the_same_bits(
    make_run, tmp_path, saved_and_gone_on, asked
):
    tiers = [{"path": "run"}, {"path": str(tmp_path / "far"), "every": 1000}]
    run = make_run(2, **TWO, checkpoint={"every": 2, "tiers": tiers, "keep": 2})

    def arrived() -> set[str]:
        return {path.parent.name.partition(".")[0] for path in (tmp_path / "far").glob("*/*/COMMIT")}

    answer = run.train([ask("PREEMPTION", rank=asked, at=5)])
    assert answer["codes"] == [ExitCode.STOPPED_AFTER_SAVE] * 2, run.log()
    (agreed,) = events(run, EventKind.STOP_AGREED)
    step = agreed.data["step"]
    assert agreed.data["reason"] == "preemption"
    assert answer["steps"] == [step, step]
    assert answer["saved"] == [step, step]
    assert 5 < step < STEPS
    assert f"step-{step:08d}" in arrived(), run.log()
    assert run.train()["codes"] == [ExitCode.FINISHED] * 2, run.log()
    assert f"step-{STEPS:08d}" in arrived(), run.log()
    assert run.losses() == saved_and_gone_on.losses()
    assert run.final()["weights_digest"] == saved_and_gone_on.final()["weights_digest"]


def test_save_and_go_on_saves_once(saved_and_gone_on):
    run = saved_and_gone_on
    saved = [event.data["step"] for event in events(run, EventKind.CHECKPOINT_COMMITTED)]
    assert [event.data["reason"] for event in events(run, EventKind.STOP_AGREED)] == ["save_and_go_on"]
    assert len(saved) == 2
    assert 5 < saved[0] < saved[1] == STEPS


def test_a_stop_at_the_last_step_is_a_finish(make_run):
    # The last step reads its own votes.
    run = make_run(1, train={"steps": 2}, checkpoint={"every": 0}, drill=waiting(2))
    assert run.train([ask("CANCEL", rank=0, at=1)])["codes"] == [ExitCode.FINISHED]
    (agreed,) = events(run, EventKind.STOP_AGREED)
    assert agreed.data["step"] == 2
    assert len(events(run, EventKind.CHECKPOINT_COMMITTED)) == 1
