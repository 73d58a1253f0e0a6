"""Bytes of states on each rank, calculated by hand."""

import pytest

from trainer.costs.model_flops import Parameter, parameters
from trainer.costs.peak_bytes import local_shape, state_bytes
from trainer.parallel.data import FsdpConfig
from trainer.parallel.parallel_config import ParallelConfig
from trainer.protocol.config_sections.recipe_config import ExpertsConfig, ModelConfig

SEVEN_BILLION = ModelConfig(vocab_size=32000, dim=4096, layers=32, heads=32, kv_heads=32, ffn_dim=11008)


def test_the_parameters_of_a_known_model_are_counted():
    assert (
        sum(parameter.elements for parameter in parameters(SEVEN_BILLION)) == 6_738_415_616
    )  # as published for Llama 2 7B


@pytest.mark.parametrize(("strategy", "share"), [("ddp", 1), ("zero1", 8), ("zero2", 8), ("zero3", 8), ("fsdp", 8)])
def test_sixteen_bytes_for_each_parameter_that_a_rank_has(strategy, share):
    found = state_bytes(parameters(SEVEN_BILLION), ParallelConfig(strategy=strategy), 8)
    steps = 4 * (9 * 32 + 3)
    assert found.total == 16 * 6_738_415_616 // share + steps


def test_shards_that_do_not_divide_are_smaller_at_the_end():
    rows = Parameter(name="weight", shape=(10, 3))
    sizes = dict(pp=1, dp_replicate=1, dp_shard=4, tp=1)
    assert [local_shape(rows, sizes, rank) for rank in range(4)] == [(3, 3), (3, 3), (3, 3), (1, 3)]
    short = Parameter(name="weight", shape=(5,))
    assert [local_shape(short, sizes, rank) for rank in range(4)] == [(2,), (2,), (1,), (0,)]


def test_tensor_parallel_ranks_share_their_dimension_first():
    sizes = dict(pp=1, dp_replicate=2, dp_shard=2, tp=2)
    columns = Parameter(name="wo", shape=(6, 8), tp_dim=1)
    assert {local_shape(columns, sizes, rank) for rank in range(8)} == {(3, 4)}
    norm = Parameter(name="norm", shape=(6,))
    assert {local_shape(norm, sizes, rank) for rank in range(8)} == {(3,)}


def test_ranks_that_share_experts_have_some_and_share_these_along_their_width():
    sizes = dict(pp=1, dp_replicate=2, dp_shard=4, tp=1)
    stack = Parameter(name="w1", shape=(8, 6, 3), is_expert=True)
    assert {local_shape(stack, sizes, rank, 2) for rank in range(8)} == {(4, 3, 3)}
    assert {local_shape(stack, sizes, rank, 4) for rank in range(8)} == {(2, 6, 3)}
    assert local_shape(stack, sizes, 0) == (2, 6, 3)  # without expert parallelism as any other parameter
    shared = dict(pp=2, dp_replicate=1, dp_shard=2, tp=2)
    assert {local_shape(stack, shared, rank, 2) for rank in range(8)} == {(4, 3, 3)}  # ranks of tp as any others
    assert local_shape(stack, shared, 0) == (4, 6, 3)  # or with all that other ranks of tp have
    router = Parameter(name="router", shape=(8, 3))
    assert local_shape(router, sizes, 0, 2) == (2, 3)


def test_experts_are_counted():
    experts = ExpertsConfig(count=8, ffn_dim=14336)
    mixtral = ModelConfig(vocab_size=32000, dim=4096, layers=32, heads=32, kv_heads=8, experts=experts)
    assert sum(parameter.elements for parameter in parameters(mixtral)) == 46_702_792_704  # as published for 8x7B


@pytest.mark.parametrize(("strategy", "share"), [("ddp", 1), ("fsdp", 8)])
def test_ranks_that_share_a_sequence_share_parameters_or_have_all_of_them(strategy, share):
    found = state_bytes(parameters(SEVEN_BILLION), ParallelConfig(strategy=strategy, cp=4), 8)
    assert found.parameters == 4 * 6_738_415_616 // share


@pytest.mark.parametrize(
    ("offload", "on_host"),
    [("none", ()), ("optimizer", ("optimizer",)), ("all", ("parameters", "gradients", "optimizer"))],
)
def test_the_declared_place(offload, on_host):
    parallel = ParallelConfig(fsdp=FsdpConfig(offload=offload))
    assert state_bytes(parameters(ModelConfig()), parallel, 2).on_host == on_host
