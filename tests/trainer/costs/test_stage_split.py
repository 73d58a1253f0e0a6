"""Splits of layers into stages minimize the cost of the slowest stage."""

from dataclasses import replace
from itertools import combinations
from random import Random

import pytest

from trainer.costs.model_flops import flops_per_token
from trainer.costs.stage_split import LayerCosts, modelled_costs, split
from trainer.protocol.config_sections.recipe_config import ExpertsConfig, ModelConfig, RecomputeConfig, TrainConfig


def layers_of(costs: LayerCosts, stages: int) -> list[int]:
    return [len(part.layers) for part in split(costs, stages).parts]


def equal(layers: int, *, embedding: float = 0.0, output: float = 0.0) -> LayerCosts:
    return LayerCosts(embedding=embedding, layers=(1.0,) * layers, output=output)


def test_equal_layers_are_shared_out_evenly() -> None:
    assert layers_of(equal(8), 4) == [2, 2, 2, 2]
    assert layers_of(equal(10), 4) == [3, 3, 2, 2]
    assert split(equal(8), 4).imbalance == 1.0
    assert split(equal(10), 4).imbalance == pytest.approx(1.2)


def test_a_stage_with_the_output_has_fewer_layers() -> None:
    assert layers_of(equal(10, output=2.0), 4) == [3, 3, 3, 1]
    assert layers_of(equal(10, embedding=2.0), 4) == [1, 3, 3, 3]


def test_every_stage_has_a_layer_even_beside_an_output_that_costs_more_than_all() -> None:
    assert layers_of(equal(5, output=100.0), 4) == [2, 1, 1, 1]


def test_parts_are_consecutive_and_the_words_tell_them() -> None:
    found = split(equal(5, output=1.0), 3)
    assert [(part.first, part.end, part.cost) for part in found.parts] == [(0, 2, 2.0), (2, 4, 2.0), (4, 5, 2.0)]
    assert [(part.is_first, part.is_last) for part in found.parts] == [(True, False), (False, False), (False, True)]
    assert found.words == "3 stages of layers 0-1, 2-3, 4; the slowest costs 1.00 times the mean"


@pytest.mark.parametrize("seed", range(40))
def test_no_other_split_has_a_faster_slowest_stage_and_none_as_fast_is_more_even(seed: int) -> None:
    random = Random(seed)
    costs = LayerCosts(
        embedding=random.choice([0.0, 1.5]),
        layers=tuple(random.uniform(0.5, 2.0) for _ in range(random.randint(5, 9))),
        output=random.uniform(0.0, 4.0),
    )
    stages = random.randint(2, 5)
    found = split(costs, stages)

    def by(ends: tuple[int, ...]) -> list[float]:
        bounds = [0, *ends, len(costs.layers)]
        sums = [sum(costs.layers[first:end]) for first, end in zip(bounds, bounds[1:], strict=False)]
        sums[0] += costs.embedding
        sums[-1] += costs.output
        return sums

    every = [by(ends) for ends in combinations(range(1, len(costs.layers)), stages - 1)]
    least = min(max(sums) for sums in every)
    squares = min(sum(one * one for one in sums) for sums in every if max(sums) <= least * (1 + 1e-9))
    assert max(part.cost for part in found.parts) == pytest.approx(least)
    assert sum(part.cost**2 for part in found.parts) == pytest.approx(squares)
    assert [layer for part in found.parts for layer in part.layers] == list(range(len(costs.layers)))


def test_a_deep_model_is_split_at_once() -> None:
    assert layers_of(equal(126, output=1.5), 16) == [8] * 15 + [6]


@pytest.mark.parametrize("loss_chunks", [1, 4])
def test_modelled_costs_are_the_flops_of_the_model(loss_chunks: int) -> None:
    model, train = ModelConfig(layers=3, vocab_size=500), TrainConfig(seq_len=64, loss_chunks=loss_chunks)
    more = 2.0 * 64 * model.dim * 500 if loss_chunks > 1 else 0.0
    assert modelled_costs(model, train).total == pytest.approx(flops_per_token(model, 64) * 64 + more)


def test_layers_that_are_recomputed_cost_a_third_more() -> None:
    train = TrainConfig(activation_checkpointing=True, recompute=RecomputeConfig(every=2))
    costs = modelled_costs(ModelConfig(layers=4), train).layers
    assert [cost / costs[1] for cost in costs] == pytest.approx([4 / 3, 1, 4 / 3, 1])


def test_layers_with_experts_cost_what_each_token_is_given_to() -> None:
    experts = ExpertsConfig(count=8, per_token=2, ffn_dim=96)
    model, train = ModelConfig(layers=3, experts=experts), TrainConfig(seq_len=64)
    assert modelled_costs(model, train).total == pytest.approx(flops_per_token(model, 64) * 64)
    dense = modelled_costs(replace(model, experts=ExpertsConfig(), ffn_dim=2 * 96), train)
    router = 6.0 * 64 * model.dim * 8
    assert modelled_costs(model, train).layers == pytest.approx([cost + router for cost in dense.layers])
