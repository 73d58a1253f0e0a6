"""Bytes of model states per rank, gradient buckets, and a step's peak. Pure functions.

Weights, gradients and both Adam moments are float32: 16 bytes per parameter in a rank's shard, plus 4 for the step
count of each parameter tensor. Rajbhandari et al. 2020, section 3, also count 16, but store half-precision weights next
to float32 weights; here half-precision weights exist only while a layer computes.

The calculation follows FSDP2 (torch 2.13, `torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py`) through one
micro-batch: which layers are gathered, and which all-gather buffers, reduce-scatter buffers and gradients still exist.
With plain replicas, it follows the gradient buckets instead. Internal copies of a backend (gloo makes some, NCCL does
not) and the memory of saves are not included. Shared experts (`parallel.ep`) are gathered with their layer.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from trainer.costs.model_flops import Parameter
from trainer.parallel.data import HOST_COPY_BYTES
from trainer.parallel.dimension import locate_rank
from trainer.parallel.parallel_config import ParallelConfig

BUCKET_BYTES = 25 << 20
"""Maximum bytes of a gradient bucket, the default of torch's DDP; a larger gradient has its own bucket."""


def pack_buckets(gradients: Iterable[tuple[Hashable, int]]) -> Iterator[list[int]]:
    """Yield buckets, each as positions of adjacent gradients of one kind. Gradients are given as (kind, bytes)."""
    bucket: list[int] = []
    size, last = 0, None
    for position, (kind, nbytes) in enumerate(gradients):
        if bucket and (kind != last or size + nbytes > BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        bucket.append(position)
        size, last = size + nbytes, kind
    if bucket:
        yield bucket


FLOAT32 = 4


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes of model states on one rank; `gradients` exist from the backward pass until the optimizer has stepped."""

    parameters: int
    gradients: int
    optimizer: int
    on_host: tuple[str, ...] = ()
    """States kept in host memory while the rank trains on a GPU."""

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    parameters: Iterable[Parameter], parallel: ParallelConfig, world_size: int, rank: int = 0
) -> StateBytes:
    """Return the bytes of the states on `rank`; in FSDP2, the last shards of an uneven split are smaller or empty."""
    sizes = parallel.parameter_sizes(world_size)
    known = list(parameters)
    elements = sum(prod(local_shape(parameter, sizes, rank, parallel.ep)) for parameter in known)
    return StateBytes(
        parameters=FLOAT32 * elements,
        gradients=FLOAT32 * elements,
        optimizer=2 * FLOAT32 * elements + FLOAT32 * len(known),
        on_host=parallel.fsdp.on_host,
    )


def local_shape(parameter: Parameter, sizes: Mapping[str, int], rank: int, ep: int = 1) -> tuple[int, ...]:
    """Return the shape of the parameter's shard on `rank`: split along `tp_dim`, then along the first dimension.

    If `ep` is above 1, experts are first divided among `ep` ranks, then split along the second dimension among all
    ranks with the same experts, including `tp` ranks.
    """
    shape = list(parameter.shape)
    place = locate_rank(sizes, rank)
    if parameter.is_expert and ep > 1:
        return (shape[0] // ep, shape[1] * ep // (sizes["dp_shard"] * sizes["tp"]), *shape[2:])
    if parameter.tp_dim is not None:
        shape[parameter.tp_dim] = _chunk(shape[parameter.tp_dim], sizes["tp"], place["tp"])
    shape[0] = _chunk(shape[0], sizes["dp_shard"], place["dp_shard"])
    return tuple(shape)


def _chunk(length: int, parts: int, index: int) -> int:
    """Return a chunk's length as in torch.chunk: all chunks except the last few have the rounded-up length."""
    each = -(-length // parts)
    return max(0, min(each, length - index * each))


@dataclass(frozen=True)
class _Unit:
    """Bytes of an FSDP unit, whose parameters are gathered and freed together."""

    gathered: int
    shard: int
    """Bytes in this rank's shard."""
    buffer: int
    """All-gather buffer; 0 if the unit receives no data from other ranks."""
    is_inner: bool = False
    """Whether this unit computes while the preceding unit is gathered, as a layer's shared experts do."""

    @property
    def gathering(self) -> int:
        """Return the bytes during an all-gather: weights, buffer, and a second buffer that reorders sharded experts."""
        return self.gathered + self.buffer * (2 if self.is_inner else 1)

    @property
    def reducing(self) -> int:
        """Return the bytes of expert gradients while they are reduced, which reorders and packs copies of them."""
        return 3 * self.gathered if self.is_inner else 0


@dataclass(frozen=True)
class _Units:
    """The layers in order of computation, and the root unit with all other parameters."""

    inside: Sequence[_Unit]
    root: _Unit


def peak_bytes(parameters: Iterable[Parameter], parallel: ParallelConfig, world_size: int) -> int:
    """Return the peak bytes of a float32 step on rank 0 without a pipeline, from the second step on."""
    known = list(parameters)
    held = state_bytes(known, parallel, world_size)
    stepping = held.gradients + (_host_copies(known, parallel, world_size) if held.on_host == ("optimizer",) else 0)
    if parallel.has_plain_replicas("float32"):
        return held.parameters + held.optimizer + max(stepping, *_replica_gradient_bytes(known, parallel, world_size))
    units = _units(known, parallel, world_size)
    during = _bytes_without_reshard(units) if parallel.reshard_after_forward is False else _bytes_with_reshard(units)
    return held.parameters + held.optimizer + max(*during, _of_root(units), stepping)


def _replica_gradient_bytes(
    parameters: Sequence[Parameter], parallel: ParallelConfig, world_size: int
) -> Iterator[int]:
    """Yield the gradient bytes of a plain replica each time a bucket is full: all gradients so far, and the bucket."""
    sizes = parallel.parameter_sizes(world_size)
    gradients = [FLOAT32 * prod(local_shape(parameter, sizes, 0, parallel.ep)) for parameter in reversed(parameters)]
    done = 0
    for positions in pack_buckets((None, nbytes) for nbytes in gradients):
        bucket = sum(gradients[position] for position in positions)
        done += bucket
        yield done + (bucket if sizes["dp_replicate"] * sizes["tp"] > 1 else 0)


def _units(parameters: Sequence[Parameter], parallel: ParallelConfig, world_size: int) -> _Units:
    sizes = parallel.parameter_sizes(world_size)
    members: dict[tuple[str, bool], list[Parameter]] = {}
    for parameter in parameters:
        parts = parameter.name.split(".")
        layer = ".".join(parts[:2]) if parts[0] == "layers" else ""
        members.setdefault((layer, parameter.is_expert and parallel.ep > 1), []).append(parameter)
    units = {key: _unit(own, sizes, parallel.ep, is_inner=key[1]) for key, own in members.items()}
    return _Units(inside=[unit for (layer, _), unit in units.items() if layer], root=units["", False])


def _unit(parameters: Sequence[Parameter], sizes: Mapping[str, int], ep: int, *, is_inner: bool) -> _Unit:
    together = {**sizes, "dp_shard": ep, "tp": 1} if is_inner else {**sizes, "dp_shard": 1}
    gathered = sum(FLOAT32 * prod(local_shape(parameter, together, 0, ep)) for parameter in parameters)
    shard = sum(FLOAT32 * prod(local_shape(parameter, sizes, 0, ep)) for parameter in parameters)
    several = sizes["dp_shard"] * sizes["tp"] > ep if is_inner else sizes["dp_shard"] > 1
    return _Unit(gathered=gathered, shard=shard, buffer=gathered if several else 0, is_inner=is_inner)


def _around(units: Sequence[_Unit], number: int) -> int:
    """Return the number of the layer that contains this unit, or of the unit itself if it is a layer."""
    return number - 1 if units[number].is_inner else number


def _bytes_with_reshard(units: _Units) -> Iterator[int]:
    """Yield the bytes in use if units are gathered for the forward pass, freed, and gathered again for the backward."""
    inside, root = units.inside, units.root.gathered
    for number, unit in enumerate(inside):
        layer = inside[_around(inside, number)].gathered if unit.is_inner else 0
        before = inside[number - 1].buffer if number else 0
        yield root + layer + unit.gathering + before
    done = 0
    for number in reversed(range(len(inside))):
        unit, own = inside[number], _around(inside, number)
        layer = inside[own].gathered if unit.is_inner else 0
        ahead = inside[_around(inside, own - 1)].buffer if own else 0
        behind = inside[number + 1].gathered if number + 1 < len(inside) else 0
        # Weights and gradients, the next layer's gathered buffer, and the last unit's reduce-scatter input.
        yield root + layer + 2 * unit.gathered + ahead + behind + done
        if unit.is_inner:
            yield root + layer + max(unit.gathering + behind, unit.reducing) + done
        done += unit.shard


def _bytes_without_reshard(units: _Units) -> Iterator[int]:
    """Yield the bytes in use if each unit is gathered for its forward pass and freed after its backward pass."""
    inside, gathered = units.inside, units.root.gathered
    for number, unit in enumerate(inside):
        yield gathered + unit.gathering + (inside[number - 1].buffer if number else 0)
        gathered += unit.gathered
    done = 0
    for number in reversed(range(len(inside))):
        unit = inside[number]
        behind = inside[number + 1].gathered if number + 1 < len(inside) else 0
        yield gathered + unit.gathered + behind + done
        gathered -= unit.gathered
        yield gathered + unit.reducing + done
        done += unit.shard


def _of_root(units: _Units) -> int:
    """Return the bytes in use at the end of the backward pass, including a reduce-scatter input."""
    return 2 * units.root.gathered + units.inside[0].gathered + sum(unit.shard for unit in units.inside)


def _host_copies(parameters: Sequence[Parameter], parallel: ParallelConfig, world_size: int) -> int:
    """Return the maximum bytes of weights and gradients that an optimizer in host memory copies at a time."""
    sizes = parallel.parameter_sizes(world_size)
    together = most = 0
    for parameter in parameters:
        if len(parameter.shape) > 1:  # all other parameters form a separate, small group
            together += FLOAT32 * prod(local_shape(parameter, sizes, 0, parallel.ep))
            most = max(most, together)
            together = 0 if together >= HOST_COPY_BYTES else together
    return 2 * most
