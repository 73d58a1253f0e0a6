"""A bad step is never saved, its batch is reported and skipped, and the bits equal those of a run without it."""

import json

import pytest

from tests.trainer.conftest import hang
from trainer.protocol import skipped_batches
from trainer.protocol.failures.outcome import ExitCode
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.skipped_batches import Skip

pytestmark = pytest.mark.multi

STEPS, BATCH = 12, 8
LAYOUTS = [
    pytest.param(1, {}, id="1", marks=pytest.mark.proof),
    pytest.param(2, {"dp_shard": 2}, id="dp2"),
    pytest.param(4, {"dp_shard": 2, "tp": 2}, id="dp2xtp2", marks=pytest.mark.proof),
]


def drill(kind: str, step: int, **fields: int) -> dict:
    return {"kind": kind, "rank": 0, "step": step, **fields}


def roll_back(run, attempt: int | None = None) -> Skip:
    """Act like the coordinator after a generation with a bad step."""
    outcome = run.outcome(0, run.generations)
    assert outcome.position is not None
    found = Skip(step=outcome.step, position=outcome.position, reason=outcome.message or "")
    skipped_batches.add(run.attempt, [found])
    return found


def digest(run) -> tuple:
    return tuple(run.final()[key] for key in ("step", "loss", "weights_digest"))


@pytest.mark.parametrize(("world", "parallel"), LAYOUTS)
def test_a_rollback_ends_with_the_bits_of_a_run_that_never_saw_the_batch(make_run, world, parallel):
    train, bad = {"steps": 6}, 5
    hurt = make_run(world, parallel=parallel, train=train, drill={"events": [drill("nan", bad)]})
    assert hurt.train()["codes"] == [ExitCode.ERROR] * world, hurt.log()
    last = [hurt.outcome(rank, 1) for rank in range(world)]
    ends = {(one.exception, one.step, one.position, one.secondary) for one in last}
    assert ends == {("BadStep", bad, (bad - 1) * BATCH, False)}
    assert roll_back(hurt).position == (bad - 1) * BATCH
    second = hurt.train()
    assert second["codes"] == [0] * world, hurt.log()
    # The save of step 3 may have been under way when the ranks ended; what is there is older than the bad step.
    assert second["restored"] in ([point] * world for point in (0, 3))

    told = make_run(world, parallel=parallel, train=train)
    skipped_batches.add(told.attempt, [Skip(step=bad, position=(bad - 1) * BATCH, reason="told from the start")])
    assert told.train()["codes"] == [0] * world, told.log()
    assert digest(hurt) == digest(told)

    # Position: where the batch began. The sixth step trains the seventh batch, and before the bad one nothing differs.
    positions = [line["position"] for _, line in sorted(told.metrics().items())]
    assert positions == [BATCH * number for number in (0, 1, 2, 3, 5, 6)]
    assert hurt.losses(generation=1)[bad - 1] == told.losses()[bad - 1]


def test_a_spike_is_a_bad_step_once_the_window_is_full(make_run):
    run = make_run(
        1, train={"steps": STEPS}, detection={"spike": {"window": 8}},
        drill={"events": [drill("spike", 3), drill("spike", 11)]},
    )  # fmt: skip
    answer = run.train()
    assert answer["codes"] == [ExitCode.ERROR], run.log()
    assert answer["saved"][0] in (0, 3, 6, 9)  # whatever was written by then, but nothing of step 11
    found = roll_back(run)
    assert (found.step, found.position) == (11, 10 * BATCH)
    assert "robust standard deviations above" in found.reason
    assert run.train()["codes"] == [0], run.log()
    assert run.final()["step"] == STEPS


def test_a_killed_run_judges_every_step_as_an_undisturbed_one(make_run):
    run = make_run(
        1, train={"steps": STEPS}, detection={"spike": {"window": 8}},
        drill={"events": [*hang(0, step=9)["events"], drill("spike", 11, generation=2)]},
    )  # fmt: skip
    assert run.train_until_killed(0, committed=6)["codes"] == [-9], run.log()
    answer = run.train()
    assert answer["restored"][0] in (6, 9)
    assert answer["codes"] == [ExitCode.ERROR], run.log()
    assert (roll_back(run).step, run.train()["codes"]) == (11, [0]), run.log()


def test_a_later_attempt_leaves_out_what_an_earlier_one_did(make_run):
    run = make_run(1, train={"steps": 4})
    skipped_batches.add(run.attempt, [Skip(step=2, position=BATCH, reason="found by attempt 1")])
    run.attempt_number = 2
    run.attempt.make()
    LaunchToken(attempt=2, epoch=2, job_id="2", nonce="45670123").write(run.attempt.go)
    assert run.train()["codes"] == [0], run.log()
    (name,) = run.dir.checkpoints.glob("step-00000004.*")
    extra = json.loads((name / "manifest.json").read_text())["extra"]
    assert extra["consumed"] == 5 * BATCH


def test_a_users_own_data_is_left_out_too(make_run):
    target = {"target": "tests.trainer.worker.my_workload:Plane", "args": {"width": 8}}
    run = make_run(
        2, parallel={"dp_shard": 2}, workload=target, train={"steps": 6}, drill={"events": [drill("nan", 4)]}
    )
    assert run.train()["codes"] == [ExitCode.ERROR] * 2
    assert roll_back(run).position == 6
    assert run.train()["codes"] == [0, 0], run.log()
    positions = [line["position"] for _, line in sorted(run.metrics().items())]
    assert positions == [0, 2, 4, 8, 10, 12]


def test_data_whose_position_begins_anew_with_each_epoch_loses_the_bad_batches_alone(make_run):
    target = {"target": "tests.trainer.worker.my_workload:InEpochs", "args": {"width": 8}}
    run = make_run(
        1, workload=target, train={"steps": 14}, drill={"events": [drill("nan", 4), drill("nan", 11, generation=2)]}
    )
    for bad in (3, 11):  # the fourth batch of two epochs
        assert run.train()["codes"] == [ExitCode.ERROR], run.log()
        assert roll_back(run).position == bad
    assert run.train()["codes"] == [0], run.log()
    positions = [line["position"] for _, line in sorted(run.metrics().items())]
    assert positions == [place for place in range(16) if place not in (3, 11)]
