"""PURE: what a feed-forward of the built-in model, or a mixture of experts, needs of memory while a stage trains it.

In float32. A mixture is counted with the same tokens for each expert: with `parallel.ep` a rank computes what others
send it, and one with popular experts needs more.
"""

from dataclasses import dataclass

from trainer.contract.config import ModelConfig

_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class FeedForwardMemory:
    """Of one layer."""

    kept: int
    """Floats that autograd keeps of each token, with its input."""

    split: int
    """Floats of each token that wait for the gradients of weights, where these are computed apart."""

    during: int
    """Bytes of gradients within it, beside all that is kept, when its backward pass needs most."""

    weight: int
    """Bytes that the gradient of one of its matrices takes before it is added up."""


def feed_forward_memory(model: ModelConfig, tokens: int, tp: int, ep: int) -> FeedForwardMemory:
    """For so many tokens of a micro-batch."""
    if model.experts.count:
        return _of_experts(model, tokens, tp, ep)
    matrix = _FLOAT32 * model.ffn_dim * model.dim // tp
    return FeedForwardMemory(
        kept=4 * model.ffn_dim // tp + model.dim,
        split=(2 * model.ffn_dim + model.dim) // tp,
        during=matrix + _FLOAT32 * tokens * model.ffn_dim // tp,
        weight=matrix,
    )


def _of_experts(model: ModelConfig, tokens: int, tp: int, ep: int) -> FeedForwardMemory:
    """Each token is copied for its experts, whose results are kept to weigh them; orders of rows are int64.

    All matrices of a kind are one stack, whose gradient is put together of those of the experts: when the last expert
    has its gradients, those of all exist, and what the experts have kept is gone. Each of `tp` ranks has its own
    tokens.
    """
    experts, copies = model.experts, model.experts.per_token
    inner, rows = copies * experts.ffn_dim, copies * model.dim
    orders = copies * (3 if ep == 1 else 5) * 2
    here, own = experts.count // ep, _FLOAT32 * tokens // tp
    stack = _FLOAT32 * here * experts.ffn_dim * model.dim
    of_one = (2 * own * inner + stack) // here  # gradients within one expert, the first one or the last one
    return FeedForwardMemory(
        kept=(4 * inner + 2 * rows + experts.count + orders + 2 * copies + 1 + model.dim) // tp,
        split=(2 * inner + rows + experts.count) // tp,
        during=max(
            own * 2 * rows,
            of_one,
            of_one + (here - 1) * (3 * stack - own * (4 * inner - rows)) // here,
            4 * stack - own * (4 * inner + rows),
        ),
        weight=2 * stack,
    )
