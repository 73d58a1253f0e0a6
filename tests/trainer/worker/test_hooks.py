"""Runs with a user's scheduler, validation, metrics and data state repeat the same bits after a kill."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.conftest import hang
from trainer.protocol.events import EventKind
from trainer.protocol.failures.outcome import ExitCode

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
    """Assert that both runs ended alike and agree in every step that both trained."""
    assert hurt.losses() == calm.losses()
    for step, line in calm.metrics().items():
        assert {key: hurt.metrics()[step][key] for key in ("lr", "metrics")} == {
            key: line[key] for key in ("lr", "metrics")
        }
    assert hurt.validations() == calm.validations()
    assert hurt.final()["weights_digest"] == calm.final()["weights_digest"]


KINDS = [
    pytest.param("Hooked", {}, {"dp_shard": 2}, id="cosine"),
    pytest.param("Frozen", {"plateau": True}, {"dp_shard": 2}, id="plateau-and-statistics"),
    pytest.param("HookedLlama", None, {"tp": 2}, id="tensor-parallel"),
    pytest.param("HookedLlama", None, {"cp": 2}, id="context-parallel"),
]


def killed(make_run, kind, args, parallel):
    over = {**hooked(kind, **args or {}), "parallel": parallel}
    over["workload"]["args"] = {} if args is None else over["workload"]["args"]
    run = make_run(2, **over, drill=hang(0, step=12))
    assert run.train_until_killed(0, committed=8, recorded=10)["codes"][0] == -9
    assert run.train()["codes"] == [0, 0], run.log()
    told = {event.kind for event in run.events()}
    assert not told & {EventKind.CHECKPOINT_INCOMPLETE, EventKind.RESTART_DIFFERS}
    return run, over


@pytest.mark.proof
@pytest.mark.parametrize(("kind", "args", "parallel"), KINDS)
def test_a_killed_run_with_every_hook_ends_with_the_same_bits(make_run, kind, args, parallel):
    hurt, over = killed(make_run, kind, args, parallel)
    calm = make_run(2, **over)
    assert calm.train()["codes"] == [0, 0], calm.log()
    exact(hurt, calm)
    line = calm.metrics()[5]["metrics"]
    assert line["own"] == pytest.approx(calm.losses()[5], rel=1e-6)
    if kind == "HookedLlama":  # both ranks of a tensor-parallel or context-parallel group have the same four
        assert line["sequences"] == 4.0


def test_steps_and_validations_have_the_same_bits_again_after_a_kill_and_all_that_hooks_return(make_run):
    run, _ = killed(make_run, "Hooked", {}, {"dp_shard": 2})
    first, again = (run.metrics(generation) for generation in (1, 2))
    assert sorted(again) == [9, 10, 11, 12, 13, 14]
    for step in (9, 10):
        for name in ("loss", "grad_norm", "lr", "metrics"):
            assert again[step][name] == first[step][name]
    validations = [json.loads(line) for line in run.attempt.validation.read_text().splitlines()]
    assert [line["step"] for line in validations] == [3, 6, 9, 9, 12, 14]
    assert validations[2]["metrics"] == validations[3]["metrics"]
    told = [event.data["step"] for event in run.events() if event.kind == EventKind.VALIDATED]
    assert told == [3, 6, 9, 9, 12, 14]

    assert len({line["lr"] for line in run.metrics().values()}) > 2
    line = run.metrics()[5]["metrics"]
    assert line["own"] == pytest.approx(run.losses()[5], rel=1e-6)
    assert (line["samples"], line["first"]) == (16, 7.0)
    assert line["weighted"] == pytest.approx(2 / 3)
    assert "rare" not in line
    assert run.validations()[3]["worst"] == 2.0


def test_a_validation_that_a_stop_leaves_undone_is_made_up_for_and_rates_its_checkpoint(make_run, undisturbed):
    over = hooked("Peaks", peak=2, plateau=True)  # the third validation is that of step 9
    over["checkpoint"] = {"every": 1, "keep": 2, "best": {"metric": "peak", "mode": "max"}}
    calm = undisturbed(1, **over)
    slow = {"events": [{"kind": "slow-rank", "rank": 0, "step": 8, "value": 0.2}]}
    hurt = make_run(1, **over, drill=slow)
    # Requested during step 8 and served after step 9, which is due for validation.
    stop = {"at_step": 8, "of_rank": 0, "rank": 0, "do": "ask", "reason": "PREEMPTION"}
    assert hurt.train(actions=[stop])["codes"] == [ExitCode.STOPPED_AFTER_SAVE], hurt.log()
    assert max(hurt.losses()) == 9
    assert sorted(hurt.validations()) == [3, 6]
    assert hurt.train()["codes"] == [0], hurt.log()
    exact(hurt, calm)
    left = {int(path.parent.name[5:13]): path.parent for path in sorted(hurt.dir.checkpoints.glob("*/COMMIT"))}
    assert len(left) == 3, "the best one, and the two newest"
    found = json.loads((left[9] / "manifest.json").read_text())["extra"]["metrics"]
    assert found == {**hurt.metrics()[9]["metrics"], **hurt.validations()[9]}
    assert found["peak"] == 0.0


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
