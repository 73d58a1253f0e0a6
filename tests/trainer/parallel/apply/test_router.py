"""Routers: choice by bias, loads counted once, balanced experts."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from trainer.models.mixture_of_experts import Router
from trainer.parallel.apply.expert_parallel import ExpertBalance, inverse, permute_rows
from trainer.protocol.config_sections.recipe_config import ExpertsConfig

DIM, TOKENS = 16, 512


def router(count: int = 8, per_token: int = 2, rate: float = 1e-2) -> Router:
    made = Router(DIM, ExpertsConfig(count=count, per_token=per_token, balance_rate=rate))
    made.reset(torch.device("cpu"))
    torch.nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(1))
    return made


def tokens(seed: int = 2) -> torch.Tensor:
    return torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def test_the_bias_chooses_and_weighs_nothing() -> None:
    made, given = router(), tokens()
    scores = (given @ made.weight.T).sigmoid()
    made.moves[3] = 1000
    choice = made(given)
    assert bool((choice.experts == 3).any(dim=1).all())
    own = scores.gather(1, choice.experts)
    torch.testing.assert_close(choice.weights, own / own.sum(dim=1, keepdim=True))
    assert choice.load.tolist() == choice.experts.flatten().bincount(minlength=8).tolist()


def test_a_load_counts_once_for_each_backward_pass() -> None:
    made, given = router(), tokens()
    with torch.no_grad():
        made(given)  # as in validation
    assert not made.load.any()
    for _ in range(2):  # two micro-batches, each with two forward passes
        checkpoint(lambda one: made(one).weights, given, use_reentrant=False).sum().backward()
    assert made.load.tolist() == (2 * made(given).load).tolist()
    assert int(made.load.sum()) == 2 * 2 * TOKENS


def test_the_bias_moves_against_the_load_and_is_a_whole_number() -> None:
    made = router(count=4)
    made.balance(torch.tensor([5.0, 1.0, 2.0, 0.0], dtype=torch.float64))  # a mean of two
    assert made.moves.tolist() == [-1, 1, 0, 1]
    assert made.moves.dtype is torch.int64


def test_a_step_that_was_left_out_moves_nothing_and_its_load_is_forgotten() -> None:
    made = router()
    balance = ExpertBalance(torch.nn.Sequential(made))
    made(tokens()).weights.sum().backward()
    loads = balance.loads()
    assert loads is not None
    assert loads.any()
    balance.step_ended(loads, moves=False)
    assert not made.moves.any()
    assert not made.load.any()
    assert ExpertBalance(torch.nn.Linear(1, 1)).loads() is None


def test_uneven_experts_become_even() -> None:
    made, balance = router(), None
    made.weight.data[0] += 1.0  # popular
    made.weight.data[5] *= 0.1
    given = tokens() + 0.5
    balance = ExpertBalance(torch.nn.Sequential(made))

    def unevenness() -> float:
        load = made(given).load.double()
        return float(load.max() / load.mean())

    before = unevenness()
    for _ in range(200):
        made(given).weights.sum().backward()
        balance.step_ended(balance.loads(), moves=True)
    assert before > 2.0
    assert unevenness() < 1.1


@pytest.mark.parametrize("rows", [0, 1, 7])
def test_a_permutation_and_its_gradient_go_back(rows: int) -> None:
    given = torch.arange(3.0 * rows).view(rows, 3).requires_grad_()
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(rows))
    moved = permute_rows(given, order)
    assert torch.equal(moved, given[order])
    assert torch.equal(permute_rows(moved, inverse(order)), given)
    upstream = torch.randn(rows, 3)
    (gradient,) = torch.autograd.grad(moved, given, upstream)
    assert torch.equal(gradient[order], upstream)


def test_a_rank_of_a_pipeline_fills_in_the_rows_of_its_layers_and_reads_them_alone() -> None:
    first, last = router(count=4), router(count=4)
    stages = torch.nn.Sequential(first, last)
    balance = ExpertBalance(stages, rows=[1, 3], layers=5)
    first.load += torch.tensor([5, 1, 2, 0])
    last.load += 2
    own = balance.loads()
    assert own is not None
    assert own.view(5, 4).tolist() == [[0] * 4, [5, 1, 2, 0], [0] * 4, [2] * 4, [0] * 4]
    of_all = own.view(5, 4) + torch.tensor([[9, 1, 1, 1], [0] * 4, [9, 1, 1, 1], [0, 1, 0, 0], [9, 1, 1, 1]])
    balance.step_ended(of_all.flatten(), moves=True)
    assert (first.moves.tolist(), last.moves.tolist()) == ([-1, 1, 0, 1], [1, -1, 1, 1])
    assert not first.load.any()
    assert not last.load.any()
