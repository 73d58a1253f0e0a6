"""Parameters and FLOPs of the built-in model, and the peak FLOP/s of devices. Pure functions."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from trainer.protocol.config_sections.recipe_config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """Name and shape of a parameter; tensor-parallel ranks split it along `tp_dim`, or replicate it if None."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    is_expert: bool = False
    """Whether this is a stack of expert matrices, which expert-parallel ranks split along the first dimension."""

    @property
    def elements(self) -> int:
        return prod(self.shape)


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """Yield the parameters of the whole model in the order of `named_parameters`."""
    rows = config.embedding_rows
    yield Parameter(name="embedding.weight", shape=(rows, config.dim), tp_dim=0)
    for layer in range(config.layers):
        for parameter in _of_layer(config):
            yield replace(parameter, name=f"layers.{layer}.{parameter.name}")
    yield Parameter(name="norm.weight", shape=(config.dim,))
    if not config.tie_embeddings:
        yield Parameter(name="output.weight", shape=(rows, config.dim), tp_dim=0)


def _of_layer(config: ModelConfig) -> Iterator[Parameter]:
    width = config.head_width
    queries, keys = config.heads * width, config.kv_heads * width
    yield Parameter(name="attention_norm.weight", shape=(config.dim,))
    for name, rows in (("wq", queries), ("wk", keys), ("wv", keys)):
        yield Parameter(name=f"attention.{name}.weight", shape=(rows, config.dim), tp_dim=0)
        if config.attention.qkv_bias:
            yield Parameter(name=f"attention.{name}.bias", shape=(rows,), tp_dim=0)
    yield Parameter(name="attention.wo.weight", shape=(config.dim, queries), tp_dim=1)
    for name in ("q_norm", "k_norm") if config.attention.qk_norm else ():
        yield Parameter(name=f"attention.{name}.weight", shape=(width,))
    yield Parameter(name="ffn_norm.weight", shape=(config.dim,))
    yield from _experts(config) if config.experts.count else _feed_forward(config)


def _feed_forward(config: ModelConfig) -> Iterator[Parameter]:
    yield Parameter(name="feed_forward.w1.weight", shape=(config.ffn_dim, config.dim), tp_dim=0)
    yield Parameter(name="feed_forward.w2.weight", shape=(config.dim, config.ffn_dim), tp_dim=1)
    yield Parameter(name="feed_forward.w3.weight", shape=(config.ffn_dim, config.dim), tp_dim=0)


def _experts(config: ModelConfig) -> Iterator[Parameter]:
    experts = config.experts
    yield Parameter(name="feed_forward.router.weight", shape=(experts.count, config.dim))
    for name in ("w1", "w2", "w3"):
        shape = (experts.count, experts.ffn_dim, config.dim)
        yield Parameter(name=f"feed_forward.experts.{name}", shape=shape, is_expert=True)


_TENSOR_CORES: tuple[tuple[str, float, float], ...] = (
    ("B200", 2250.0, 75.0),
    ("GH200", 990.0, 67.0),
    ("H200", 989.5, 67.0),
    ("H100 PCIe", 756.0, 51.0),
    ("H100 NVL", 835.5, 60.0),
    ("H100", 989.5, 67.0),
    ("A100", 312.0, 19.5),
    ("A10G", 70.0, 35.0),
    ("A10", 125.0, 31.2),
    ("A40", 149.7, 37.4),
    ("L40S", 362.0, 91.6),
    ("L40", 181.0, 90.5),
    ("L4", 121.0, 30.3),
    ("V100", 125.0, 15.7),
    ("MI300X", 1307.4, 163.4),
    ("MI250X", 191.5, 23.9),
)
"""Name, dense 16-bit TFLOP/s, and float32 TFLOP/s without TF32, from vendors' data sheets.

A device has the figures of the first name that its own name contains, so more specific names come first. The figures
of MI250X are per die, because each die is a device.
"""


def flops_per_token(model: ModelConfig, seq_len: int) -> float:
    """Return the FLOPs per token of the forward and backward passes, counted as in PaLM.

    Chowdhery et al. 2022, appendix B: 6 per matrix weight, plus attention without a discount for the causal mask; a
    sliding window counts as the length of the sequence. Recomputation is not counted. Queries have `heads` heads, keys
    and values `kv_heads`; norms, rotary embedding and the embedding lookup count as zero.
    """
    attention = attention_weights(model)
    weights = model.layers * (attention + feed_forward_weights(model)) + model.dim * model.vocab_size
    return 6.0 * weights + model.layers * attention_flops(model, seq_len)


def attention_weights(model: ModelConfig) -> int:
    """Count a layer's weights of attention."""
    return 2 * model.dim * (model.heads + model.kv_heads) * model.head_width


def attention_flops(model: ModelConfig, seq_len: int) -> float:
    """Return a layer's FLOPs per token for scores and mixed values, forward and backward."""
    return 12.0 * model.heads * model.head_width * (model.window(seq_len) or seq_len)


def feed_forward_weights(model: ModelConfig) -> int:
    """Count the weights used for each token; with experts, count only the chosen ones and the router."""
    experts = model.experts
    if not experts.count:
        return 3 * model.dim * model.ffn_dim
    return model.dim * (experts.count + 3 * experts.per_token * experts.ffn_dim)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the peak FLOP/s of a device; None for an unknown device or a slice of a GPU (MIG)."""
    if _has_words(device_name, "MIG"):
        return None
    for name, half, full in _TENSOR_CORES:
        if _has_words(device_name, name):
            return 1e12 * (full if dtype == "float32" else half)
    return None


def _has_words(device_name: str, words: str) -> bool:
    """Return whether a device's name contains `words` as whole words: `A100` does not match an RTX A1000."""
    return re.search(rf"(?<![a-z0-9]){re.escape(words)}(?![a-z0-9])", device_name, re.IGNORECASE) is not None
