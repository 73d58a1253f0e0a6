"""The same model in every layout: equal weights and data, nearly equal numbers."""

import pytest

from tests.trainer.conftest import hang, merged
from trainer.protocol.failures.outcome import ExitCode

pytestmark = pytest.mark.multi

LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {"dp_shard": 2}),
    "tp2": (2, {"tp": 2}),
    "ddp": (2, {"strategy": "ddp"}),
    "ddp of one replica x tp2": (2, {"strategy": "ddp", "tp": 2}),
    "dp2, offloaded": (2, {"dp_shard": 2, "fsdp": {"offload": "all"}}),
    "zero1": (2, {"strategy": "zero1"}),
    "zero2": (2, {"strategy": "zero2"}),
    "dp2, prefetched": (2, {"strategy": "zero3", "fsdp": {"prefetch": 2, "reshard_after_forward": "always"}}),
    "dp2 x tp2": (4, {"dp_shard": 2, "tp": 2}),
    "hsdp2 x dp2": (4, {"dp_replicate": 2, "dp_shard": 2}),
}


SAMPLE = ("ddp",)
"""Layouts of the fast tests; the others are proofs."""
OTHERS = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.proof) for name in LAYOUTS if name != "one"],
)


def shape(name):
    world, parallel = LAYOUTS[name]
    return {"world": world, "parallel": parallel, "model": {"layers": 2}}


def test_loss_falls_on_real_text(undisturbed):
    losses = undisturbed(1, train={"steps": 30}).losses()
    assert losses[1] == pytest.approx(5.77, abs=0.1)  # ln(320): the first guess is uniform
    assert losses[30] < 3.7


GENTLE = {"train": {"dtype": "float32"}, "optimizer": {"lr": 1e-3}}
"""Small learning rate, because Adam turns rounded gradients near zero into whole steps."""
PIECES = merged(GENTLE, {"train": {"micro_batch_size": 2}})
"""The same in micro-batches."""
FEW = {**GENTLE, "train": {"steps": 3, "dtype": "float32"}}
"""Settings for tests that need one step."""


@pytest.mark.proof
@OTHERS
def test_every_layout_starts_from_the_same_weights(undisturbed, name):
    over = {"train": {"steps": 1, "dtype": "float32"}, "optimizer": {"lr": 0.0}}
    one, other = (undisturbed(**shape(each), **over) for each in ("one", name))
    assert other.final()["weights_digest"] == one.final()["weights_digest"]
    assert other.losses()[1] == pytest.approx(one.losses()[1], rel=1e-6)


