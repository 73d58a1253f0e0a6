"""PURE: bytes of parameters, gradients and optimizer state that one rank holds between two steps, and where.

Weights, gradients and both moments of Adam are float32, 16 bytes for each parameter that a rank has a shard of, and the
step count of each parameter 4 more (Rajbhandari et al. 2020, section 3, count 16 with half-precision weights beside
float32 ones; here the half-precision ones exist only while a layer computes).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from trainer.contract.config_sections.parallel_config import ParallelConfig, ParameterSizes, place_in
from trainer.contract.model_costs.model_shapes import Parameter

_FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes on one rank; `gradients` from the backward pass until the optimizer has stepped."""

    parameters: int
    gradients: int
    optimizer: int
    on_host: tuple[str, ...] = ()
    """Which of them lie in host memory although the rank trains on a GPU."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    parameters: Iterable[Parameter], parallel: ParallelConfig, world_size: int, rank: int = 0
) -> StateBytes:
    """What `rank` holds; with FSDP2 the last shards of a dimension that does not divide are smaller, or empty."""
    sizes = parallel.parameter_sizes(world_size)
    known = list(parameters)
    elements = sum(prod(local_shape(parameter, sizes, rank, parallel.ep)) for parameter in known)
    return StateBytes(
        parameters=_FLOAT32 * elements,
        gradients=_FLOAT32 * elements,
        optimizer=2 * _FLOAT32 * elements + _FLOAT32 * len(known),
        on_host=parallel.fsdp.on_host,
    )


def local_shape(parameter: Parameter, sizes: ParameterSizes, rank: int, ep: int = 1) -> tuple[int, ...]:
    """The part of a parameter that `rank` keeps: its share of `tp_dim`, then of the first dimension.

    Of experts that `ep` ranks share: some experts, and of these its share of the second dimension; for them ranks of
    `tp` are as any others.
    """
    shape = list(parameter.shape)
    *_, shard, part = place_in(sizes, rank)
    if parameter.is_expert and ep > 1:
        return (shape[0] // ep, shape[1] * ep // (sizes.dp_shard * sizes.tp), *shape[2:])
    if parameter.tp_dim is not None:
        shape[parameter.tp_dim] = _chunk(shape[parameter.tp_dim], sizes.tp, part)
    shape[0] = _chunk(shape[0], sizes.dp_shard, shard)
    return tuple(shape)


def _chunk(length: int, parts: int, index: int) -> int:
    """As torch.chunk: all chunks but the last ones have the length that is rounded up."""
    each = -(-length // parts)
    return max(0, min(each, length - index * each))
