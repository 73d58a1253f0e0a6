"""The same model in every layout: equal weights from the seed, the same data, nearly the same numbers."""

import pytest

pytestmark = pytest.mark.multi

LAYOUTS = {
    "one": (1, {}),
    "dp2": (2, {"dp_shard": 2}),
    "tp2": (2, {"tp": 2}),
    "hsdp": (2, {"dp_replicate": 2, "dp_shard": 1}),
    "dp2 x tp2": (4, {"dp_shard": 2, "tp": 2}),
    "hsdp2 x dp2": (4, {"dp_replicate": 2, "dp_shard": 2}),
}


def finished(make_run, world, **over):
    run = make_run(world, **over)
    assert run.train()["codes"] == [0] * world, run.log()
    return run


def test_loss_falls_on_real_text(make_run):
    losses = finished(make_run, 1, train={"steps": 30}).losses()
    assert losses[1] == pytest.approx(5.77, abs=0.1)  # ln(320): the first guess is uniform
    assert losses[30] < 3.7


def test_every_layout_starts_from_the_same_weights(make_run):
    digests, losses = {}, {}
    for name, (world, parallel) in LAYOUTS.items():
        run = finished(
            make_run,
            world,
            parallel=parallel,
            train={"steps": 1, "lr": 0.0, "dtype": "float32"},
        )
        digests[name], losses[name] = run.final()["weights_digest"], run.losses()[1]
    assert len(set(digests.values())) == 1, digests
    assert losses == pytest.approx(dict.fromkeys(LAYOUTS, losses["one"]), rel=1e-6)


def test_layouts_train_alike_and_the_same_layout_to_the_bit(make_run):
    # A small rate: Adam turns the rounding of gradients near zero into whole steps.
    train = {"dtype": "float32", "lr": 1e-3}
    one = finished(make_run, 1, train=train)
    for world, parallel in list(LAYOUTS.values())[1:]:
        other = finished(make_run, world, parallel=parallel, train=train)
        assert other.losses() == pytest.approx(one.losses(), rel=1e-5)
        norms = [{step: line["grad_norm"] for step, line in run.metrics().items()} for run in (one, other)]
        assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    again = finished(make_run, world, parallel=parallel, train=train)
    assert again.losses() == other.losses()
    assert again.final()["weights_digest"] == other.final()["weights_digest"]


def test_tied_embeddings_stay_tied_in_every_layout(make_run):
    train, model = {"steps": 3, "dtype": "float32", "lr": 1e-3}, {"tie_embeddings": True}
    one = finished(make_run, 1, train=train, model=model)
    four = finished(make_run, 4, parallel={"dp_shard": 2, "tp": 2}, train=train, model=model)
    assert four.losses() == pytest.approx(one.losses(), rel=1e-5)


def test_bfloat16_stays_near_float32(make_run):
    full = finished(make_run, 2, parallel={"tp": 2}, train={"dtype": "float32"}).losses()
    half = finished(make_run, 2, parallel={"tp": 2}).losses()
    assert half == pytest.approx(full, rel=2e-2)
    assert half != full


def test_micro_batches_add_up_to_the_batch(make_run):
    whole = finished(make_run, 2, parallel={"dp_shard": 2}, train={"dtype": "float32"}).losses()
    pieces = finished(make_run, 2, parallel={"dp_shard": 2}, train={"dtype": "float32", "micro_batch_size": 1}).losses()
    assert pieces == pytest.approx(whole, rel=1e-4)


def test_recomputing_activations_changes_nothing(make_run):
    kept = finished(make_run, 1).losses()
    recomputed = finished(make_run, 1, train={"activation_checkpointing": True}).losses()
    assert recomputed == kept


def test_every_rank_leaves_a_line_for_every_step(make_run):
    run = finished(make_run, 2, parallel={"dp_shard": 2}, train={"steps": 3})
    lines = run.work()
    assert sorted((line["rank"], line["step"]) for line in lines) == [(r, s) for r in range(2) for s in (1, 2, 3)]
    assert len({line["pid"] for line in lines}) == 2
