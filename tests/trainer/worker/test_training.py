"""Real training on real text, over gloo."""

import pytest

pytestmark = pytest.mark.multi


def test_loss_falls_on_one_rank(make_run):
    run = make_run(1, train={"steps": 30})
    assert run.train()["codes"] == [0], run.log()
    losses = run.losses()
    assert losses[1] > 5.0
    assert losses[30] < 3.7


def test_four_ranks_shard_and_split(make_run):
    run = make_run(4, parallel={"dp_shard": 2, "tp": 2})
    assert run.train()["codes"] == [0, 0, 0, 0], run.log()
