"""User workloads on real ranks."""

import json
from pathlib import Path

import pytest
import torch

from tests.trainer.conftest import hang, merged
from trainer.protocol.failures.outcome import ExitCode

pytestmark = pytest.mark.multi

HERE = Path(__file__).parent
PLANE = {"target": "my_workload:Plane", "path": [str(HERE)], "args": {"width": 8}}
TRAIN = {"steps": 40, "dtype": "float32"}
UNEVEN = {**PLANE, "target": "my_workload:Uneven"}


def test_it_learns_and_survives_a_kill_with_the_same_bits(make_run):
    over = {
        "workload": UNEVEN,
        "train": {**TRAIN, "steps": 12},
        "parallel": {"dp_shard": 2},
        "checkpoint": {"every": 8},
    }
    run = make_run(2, **over, drill=hang(0, step=12))
    assert run.train_until_killed(0, committed=8, recorded=10)["codes"][0] == -9
    assert run.train()["codes"] == [0, 0], run.log()
    first, again = (run.metrics(generation) for generation in (1, 2))
    assert sorted(again) == list(range(9, 13))
    for step in (9, 10):
        assert [again[step][name] for name in ("loss", "grad_norm")] == [
            first[step][name] for name in ("loss", "grad_norm")
        ]
    assert run.losses()[12] < 0.5 * run.losses()[1]


@pytest.mark.parametrize("wrap", [{}, {"wrap": "Linear"}], ids=["own", "chosen"])
def test_units_that_return_views_may_be_changed_in_place_and_say_nothing(make_run, wrap):
    over = {"workload": {**PLANE, "target": "my_workload:Viewing"}, "parallel": {"fsdp": wrap}}
    run = make_run(1, **over, train={**TRAIN, "steps": 12})
    assert run.train()["codes"] == [0], run.log()
    assert "view tensor" not in run.log()
    assert run.losses()[12] < run.losses()[1]


def test_the_end_of_a_process_that_a_workload_forks_is_not_the_ranks(make_run):
    run = make_run(1, workload={**PLANE, "target": "my_workload:Forking"}, train={**TRAIN, "steps": 3})
    assert run.train()["codes"] == [0], run.log()
    assert "RuntimeError: the helper died" in run.log()
    assert run.outcome(0, 1).message is None


def test_state_that_the_optimizer_drops_before_training_is_held_by_nobody(make_run):
    run = make_run(1, workload={**PLANE, "target": "my_workload:DroppedState"}, train={**TRAIN, "steps": 3})
    assert run.train()["codes"] == [0], run.log()


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_that_use_different_parameters_end_the_run(make_run, strategy):
    over = {"parallel": {"strategy": strategy}, "train": {**TRAIN, "steps": 4}}
    run = make_run(2, workload={**PLANE, "target": "my_workload:Experts"}, **over)
    assert run.train()["codes"] == [ExitCode.NEVER_RETRY] * 2
    assert "step 1: ranks used different parameters" in (run.outcome(0, 1).message or "")


def test_every_strategy_averages_what_was_given_to_it(make_run):
    over = {"workload": {**PLANE, "target": "replicas_workload:Unusual"}, "train": {"steps": 3}}
    runs = {
        (strategy, dtype): make_run(2, parallel={"strategy": strategy}, **merged(over, {"train": {"dtype": dtype}}))
        for strategy, dtype in [
            ("fsdp", "float32"), ("zero1", "float32"), ("ddp", "float32"), ("zero1", "bfloat16"), ("ddp", "bfloat16"),
        ]
    }  # fmt: skip
    for run in runs.values():
        assert run.train()["codes"] == [0, 0], run.log()
    due = runs["fsdp", "float32"].losses()
    for (_, dtype), run in runs.items():
        assert run.losses() == pytest.approx(due, rel=1e-6 if dtype == "float32" else 2e-2)


def test_replicas_average_a_layer_that_is_thawed_later(make_run):
    target = {**PLANE, "target": "my_workload:Thawing"}
    run = make_run(2, workload=target, parallel={"strategy": "ddp"}, train={**TRAIN, "steps": 8})
    assert run.train()["codes"] == [0, 0], run.log()


def test_a_sharded_layer_that_is_recomputed_twice_in_the_old_way_is_refused(make_run):
    over = {"workload": {**PLANE, "target": "replicas_workload:Again"}, "train": {**TRAIN, "steps": 1}}
    run = make_run(2, parallel={"dp_shard": 2}, **over)
    assert run.train()["codes"] == [ExitCode.NEVER_RETRY] * 2, run.log()
    assert "0 is used twice in a forward pass" in (run.outcome(0, 1).message or "")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Again", "0.bias got two gradients"),
        ("Hooked", "2.weight has a hook set by the workload"),
        ("AddedLater", "extra.weight was created after `parallelize`"),
        ("ReplacedLater", "step 2: ranks' gradients differ"),
        ("StepsByItself", "got a gradient outside the backward pass"),
        ("OwnWeights", "ranks start with different weights"),
        ("OwnFreezing", "step 1: ranks used different parameters"),
    ],
)
def test_what_would_let_replicas_drift_apart_is_named(make_run, name, said):
    run = make_run(
        2, workload={**PLANE, "target": f"replicas_workload:{name}"}, parallel={"strategy": "ddp"},
        train={**TRAIN, "steps": 4},
    )  # fmt: skip
    assert run.train()["codes"] == [ExitCode.NEVER_RETRY] * 2, run.log()
    assert said in (run.outcome(0, 1).message or "")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("HookedEarly", "2.weight has a hook of its own, which FSDP drops"),
        ("Kept", "the loss uses 0.weight from before `parallelize`"),
        ("ForgottenRoot", "step 1: gradients of 2.weight, 2.bias differ between ranks after the backward pass"),
        ("LeftAsItIs", "step 1: gradients of 0.weight, 0.bias, 2.weight differ between ranks after the backward pass"),
        ("MadeLate", "step 1: gradients of extra differ between ranks after the backward pass"),
    ],
)
def test_what_sharding_would_get_wrong_is_named(make_run, name, said):
    target = {**PLANE, "target": f"replicas_workload:{name}"}
    run = make_run(2, workload=target, parallel={"dp_shard": 2}, train={**TRAIN, "steps": 4})
    assert run.train()["codes"] == [ExitCode.NEVER_RETRY] * 2, run.log()
    assert said in (run.outcome(0, 1).message or "")


