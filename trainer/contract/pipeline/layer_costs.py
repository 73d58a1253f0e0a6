"""PURE: what the parts of the built-in model cost beside each other: embedding, layers, output with its loss."""

from dataclasses import dataclass

from trainer.contract.config import ModelConfig, TrainConfig
from trainer.contract.model_costs.model_flops import feed_forward_weights

FORWARD_SHARE = 1 / 3
"""Of forward and backward pass: gradients of inputs and of weights are a product each, as the forward pass is."""


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Forward and backward pass of one sequence; FLOPs or seconds, which only compare with each other."""

    embedding: float
    layers: tuple[float, ...]
    output: float
    """The last norm, the projection to the vocabulary, and the loss."""

    @property
    def total(self) -> float:
        return self.embedding + sum(self.layers) + self.output


def modelled(model: ModelConfig, train: TrainConfig) -> LayerCosts:
    """FLOPs counted as `flops_per_token` does, and the forward pass of layers that are recomputed a second time."""
    width = model.dim // model.heads
    attention = 2 * model.dim * model.heads * width + 2 * model.dim * model.kv_heads * width
    layer = 6.0 * (attention + feed_forward_weights(model)) + 12.0 * model.heads * width * train.seq_len
    return LayerCosts(
        embedding=0.0,
        layers=tuple(
            train.seq_len * layer * (1 + FORWARD_SHARE if _is_recomputed(number, train) else 1)
            for number in range(model.layers)
        ),
        output=train.seq_len
        * 6.0
        * model.dim
        * model.vocab_size
        * (1 if train.loss_chunks == 1 else 1 + FORWARD_SHARE),
    )


def measured(seconds: tuple[float, ...], model: ModelConfig) -> LayerCosts:
    """Of `parallel.pipeline.layer_seconds`; raises ValueError unless they are as many as the model has parts."""
    if len(seconds) != model.layers + 2:
        raise ValueError(
            f"parallel.pipeline.layer_seconds has {len(seconds)} numbers: must have {model.layers + 2}, for the "
            f"embedding, each of model.layers={model.layers}, and the output with its loss"
        )
    if not sum(seconds):
        raise ValueError("parallel.pipeline.layer_seconds are all 0: one must be above 0")
    embedding, *layers, output = seconds
    return LayerCosts(embedding=embedding, layers=tuple(layers), output=output)


def _is_recomputed(number: int, train: TrainConfig) -> bool:
    return train.activation_checkpointing and number % train.recompute.every == 0
