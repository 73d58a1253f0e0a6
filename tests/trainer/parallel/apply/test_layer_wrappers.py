"""Layer wrappers: copied outputs, compiled layers, kept activations."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from trainer.parallel.apply import layer_wrappers
from trainer.parallel.apply.layer_wrappers import choose_recompute, compile_forward, copy_views, is_compiled
from trainer.protocol.config_sections.recipe_config import TrainConfig
from trainer.protocol.plain_data import build


class Flat(nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"view": x.flatten(), "whole": x, "number": 3}


def test_views_that_train_are_copied_and_nothing_else_is() -> None:
    unit = Flat()
    copy_views(unit)
    x = torch.ones(2, 3, requires_grad=True) * 1
    out = unit(x)
    assert out["view"]._base is None
    assert torch.equal(out["view"], x.flatten())
    assert out["whole"] is x
    assert out["number"] == 3
    fixed = torch.ones(2, 3)
    assert unit(fixed)["view"]._base is fixed
    with torch.no_grad():
        assert unit(x)["view"]._base is not None, "nothing of it is trained"


def test_a_forward_is_compiled_once_for_every_shape_and_is_seen_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def compiled(function: Any, **options: Any) -> Any:
        asked.append(options)
        made = partial(function)
        made._torchdynamo_orig_callable = function  # type: ignore[attr-defined]
        return made

    monkeypatch.setattr(layer_wrappers.torch, "compile", compiled)
    model = nn.Sequential(nn.Linear(2, 2), Flat())
    assert not is_compiled(model)
    compile_forward(model[1])
    assert asked == [{"dynamic": False}]
    assert is_compiled(model)
    assert not is_compiled(model[0])


@pytest.mark.parametrize(
    ("train", "numbers"),
    [
        ({"activation_checkpointing": False}, []),
        ({"activation_checkpointing": True}, [0, 1, 2, 3]),
        ({"activation_checkpointing": True, "recompute": {"every": 2}}, [0, 2]),
    ],
)
def test_every_so_many_layers_are_computed_again(train: dict[str, Any], numbers: list[int]) -> None:
    config = build(TrainConfig, train)
    assert isinstance(config, TrainConfig)
    assert [number for number in range(4) if choose_recompute(number, config) is not None] == numbers


@pytest.mark.parametrize(("keep", "products"), [("nothing", 2), ("products", 1)])
def test_products_are_kept_or_computed_again(keep: str, products: int) -> None:
    config = build(TrainConfig, {"activation_checkpointing": True, "recompute": {"keep": keep}})
    assert isinstance(config, TrainConfig)
    recompute = choose_recompute(0, config)
    assert recompute is not None
    called: list[str] = []

    class Counted(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func.name())
            return func(*args, **(kwargs or {}))

    weight = torch.ones(3, 3, requires_grad=True)
    with Counted():
        out = recompute(lambda x: (x @ weight).sigmoid(), torch.ones(2, 3, requires_grad=True))
        out.sum().backward()
    assert called.count("aten::sigmoid") == 2
    backward = 2  # of the two factors
    assert called.count("aten::mm") == products + backward
