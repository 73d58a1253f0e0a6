"""Stops: asked of one rank, agreed by all at the same step, served with a save."""

import pytest

from tests.trainer.worker.conftest import new_run
from trainer.contract.events import EventKind
from trainer.contract.failures.outcome import ExitCode

pytestmark = pytest.mark.multi

STEPS = 30


def events(run, kind: EventKind):
    found = run.events()
    return [event for event in found if event.kind == kind]


def ask(reason: str, *, rank: int, at: int) -> dict:
    return {"do": "ask", "reason": reason, "rank": rank, "of_rank": 0, "at_step": at}


TWO = {"world": 2, "over": {"parallel": {"dp_shard": 2}, "train": {"steps": STEPS}, "checkpoint": {"every": 0}}}


@pytest.fixture(scope="module")
def saved_and_gone_on(ranks, text_tokens, tmp_path_factory):
    """A run that is asked once for a checkpoint in its midst, and stops nowhere."""
    run = new_run(ranks, tmp_path_factory.mktemp("asked") / "run", text_tokens, **TWO)
    # The agent never clears its request here: it must be served once all the same.
    both = [ask("SAVE_AND_GO_ON", rank=rank, at=5) for rank in (0, 1)]
    assert run.train(both)["codes"] == [0, 0], run.log()
    return run


@pytest.mark.parametrize("asked", [pytest.param(0, marks=pytest.mark.proof), 1])
def test_all_ranks_stop_after_the_same_step_and_go_on_with_the_same_bits(make_run, saved_and_gone_on, asked):
    run = make_run(TWO["world"], **TWO["over"])
    answer = run.train([ask("PREEMPTION", rank=asked, at=5)])
    assert answer["codes"] == [ExitCode.STOPPED_AFTER_SAVE] * 2, run.log()
    (agreed,) = events(run, EventKind.STOP_AGREED)
    step = agreed.data["step"]
    assert agreed.data["reason"] == "preemption"
    assert answer["steps"] == [step, step]
    assert answer["saved"] == [step, step]
    assert 5 < step < STEPS
    assert run.train()["codes"] == [0, 0], run.log()
    assert run.losses() == saved_and_gone_on.losses()
    assert run.final()["weights_digest"] == saved_and_gone_on.final()["weights_digest"]


def test_save_and_go_on_saves_once(saved_and_gone_on):
    run = saved_and_gone_on
    saved = [event.data["step"] for event in events(run, EventKind.CHECKPOINT_COMMITTED)]
    assert [event.data["reason"] for event in events(run, EventKind.STOP_AGREED)] == ["save_and_go_on"]
    assert len(saved) == 2
    assert 5 < saved[0] < saved[1] == STEPS


def test_a_stop_at_the_last_step_is_a_finish(make_run):
    # The sleep after step 1 lets the request arrive; the last step reads its own votes.
    run = make_run(
        1, train={"steps": 2}, checkpoint={"every": 0}, drill={"events": [{"kind": "slow-rank", "step": 1, "value": 1}]}
    )
    assert run.train([ask("CANCEL", rank=0, at=1)])["codes"] == [ExitCode.FINISHED]
    (agreed,) = events(run, EventKind.STOP_AGREED)
    assert agreed.data["step"] == 2
    assert len(events(run, EventKind.CHECKPOINT_COMMITTED)) == 1


@pytest.mark.parametrize("stopped", [False, True], ids=["finished", "stopped"])
def test_the_last_checkpoint_reaches_every_tier_before_the_ranks_leave(make_run, tmp_path, stopped):
    tiers = [{"path": "run"}, {"path": str(tmp_path / "far"), "every": 1000}]
    steps = STEPS if stopped else 6
    run = make_run(
        2, parallel={"dp_shard": 2}, train={"steps": steps}, checkpoint={"every": 2, "tiers": tiers, "keep": 2}
    )
    answer = run.train([ask("PREEMPTION", rank=0, at=5)] if stopped else [])
    assert answer["codes"] == [ExitCode.STOPPED_AFTER_SAVE if stopped else ExitCode.FINISHED] * 2, run.log()
    there = {path.parent.name for path in (tmp_path / "far").glob("*/*/COMMIT")}
    last = f"step-{answer['steps'][0]:08d}"
    assert last in {name.partition(".")[0] for name in there}, (there, run.log())
