"""PURE: the most bytes that a step of the built-in model needs at once, apart from activations.

Follows FSDP2 (torch 2.13, `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`) through one micro-batch: which
layers are gathered, which buffers of an all-gather or a reduce-scatter still exist, and whose gradients are there; with
plain replicas, which buckets of gradients. What a backend copies for itself is not in it, as gloo does and NCCL does
not; nor is the memory of saves.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from trainer.contract.bucket_packing import packed
from trainer.contract.model_shapes import Parameter
from trainer.contract.parallel_config import HOST_COPY_BYTES, ParallelConfig
from trainer.contract.state_bytes import local_shape, state_bytes

_FLOAT32 = 4


@dataclass(frozen=True)
class _Units:
    """Bytes of the layers, in the order in which they compute, and of the rest: gathered, and this rank's shards."""

    layers: Sequence[int]
    layer_shards: Sequence[int]
    root: int
    root_shard: int
    is_gathered: bool
    """Whether they come from several ranks."""


def peak_bytes(parameters: Iterable[Parameter], parallel: ParallelConfig, world_size: int) -> int:
    """The peak of a step in float32 on rank 0, from the second step on, when the optimizer's state exists."""
    known = list(parameters)
    held = state_bytes(known, parallel, world_size)
    stepping = held.gradients + (_host_copies(known, parallel, world_size) if held.on_host == ("optimizer",) else 0)
    if parallel.has_plain_replicas("float32"):
        return held.parameters + held.optimizer + max(stepping, *_averaged(known, parallel, world_size))
    units = _units(known, parallel, world_size)
    during = _kept(units) if parallel.reshard_after_forward is False else _freed(units)
    return held.parameters + held.optimizer + max(*during, _of_root(units), stepping)


def _averaged(parameters: Sequence[Parameter], parallel: ParallelConfig, world_size: int) -> Iterator[int]:
    """Gradients of plain replicas when a bucket is filled: those that have come, and the bucket."""
    sizes = parallel.parameter_sizes(world_size)
    gradients = [_FLOAT32 * prod(local_shape(parameter, sizes, 0)) for parameter in reversed(parameters)]
    done = 0
    for positions in packed((None, nbytes) for nbytes in gradients):
        bucket = sum(gradients[position] for position in positions)
        done += bucket
        yield done + (bucket if sizes.dp_replicate * sizes.tp > 1 else 0)


def _units(parameters: Sequence[Parameter], parallel: ParallelConfig, world_size: int) -> _Units:
    sizes = parallel.parameter_sizes(world_size)
    whole = sizes._replace(dp_shard=1)
    gathered: dict[str, int] = {}
    shards: dict[str, int] = {}
    for parameter in parameters:
        parts = parameter.name.split(".")
        unit = ".".join(parts[:2]) if parts[0] == "layers" else ""
        gathered[unit] = gathered.get(unit, 0) + _FLOAT32 * prod(local_shape(parameter, whole, 0))
        shards[unit] = shards.get(unit, 0) + _FLOAT32 * prod(local_shape(parameter, sizes, 0))
    layers = [name for name in gathered if name]
    return _Units(
        layers=[gathered[name] for name in layers],
        layer_shards=[shards[name] for name in layers],
        root=gathered[""],
        root_shard=shards[""],
        is_gathered=sizes.dp_shard > 1,
    )


def _freed(units: _Units) -> Iterator[int]:
    """Each layer is gathered for its forward pass, freed, and gathered again for its backward pass."""
    buffers = units.layers if units.is_gathered else [0] * len(units.layers)
    for number, layer in enumerate(units.layers):
        before = buffers[number - 1] if number else 0
        yield units.root + layer + buffers[number] + before
    done = 0
    for number in reversed(range(len(units.layers))):
        ahead = buffers[number - 1] if number else 0
        behind = units.layers[number + 1] if number + 1 < len(units.layers) else 0
        # Its weights and its gradients, the next one's gathered buffer, the last one's input of a reduce-scatter.
        yield units.root + 2 * units.layers[number] + ahead + behind + done
        done += units.layer_shards[number]


def _kept(units: _Units) -> Iterator[int]:
    """Each layer is gathered for its forward pass and stays until its backward pass is over."""
    gathered = units.root
    buffers = units.layers if units.is_gathered else [0] * len(units.layers)
    for number, layer in enumerate(units.layers):
        gathered += layer
        yield gathered + buffers[number] + (buffers[number - 1] if number else 0)
    done = 0
    for number in reversed(range(len(units.layers))):
        behind = units.layers[number + 1] if number + 1 < len(units.layers) else 0
        yield gathered + units.layers[number] + behind + done
        gathered -= units.layers[number]
        done += units.layer_shards[number]


def _of_root(units: _Units) -> int:
    """The end of the backward pass: weights and gradients of the rest, and a layer's input of a reduce-scatter."""
    return 2 * units.root + units.layers[0] + sum(units.layer_shards)


def _host_copies(parameters: Sequence[Parameter], parallel: ParallelConfig, world_size: int) -> int:
    """Weights and gradients that an optimizer in host memory copies together, at most."""
    sizes = parallel.parameter_sizes(world_size)
    together = most = 0
    for parameter in parameters:
        if len(parameter.shape) > 1:  # the others are a group of their own, and small
            together += _FLOAT32 * prod(local_shape(parameter, sizes, 0))
            most = max(most, together)
            together = 0 if together >= HOST_COPY_BYTES else together
    return 2 * most
