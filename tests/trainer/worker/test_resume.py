"""A killed and resumed run computes the same bits as an undisturbed one."""

import json

import pytest

from orchestrator.tokenization import shard_writer
from tests.trainer.conftest import hang
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import ExitCode

pytestmark = pytest.mark.multi

STEPS = 12
LAYOUTS = [
    pytest.param(1, {}, id="1", marks=pytest.mark.proof),
    pytest.param(2, {"dp_shard": 2}, id="dp2", marks=pytest.mark.proof),
    pytest.param(4, {"dp_shard": 2, "tp": 2}, id="dp2xtp2", marks=pytest.mark.proof),
    pytest.param(4, {"strategy": "ddp"}, id="ddp4", marks=pytest.mark.proof),
    pytest.param(4, {"fsdp": {"offload": "all"}}, id="offloaded on 4", marks=pytest.mark.proof),
    pytest.param(4, {"strategy": "zero1"}, id="zero1 on 4", marks=pytest.mark.proof),
    pytest.param(4, {"strategy": "zero2"}, id="zero2 on 4", marks=pytest.mark.proof),
    pytest.param(4, {"strategy": "hsdp", "dp_replicate": 2}, id="hsdp2x2", marks=pytest.mark.proof),
]


def kill(rank: int, after: int) -> dict:
    return {"events": [{"kind": "kill-rank", "rank": rank, "step": after}]}


def events(run, kind: EventKind, rank: int = 0):
    found = run.events(rank)
    return [event for event in found if event.kind == kind]


@pytest.mark.parametrize(("world", "parallel"), LAYOUTS)
def test_a_killed_run_ends_with_the_same_bits(make_run, undisturbed, world, parallel):
    calm = undisturbed(world, parallel=parallel, train={"steps": STEPS})
    hurt = make_run(world, parallel=parallel, train={"steps": STEPS}, drill=hang(world - 1, step=9))
    codes = hurt.train_until_killed(world - 1, committed=6)["codes"]
    assert codes[world - 1] == -9
    assert set(codes[: world - 1]) <= {ExitCode.RETRY}, hurt.log()
    second = hurt.train()
    assert second["codes"] == [0] * world, hurt.log()

    (restored,) = events(hurt, EventKind.CHECKPOINT_RESTORED)
    point = restored.data["step"]
    assert second["restored"] == [point] * world
    assert point == 6
    after = {step: loss for step, loss in calm.losses().items() if step > point}
    assert hurt.losses(generation=2) == after
    for step, loss in hurt.losses(generation=1).items():
        assert loss == calm.losses()[step]
    for key in ("step", "loss", "weights_digest"):
        assert hurt.final()[key] == calm.final()[key]
    assert events(hurt, EventKind.CHECKPOINT_SOFTWARE) == []
    assert events(hurt, EventKind.RESTART_DIFFERS) == []


def test_what_no_checkpoint_has_is_named_and_training_that_goes_on_differently_is_reported(make_run):
    workload = {"target": "tests.trainer.worker.my_workload:Forgetful", "args": {"width": 8}}
    over = {"workload": workload, "train": {"steps": 7}, "checkpoint": {"every": 4}}
    run = make_run(2, **over, parallel={"dp_shard": 2}, drill=hang(0, step=7))
    run.train_until_killed(0, committed=4, recorded=5)
    assert run.train()["codes"] == [0, 0], run.log()
    found = [(event.data["step"], event.data["reason"]) for event in events(run, EventKind.CHECKPOINT_INCOMPLETE)]
    assert found == [
        (4, "rank 1: workload.count had changed and is not saved: return it in the workload's state_dict()"),
        (
            4,
            "rank 1: model.3.out_features had changed in the model and is not saved: set it in the workload's "
            "load_state_dict(), or make it a buffer",
        ),
    ]
    before, after = run.losses(generation=1)[5], run.losses(generation=2)[5]
    assert before - after == pytest.approx(0.4)
    (event,) = events(run, EventKind.RESTART_DIFFERS)
    assert event.data == {"step": 5, "restored": 4, "reason": f"loss of step 5 is {after!r}, it was {before!r}"}


def test_a_killed_peer_is_a_secondary_failure_and_the_drill_is_reported(make_run):
    run = make_run(2, parallel={"dp_shard": 2}, drill=kill(1, after=2))
    answer = run.train()
    assert answer["codes"] == [ExitCode.RETRY, -9]
    outcome = run.outcome(0, 1)
    assert outcome.secondary
    assert outcome.exit_code == ExitCode.RETRY
    assert outcome.step in (1, 2)
    assert "Traceback" in (outcome.traceback or "")
    assert (outcome.message or "") in run.log()
    assert 'rank":1' not in run.attempt.rank_outcomes("n0").read_text()
    assert [event.data for event in events(run, EventKind.DRILL, rank=1)] == [
        {"kind": "kill-rank", "rank": 1, "step": 2}
    ]


