"""Models that ranks cannot share are refused by name before they are sharded."""

import pytest
import torch
from torch import nn

from tests.trainer.parallel.apply.test_fsdp_units import Model
from trainer.parallel.apply.data_parallel import refuse_modules, refuse_parameters
from trainer.parallel.apply.fsdp_units import CannotShard


def test_parameters_that_cannot_be_sharded_together_are_named() -> None:
    model = Model(tied=False)
    refuse_parameters([model.head], model)
    model.head.weight.data = model.head.weight.data.to(torch.bfloat16)
    refuse_parameters([model.head], model)  # in a unit of its own
    with pytest.raises(CannotShard, match=r"trunk.embedding.weight \(float32\) and head.weight \(bfloat16\)"):
        refuse_parameters([], model)


def test_a_parameter_without_a_dimension_is_named() -> None:
    model = Model(tied=False)
    model.scale = nn.Parameter(torch.tensor(1.0), requires_grad=False)
    with pytest.raises(CannotShard, match="parameter scale has no dimension"):
        refuse_parameters([], model)


@pytest.mark.parametrize(
    ("parameter", "said"),
    [
        (nn.Parameter(torch.ones(2, dtype=torch.complex64)), "extra is complex.*type parallel.strategy=ddp"),
        (nn.Parameter(torch.ones(2, 3).t()), "extra is not contiguous"),
    ],
)
def test_parameters_whose_shards_would_be_wrong_are_named(parameter: nn.Parameter, said: str) -> None:
    model = Model(tied=False)
    model.extra = parameter
    with pytest.raises(CannotShard, match=said):
        refuse_parameters([], model)


def test_hooks_that_would_go_with_the_parameter_are_named() -> None:
    for register, said in (
        (lambda one: one.register_hook(lambda gradient: gradient), "type parallel.strategy=ddp"),
        (lambda one: one.register_post_accumulate_grad_hook(lambda _: None), "register_step_pre_hook"),
    ):
        model = Model(tied=False)
        register(model.head.weight)
        with pytest.raises(CannotShard, match=f"head.weight has a hook of its own.*{said}"):
            refuse_parameters([], model)


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (nn.LazyLinear(3), "0.weight has no shape yet"),
        (nn.Embedding(4, 2, max_norm=1.0), "0.max_norm=1.0"),
        (nn.EmbeddingBag(4, 2, sparse=True, mode="sum"), "0.sparse=True"),
    ],
)
def test_modules_that_no_strategy_can_take_are_named(module: nn.Module, said: str) -> None:
    with pytest.raises(CannotShard, match=said):
        refuse_modules(nn.Sequential(module))
