"""FLOPs of the built-in model as torch counts them, and the table of devices."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from trainer.costs.model_flops import flops_per_token, peak_flops
from trainer.models.llama import Llama
from trainer.protocol.config_sections.recipe_config import ExpertsConfig, ModelConfig, TrainConfig


@pytest.mark.parametrize(("experts", "kv_heads"), [(0, 4), (0, 1), (8, 2)])
def test_the_formula_is_what_torch_counts(kv_heads, experts):
    config = ModelConfig(
        vocab_size=320, dim=64, layers=2, heads=4, kv_heads=kv_heads, ffn_dim=160,
        experts=ExpertsConfig(count=experts, per_token=3, ffn_dim=48),
    )  # fmt: skip
    model, length = Llama(config, TrainConfig(seq_len=32)), 32
    model.materialize(torch.device("cpu"), seed=1)
    tokens = torch.zeros(1, length + 1, dtype=torch.int64)
    with FlopCounterMode(display=False) as counted:
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    # torch does not count attention on the CPU: two products of length x length x dim, and twice that backward.
    attention = config.layers * 3 * 2 * 2 * length * length * config.dim
    assert counted.get_total_flops() + attention == flops_per_token(config, length) * length


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.5e12),
        ("NVIDIA H100 PCIe", "float16", 756e12),
        ("NVIDIA GH200 480GB", "bfloat16", 990e12),
        ("NVIDIA A100-SXM4-80GB", "float32", 19.5e12),
        ("NVIDIA A10", "bfloat16", 125e12),
        ("NVIDIA L40", "bfloat16", 181e12),
        ("NVIDIA GeForce GT 710", "bfloat16", None),
        ("NVIDIA RTX A1000", "bfloat16", None),
        ("NVIDIA RTX A4000", "bfloat16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", "float16", None),
        ("NVIDIA H100 NVL", "float16", 835.5e12),
    ],
)
def test_a_device_is_known_by_its_name(name, dtype, peak):
    assert peak_flops(name, dtype) == peak
