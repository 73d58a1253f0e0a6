"""PURE: the parameters of the built-in model, and how tensor parallelism splits them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from trainer.contract.config import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter: its shape, and the dimension that tensor-parallel ranks share; None: each has all of it."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None = None
    is_expert: bool = False
    """Whether it is a stack of experts' matrices, the first dimension of which expert-parallel ranks share."""

    @property
    def elements(self) -> int:
        return prod(self.shape)


def parameters(config: ModelConfig) -> Iterator[Parameter]:
    """Of the whole model, in the order of `named_parameters`."""
    rows = config.embedding_rows
    yield Parameter(name="embedding.weight", shape=(rows, config.dim), tp_dim=0)
    for layer in range(config.layers):
        for parameter in _of_layer(config):
            yield replace(parameter, name=f"layers.{layer}.{parameter.name}")
    yield Parameter(name="norm.weight", shape=(config.dim,))
    if not config.tie_embeddings:
        yield Parameter(name="output.weight", shape=(rows, config.dim), tp_dim=0)


def _of_layer(config: ModelConfig) -> Iterator[Parameter]:
    width = config.dim // config.heads
    queries, keys = config.heads * width, config.kv_heads * width
    yield Parameter(name="attention_norm.weight", shape=(config.dim,))
    yield Parameter(name="attention.wq.weight", shape=(queries, config.dim), tp_dim=0)
    yield Parameter(name="attention.wk.weight", shape=(keys, config.dim), tp_dim=0)
    yield Parameter(name="attention.wv.weight", shape=(keys, config.dim), tp_dim=0)
    yield Parameter(name="attention.wo.weight", shape=(config.dim, queries), tp_dim=1)
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
