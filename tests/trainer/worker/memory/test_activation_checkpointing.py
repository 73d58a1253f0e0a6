"""Activation checkpointing recomputes exactly the operations that its settings name."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.models.llama import Llama
from trainer.protocol.config_sections.recipe_config import ModelConfig, RecomputeConfig, TrainConfig

LAYERS = 4


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def calls(**train: Any) -> Counter[str]:
    model = Llama(ModelConfig(dim=32, layers=LAYERS, heads=4, kv_heads=2, ffn_dim=64), TrainConfig(seq_len=16, **train))
    model.materialize(torch.device("cpu"), seed=1)
    tokens = torch.zeros(1, 17, dtype=torch.int64)
    with Counting() as counting:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    return counting.calls


@pytest.mark.parametrize(
    ("recompute", "products", "activations"),
    [({}, LAYERS, LAYERS), ({"every": 2}, LAYERS // 2, LAYERS // 2), ({"keep": "products"}, 0, LAYERS)],
)
def test_only_what_is_asked_for_is_computed_twice(recompute, products, activations):
    once = calls()
    twice = calls(activation_checkpointing=True, recompute=RecomputeConfig(**recompute))
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    assert twice[attention] - once[attention] == products
    assert twice["mm"] - once["mm"] == 6 * products  # the last of a layer's seven is not needed
    assert twice["silu"] - once["silu"] == activations