@OTHERS
def test_layouts_train_alike_in_micro_batches(undisturbed, name):
    one, other = undisturbed(**shape("one"), **GENTLE), undisturbed(**shape(name), **PIECES)
    assert other.losses() == pytest.approx(one.losses(), rel=1e-5)
    norms = [{step: line["grad_norm"] for step, line in run.metrics().items()} for run in (one, other)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


@pytest.mark.parametrize("name", ["ddp", pytest.param("dp2 x tp2", marks=pytest.mark.proof)])
def test_the_same_layout_trains_to_the_same_bits(undisturbed, make_run, name):
    one, again = undisturbed(**shape(name), **PIECES), make_run(**shape(name), **PIECES)
    assert again.train()["codes"] == [0] * again.world, again.log()
    assert again.losses() == one.losses()
    assert again.final()["weights_digest"] == one.final()["weights_digest"]


@pytest.mark.proof
@pytest.mark.parametrize("name", ["tp2", "dp2 x tp2"])
def test_tied_embeddings_stay_tied(undisturbed, name):
    over = {**FEW, "model": {"tie_embeddings": True}}
    one, other = (undisturbed(**merged(shape(each), over)) for each in ("one", name))
    assert other.losses() == pytest.approx(one.losses(), rel=1e-5)


@pytest.mark.proof
@pytest.mark.parametrize("name", ["dp2", "tp2"])
def test_bfloat16_stays_near_float32(undisturbed, name):
    full = undisturbed(**shape(name), train={"dtype": "float32"}).losses()
    half = undisturbed(**shape(name), train={"steps": 8}).losses()
    assert half == pytest.approx(full, rel=2e-2)
    assert half != full


@pytest.mark.proof
@pytest.mark.parametrize("name", ["zero1", "zero2", "dp2, offloaded", "dp2, prefetched"])
def test_when_parameters_are_gathered_and_freed_changes_no_bit(undisturbed, name):
    one, other = (undisturbed(**shape(each), **GENTLE) for each in ("dp2", name))
    assert other.losses() == one.losses()
    assert other.final()["weights_digest"] == one.final()["weights_digest"]


@pytest.mark.proof
@pytest.mark.parametrize("recompute", [{}, {"every": 2}, {"keep": "products"}])
def test_recomputing_activations_changes_nothing(undisturbed, recompute):
    kept = undisturbed(1, train={"steps": 8}).losses()
    train = {"steps": 8, "activation_checkpointing": True, "recompute": recompute}
    assert undisturbed(1, train=train).losses() == kept


def test_every_rank_leaves_a_line_for_every_step(undisturbed):
    lines = undisturbed(**shape("ddp"), **PIECES).work()
    assert sorted((line["rank"], line["step"]) for line in lines) == [(r, s) for r in range(2) for s in range(1, 9)]
    assert len({line["pid"] for line in lines}) == 2


@pytest.mark.proof
@pytest.mark.parametrize("name", ["one", "tp2", "dp2 x tp2"])
def test_logits_in_chunks_give_the_same_loss(undisturbed, name):
    whole = undisturbed(**shape(name), **GENTLE)
    chunked = undisturbed(**shape(name), **{**GENTLE, "train": {"dtype": "float32", "loss_chunks": 4}})
    assert chunked.losses() == pytest.approx(whole.losses(), rel=1e-5)


@pytest.mark.proof
@pytest.mark.parametrize("name", ["dp2", "tp2"])
def test_float16_stays_near_float32(undisturbed, name):
    full = undisturbed(**shape(name), train={"dtype": "float32"}).losses()
    half = undisturbed(**shape(name), train={"steps": 8, "dtype": "float16"}).losses()
    assert half == pytest.approx(full, rel=2e-2)
    assert half != full


@pytest.mark.proof
@pytest.mark.parametrize("name", ["dp2", "ddp"])
def test_gradients_that_are_reduced_once_a_step_add_up_to_the_same(undisturbed, name):
    each, last = (
        undisturbed(
            2,
            parallel={**LAYOUTS[name][1], "fsdp": {"reduce": when}},
            train={"steps": 3, "dtype": "float32", "micro_batch_size": 2},
        )
        for when in ("each", "last")
    )
    assert last.losses() == pytest.approx(each.losses(), rel=1e-4)
    # Plain replicas reduce once a step in any case; else the sums are in another order.
    assert (last.losses() == each.losses()) is (name == "ddp")


@pytest.mark.proof
def test_a_class_of_another_stage_wraps_nothing_in_this_one(make_run):
    parallel = {"pipeline": {"stages": 2}, "fsdp": {"wrap": "Embedding,Block"}}
    two = {"layers": 2}
    run = make_run(2, parallel=parallel, model=two, train={"steps": 1, "dtype": "float32"})
    assert run.train()["codes"] == [0, 0], run.log()
    run = make_run(2, parallel={**parallel, "fsdp": {"wrap": "Blok"}}, model=two, train={"steps": 1})
    assert ExitCode.NEVER_RETRY in run.train()["codes"]
    ends = [run.outcome(rank, 1) for rank in range(2)]
    (message,) = {one.message for one in ends if one.exception == "WorkloadError"}
    assert "no module of class Blok, only" in message
    assert "Embedding" in message


def test_a_class_that_the_model_does_not_have_ends_the_run_with_those_it_has(make_run):
    run = make_run(2, parallel={"dp_shard": 2, "fsdp": {"wrap": "Blok"}})
    assert run.train()["codes"] == [ExitCode.NEVER_RETRY] * 2
    assert "no module of class Blok, only Attention, Block" in (run.outcome(0, 1).message or "")


@pytest.mark.proof
def test_a_compiled_run_is_near_and_restarts_with_the_same_bits(make_run, undisturbed):
    name, over = "dp2", {"train": {"dtype": "float32", "compile": True}, "optimizer": {"lr": 1e-3}}
    plain, calm = undisturbed(**shape(name), **GENTLE), undisturbed(**shape(name), **over)
    assert calm.losses() == pytest.approx(plain.losses(), rel=1e-5)
    hurt = make_run(**shape(name), **over, drill=hang(1, step=8))
    hurt.train_until_killed(1, committed=6)
    assert hurt.train()["codes"] == [0] * 2, hurt.log()
    assert hurt.losses() == calm.losses()
    assert hurt.final()["weights_digest"] == calm.final()["weights_digest"]


def test_compiled_layers_are_refused_with_tensor_parallelism(make_run):
    run = make_run(2, parallel={"tp": 2}, train={"compile": True})
    assert run.train()["codes"] == [ExitCode.NEVER_RETRY] * 2
    assert "type train.compile=false" in (run.outcome(0, 1).message or "")