def test_replicas_of_a_users_own_train_as_ddp_does(make_run):
    workload, train = {**PLANE, "target": "replicas_workload:Replicas"}, {**TRAIN, "steps": 3}
    own = make_run(2, workload={**workload, "target": "replicas_workload:OwnReplicas"}, train=train)
    other = make_run(2, workload=workload, parallel={"strategy": "ddp"}, train=train)
    for one in (own, other):
        assert one.train()["codes"] == [0, 0], one.log()
    assert own.losses() == pytest.approx(other.losses(), rel=1e-6)


def test_batch_norm_in_half_precision_is_refused_on_cpus(make_run):
    run = make_run(1, workload=UNEVEN, train={**TRAIN, "dtype": "bfloat16"})
    assert run.train()["codes"] == [ExitCode.NEVER_RETRY]
    assert "type train.dtype=float32" in (run.outcome(0, 1).message or "")


def test_figures_that_are_no_numbers_are_named_at_the_start(make_run):
    run = make_run(1, workload={**PLANE, "target": "my_workload:OddFigures"}, train={**TRAIN, "steps": 2})
    assert run.train()["codes"] == [ExitCode.NEVER_RETRY]
    assert "OddFigures.flops_per_step is 'many'" in (run.outcome(0, 1).message or "")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Container", "build_model() returns a ModuleDict, which is never called itself"),
        ("Bypassing", "type parallel.fsdp.wrap=Linear"),
    ],
)
def test_models_that_sharding_cannot_gather_are_refused_with_what_works(make_run, name, said):
    over = {"workload": {**PLANE, "target": f"my_workload:{name}"}, "train": {**TRAIN, "steps": 1}}
    run = make_run(2, parallel={"dp_shard": 2}, **over)
    assert run.train()["codes"] == [ExitCode.NEVER_RETRY] * 2, run.log()
    message = run.outcome(0, 1).message or ""
    assert said in message
    assert "type parallel.strategy=ddp train.dtype=float32" in message
    replicas = make_run(2, parallel={"strategy": "ddp"}, **over)
    assert replicas.train()["codes"] == [0, 0], replicas.log()
    if "wrap" in said:
        by_layer = make_run(2, parallel={"dp_shard": 2, "fsdp": {"wrap": "Linear"}}, **over)
        assert by_layer.train()["codes"] == [0, 0], by_layer.log()


def test_data_that_ends_is_named_and_never_tried_again(make_run):
    run = make_run(1, workload={**PLANE, "target": "my_workload:Ending"}, train=TRAIN)
    assert run.train()["codes"] == [ExitCode.NEVER_RETRY]
    outcome = run.outcome(0, 1)
    assert outcome.exception == "WorkloadError"
    assert "Points.take() returned no micro-batch for step 4" in (outcome.message or "")


def test_ranks_that_are_new_begin_with_the_first_ones_statistics(make_run):
    run = make_run(1, workload=UNEVEN, train={**TRAIN, "steps": 6}, drill={"events": [{"rank": 0, "step": 5}]})
    run.train()
    config = json.loads(run.dir.config.read_bytes())
    config["cluster"]["ranks_per_node"] = run.world = 2
    run.dir.config.write_text(json.dumps(config))
    assert run.train()["codes"] == [0, 0], run.log()


@pytest.mark.parametrize("name", ["tp", pytest.param("cp", marks=pytest.mark.proof)])
def test_without_a_plan_shared_layers_and_sequences_are_refused(make_run, name):
    run = make_run(2, workload=PLANE, train=TRAIN, parallel={name: 2})
    first, second = run.train()["codes"]
    assert first == ExitCode.NEVER_RETRY
    # The store goes with the first rank: the other one may hear of that before it comes to the same mistake.
    assert second in (ExitCode.NEVER_RETRY, ExitCode.RETRY)
    message = run.outcome(0, 1).message
    assert message.startswith(f"parallel.{name}=2, but Plane does not override `parallelize`"), message
    assert message.endswith(f"set parallel.{name}=1")


def test_a_node_without_its_gpus_is_suspect_and_the_code_is_not(make_run):
    run = make_run(1, cluster={"gpus_per_node": 1}, train={"steps": 1})
    if torch.cuda.is_available():
        pytest.skip("this machine has what the run asks for")
    assert run.train()["codes"] == [ExitCode.NODE_SUSPECT]
    assert run.outcome(0, 1).exception == "NodeFault"
