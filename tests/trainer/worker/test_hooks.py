"""A workload's own schedule, validation, numbers and state of data: the same bits after a kill."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.worker.conftest import hang
from trainer.contract.events import EventKind
from trainer.contract.failures.outcome import ExitCode

pytestmark = pytest.mark.multi

HERE = Path(__file__).parent
TRAIN = {"steps": 14, "dtype": "float32"}


def hooked(kind: str = "Hooked", **args: Any) -> dict[str, Any]:
    target = f"tests.trainer.worker.hooked_workload:{kind}"
    path = [str(HERE), str(HERE.parents[2])]
    return {
        "workload": {"target": target, "path": path, "args": {"width": 8, **args}},
        "train": TRAIN, "checkpoint": {"every": 4, "keep": 3}, "validation": {"every": 3},
    }  # fmt: skip


def exact(hurt, calm) -> None:
    """The two ended alike, and every step of theirs that both have trained."""
    assert hurt.losses() == calm.losses()
    for step, line in calm.metrics().items():
        assert {key: hurt.metrics()[step][key] for key in ("lr", "metrics")} == {
            key: line[key] for key in ("lr", "metrics")
        }
    assert hurt.validations() == calm.validations()
    assert hurt.final()["weights_digest"] == calm.final()["weights_digest"]


KINDS = [
    pytest.param("Hooked", {}, {"dp_shard": 2}, id="cosine"),
    pytest.param("Frozen", {"plateau": True}, {"dp_shard": 2}, id="plateau-and-statistics", marks=pytest.mark.proof),
    pytest.param("HookedLlama", None, {"tp": 2}, id="tensor-parallel", marks=pytest.mark.proof),
    pytest.param("HookedLlama", None, {"cp": 2}, id="context-parallel", marks=pytest.mark.proof),
]


@pytest.mark.parametrize(("kind", "args", "parallel"), KINDS)
def test_a_killed_run_with_every_hook_ends_with_the_same_bits(make_run, kind, args, parallel):
    over = {**hooked(kind, **args or {}), "parallel": parallel}
    over["workload"]["args"] = {} if args is None else over["workload"]["args"]
    calm = make_run(2, **over)
    assert calm.train()["codes"] == [0, 0], calm.log()
    hurt = make_run(2, **over, drill=hang(0, step=11))
    assert hurt.train_until_killed(0, committed=8)["codes"][0] == -9
    assert hurt.train()["codes"] == [0, 0], hurt.log()
    exact(hurt, calm)
    told = {event.kind for event in hurt.events()}
    assert not told & {EventKind.CHECKPOINT_INCOMPLETE, EventKind.RESTART_DIFFERS}

    assert sorted(calm.validations()) == [3, 6, 9, 12, 14]
    assert len({line["lr"] for line in calm.metrics().values()}) > 2
    line = calm.metrics()[5]["metrics"]
    assert line["own"] == pytest.approx(calm.losses()[5], rel=1e-6)
    if kind == "HookedLlama":  # both ranks of a tensor-parallel or context-parallel group have the same four
        assert line["sequences"] == 4.0
        return
    assert (line["samples"], line["first"]) == (16, 7.0)
    assert line["weighted"] == pytest.approx(2 / 3)
    assert "rare" not in line
    assert calm.validations()[3]["worst"] == 2.0
    told = [event.data["step"] for event in calm.events() if event.kind == EventKind.VALIDATED]
    assert told == [3, 6, 9, 12, 14]


def test_validation_changes_no_step(undisturbed):
    """Draws of random numbers and the mode of the model are put back."""
    over = hooked()
    one, other = undisturbed(1, **over), undisturbed(1, **{**over, "validation": {"every": 0}})
    assert one.losses() == other.losses()
    assert sorted(other.validations()) == [14]


def test_a_validation_that_a_stop_leaves_undone_is_made_up_for(make_run, undisturbed):
    over = hooked(plateau=True)
    calm = undisturbed(1, **over)
    slow = {"events": [{"kind": "slow-rank", "rank": 0, "step": 8, "value": 0.2}]}
    hurt = make_run(1, **over, drill=slow)
    # Asked for during step 8, served after step 9, which is to be validated.
    stop = {"at_step": 8, "of_rank": 0, "rank": 0, "do": "ask", "reason": "PREEMPTION"}
    assert hurt.train(actions=[stop])["codes"] == [ExitCode.STOPPED_AFTER_SAVE], hurt.log()
    assert max(hurt.losses()) == 9
    assert sorted(hurt.validations()) == [3, 6]
    assert hurt.train()["codes"] == [0], hurt.log()
    exact(hurt, calm)


@pytest.mark.proof
def test_data_that_reshards_itself_gets_the_states_of_all_ranks(make_run):
    run = make_run(2, **hooked(data="reshardable"), parallel={"dp_shard": 2}, drill=hang(0, step=6))
    run.train_until_killed(0, committed=4)
    on_ranks(run, 1)
    assert run.train()["codes"] == [0], run.log()


def on_ranks(run, world: int) -> None:
    config = json.loads(run.dir.config.read_bytes())
    config["cluster"]["ranks_per_node"] = run.world = world
    config["parallel"] = {"dp_shard": world}
    config["drill"] = {"events": []}
    run.dir.config.write_text(json.dumps(config))


def test_a_best_metric_that_nobody_returns_is_refused_with_the_names_that_are_there(make_run):
    over = hooked()
    over["checkpoint"] = {**over["checkpoint"], "best": {"metric": "val_los"}}
    run = make_run(1, **over)
    assert run.train()["codes"] == [ExitCode.NEVER_RETRY]
    said = run.outcome(0, 1).message or ""
    assert "checkpoint.best.metric=val_los: the workload has no such number, only loss, own, samples" in said
    assert "val_loss" in said


def test_the_best_checkpoint_is_saved_after_its_validation_and_stays(make_run):
    over = hooked()
    over["checkpoint"] = {"every": 0, "keep": 2, "best": {"metric": "val_loss", "mode": "max"}}
    run = make_run(1, **over)
    assert run.train()["codes"] == [0], run.log()
    left = {int(path.parent.name[5:13]) for path in run.dir.checkpoints.glob("*/COMMIT")}
    found = run.validations()
    # Steps are faster than saves here: one that finds both copies being written is skipped.
    saved = [event.data["step"] for event in run.events() if event.kind == EventKind.CHECKPOINT_COMMITTED]
    assert set(saved) <= set(found), "without an interval only validated steps are saved"
    assert len(saved) > 2
    assert left == {max(saved, key=lambda step: found[step]["val_loss"]), *saved[-2:]}


def test_the_best_checkpoint_is_known_where_a_stop_left_its_validation_to_the_next_start(make_run):
    over = hooked("Peaks", peak=9)
    over["checkpoint"] = {"every": 1, "keep": 2, "best": {"metric": "peak", "mode": "max"}}
    run = make_run(1, **over, drill={"events": [{"kind": "slow-rank", "rank": 0, "step": 8, "value": 0.2}]})
    stop = {"at_step": 8, "of_rank": 0, "rank": 0, "do": "ask", "reason": "PREEMPTION"}
    assert run.train(actions=[stop])["codes"] == [ExitCode.STOPPED_AFTER_SAVE], run.log()
    assert max(run.losses()) == 9
    assert run.train()["codes"] == [0], run.log()
    left = {int(path.parent.name[5:13]): path.parent for path in sorted(run.dir.checkpoints.glob("*/COMMIT"))}
    assert len(left) == 3, "the best one, and the two newest"
    found = json.loads((left[9] / "manifest.json").read_text())["extra"]["metrics"]
    assert found == {**run.metrics()[9]["metrics"], "peak": 0.0}