def test_an_exception_is_the_cause_and_its_peers_fail_secondarily(make_run):
    run = make_run(2, parallel={"dp_shard": 2}, drill={"events": [{"kind": "raise", "rank": 1, "step": 2}]})
    assert run.train()["codes"] == [ExitCode.RETRY, ExitCode.ERROR]
    cause = run.outcome(1, 1)
    assert (cause.exception, cause.secondary, cause.step) == ("DrillError", False, 2)
    assert run.outcome(0, 1).secondary


def change(run, section: str, **over) -> None:
    config = json.loads(run.dir.config.read_text())
    config[section] |= over
    run.dir.config.write_text(json.dumps(config))


def test_a_finished_run_only_says_so_names_other_software_and_goes_on_with_no_other_data(make_run, tmp_path):
    run = make_run(1, name="run", train={"steps": 4})
    run.train()
    first = run.final()
    run.attempt.final.unlink()
    change(run, "cluster", cpus_per_task=2)
    assert run.train()["codes"] == [0], run.log()
    assert {key: run.final()[key] for key in ("step", "loss", "weights_digest")} == {
        key: first[key] for key in ("step", "loss", "weights_digest")
    }
    (event,) = events(run, EventKind.CHECKPOINT_SOFTWARE)
    assert event.data == {"step": 4, "changes": {"threads": [1, 2]}}

    text = tmp_path / "other.txt"
    text.write_text("other words " * 500)
    shard_writer.prepare([text], tmp_path / "other")
    own = json.loads(run.dir.config.read_text())
    for section, over in (("train", {"seed": own["train"]["seed"] + 1}), ("data", {"path": str(tmp_path / "other")})):
        change(run, "train", steps=6, seed=own["train"]["seed"])
        change(run, section, **over)
        assert run.train()["codes"] == [ExitCode.NEVER_RETRY]
        outcome = run.outcome(0, run.generations)
        assert outcome.exception == "WorkloadError"
        assert "but the checkpoint was saved with" in (outcome.message or "")


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        pytest.param(2, {"dp_shard": 1, "tp": 2}, id="tp2"),
        pytest.param(4, {"dp_shard": 2, "tp": 2}, id="dp2xtp2", marks=pytest.mark.proof),
        pytest.param(4, {"strategy": "ddp"}, id="ddp4", marks=pytest.mark.proof),
        pytest.param(2, {"strategy": "ddp", "tp": 2}, id="ddp1xtp2", marks=pytest.mark.proof),
        pytest.param(4, {"strategy": "zero2"}, id="zero2 on 4", marks=pytest.mark.proof),
    ],
)
def test_another_layout_goes_on_from_the_same_checkpoint(make_run, world, parallel):
    train, every = {"dtype": "float32", "steps": 8}, {"every": 4}
    run = make_run(2, parallel={"dp_shard": 2}, train=train, checkpoint=every, drill=hang(0, step=8))
    run.train_until_killed(0, committed=4, recorded=6)
    config = json.loads(run.dir.config.read_bytes())
    config["parallel"], config["cluster"]["ranks_per_node"] = parallel, world
    run.dir.config.write_text(json.dumps(config))
    run.world = world
    assert run.train()["codes"] == [0] * world, run.log()
    before, after = (run.losses(generation) for generation in (1, 2))
    assert sorted(after) == [5, 6, 7, 8]
    assert [after[step] for step in (5, 6)] == pytest.approx([before[step] for step in (5, 6)], rel=1e-4)


def test_a_revoked_attempt_saves_nothing(make_run):
    run = make_run(1, train={"steps": 4}, checkpoint={"every": 0})
    answer = run.train(actions=[{"at_step": 1, "of_rank": 0, "rank": 0, "do": "revoke"}])
    assert answer["codes"] == [ExitCode.ERROR]
    outcome = run.outcome(0, 1)
    assert outcome.exception == "SaveFailed"
    assert not list(run.dir.checkpoints.glob("*/COMMIT"))


def test_a_mistake_in_the_configuration_is_never_tried_again(make_run):
    run = make_run(1, workload={"target": "nowhere.to_be_found:Thing"})
    assert run.train()["codes"] == [ExitCode.NEVER_RETRY]
    outcome = run.outcome(0, 1)
    assert outcome.exception == "WorkloadError"
    assert "cannot import nowhere.to_be_found" in (outcome.message or "")


def test_a_loss_that_is_no_number_ends_the_run_before_it_is_saved(make_run):
    run = make_run(2, parallel={"dp_shard": 2}, optimizer={"lr": 1e18, "warmup_steps": 0}, checkpoint={"every": 1})
    assert run.train()["codes"] == [ExitCode.ERROR] * 2
    outcome = run.outcome(1, 1)
    assert (outcome.exception, outcome.secondary) == ("BadStep", False)
    bad = max(run.losses())
    assert f"step {bad}: " in (outcome.message or "")
    assert all(event.data["step"] < bad for event in events(run, EventKind.CHECKPOINT_COMMITTED))
