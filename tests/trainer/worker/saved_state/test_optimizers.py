"""Killed runs repeat the same bits, whatever their optimizers keep."""

import json
from pathlib import Path

import pytest

from tests.trainer.conftest import hang
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import ExitCode

pytestmark = pytest.mark.multi

HERE = Path(__file__).parents[1]
STEPS, SAVED, KILLED = 12, 4, 12
"""The second checkpoint is restored."""


def setting(optimizer, world, whole=False, rows=2, kind="AnyOptimizer", **options):
    args = {"optimizer": optimizer, "options": options, "whole": whole, "rows": rows, "width": 6}
    return {
        "workload": {"target": f"any_optimizer:{kind}", "path": [str(HERE)], "args": args},
        "train": {"steps": STEPS, "dtype": "float32"},
        "optimizer": {"lr": 0.05},
        "parallel": {"dp_shard": world},
        "checkpoint": {"every": SAVED},
    }


def incomplete(run):
    found = run.events()
    return [event.data["reason"] for event in found if event.kind == EventKind.CHECKPOINT_INCOMPLETE]


def assert_exact(make_run, world, over):
    hurt = make_run(world, **over, drill=hang(0, step=KILLED))
    assert hurt.train_until_killed(0, committed=2 * SAVED, recorded=KILLED - 2)["codes"][0] == -9, hurt.log()
    assert hurt.train()["codes"] == [0] * world, hurt.log()
    hurt.assert_trained_again(2 * SAVED + 1, KILLED - 2)
    assert incomplete(hurt) == []
    assert not [event for event in hurt.events() if event.kind == EventKind.RESTART_DIFFERS]


@pytest.mark.parametrize(
    ("optimizer", "world", "whole"),
    [
        pytest.param("schedulefree:SGDScheduleFree", 1, False, marks=pytest.mark.proof),
        ("prodigyopt:Prodigy", 1, True),
        pytest.param("prodigyopt:Prodigy", 2, False, marks=pytest.mark.proof),
        pytest.param("torch.optim:Adagrad", 2, False, marks=pytest.mark.proof),
        ("torch.optim:Muon", 2, True),
    ],
)
def test_what_an_optimizer_counts_comes_back(make_run, optimizer, world, whole):
    assert_exact(make_run, world, setting(optimizer, world, whole))


@pytest.mark.parametrize(
    ("optimizer", "world", "words"),
    [
        ("prodigyopt:Prodigy", 2, "cannot step sharded parameters"),
        ("torch.optim:LBFGS", 1, "needs no closure"),
        ("torch.optim:SparseAdam", 1, "needs sparse gradients"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_the_first_step(make_run, optimizer, world, words):
    run = make_run(world, **setting(optimizer, world, rows=1))
    assert run.train()["codes"][0] == ExitCode.NEVER_RETRY, run.log()
    assert words in run.outcome(0, 1).message


def test_what_an_optimizer_counts_and_a_workload_returns_comes_back_to_every_rank(make_run):
    assert_exact(make_run, 2, setting("schedulefree:AdamWScheduleFree", 2, kind="Stateful"))


def test_an_attribute_that_a_restart_has_lost_is_named(make_run):
    over = setting("torch.optim:SGD", 1, kind="Forgetful")
    hurt = make_run(1, **over, drill=hang(0, step=KILLED))
    hurt.train_until_killed(0, committed=2 * SAVED)
    assert hurt.train()["codes"] == [0], hurt.log()
    assert incomplete(hurt) == ["workload.calls had changed and is not saved: return it in the workload's state_dict()"]


def test_another_world_goes_on_with_the_same_group_values(make_run):
    over = setting("schedulefree:AdamWScheduleFree", 2)
    over["train"] = {**over["train"], "batch_size": 2}
    hurt = make_run(2, **over, drill=hang(0, step=KILLED))
    hurt.train_until_killed(0, committed=2 * SAVED)
    config = json.loads(hurt.dir.config.read_bytes())
    config["cluster"]["ranks_per_node"], config["parallel"]["dp_shard"], hurt.world = 1, 1, 1
    hurt.dir.config.write_text(json.dumps(config))
    assert hurt.train()["codes"] == [0], hurt.log()
    (manifest,) = [
        json.loads(path.read_text()) for path in hurt.dir.checkpoints.glob(f"step-{STEPS:08d}*/manifest.json")
    ]
    (facts,) = manifest["extra"]["rank_state"]
    (group,) = facts["optimizer"]["groups"]
    assert group["values"]["k"]["value"] == STEPS
    assert incomplete(hurt) == []
