"""A rank's local plan in plain fields, as it is sent: torch's own classes are put together again by who receives it."""

from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from checkpointing.engine.ranks.peer_codec import peer_message


@peer_message
@dataclass(frozen=True, slots=True)
class PlannedItem:
    """What a rank would write of one tensor if it were alone: `sizes` values from `offsets` on, of shape `whole`."""

    key: str
    sharded: bool
    dtype: torch.dtype
    requires_grad: bool
    pinned: bool
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    whole: tuple[int, ...]


@peer_message
@dataclass(frozen=True)
class LocalPlan:
    """The items, and the keys of the state, of which a rank may write nothing."""

    items: tuple[PlannedItem, ...]
    keys: tuple[str, ...]


def plan_message(plan: SavePlan) -> LocalPlan:
    """The plan as it is sent; raises ValueError for what a dense tensor's never holds."""
    return LocalPlan(tuple(map(_planned, plan.items)), tuple(plan.planner_data))


def save_plan(plan: LocalPlan) -> SavePlan:
    """The plan as torch's planner takes it."""
    return SavePlan([_write_item(item) for item in plan.items], planner_data={key: (key,) for key in plan.keys})


def kept(before: SavePlan, after: SavePlan) -> tuple[int, ...]:
    """The numbers, in the local plan, of the items that are left in the agreed one."""
    number = {item.index: at for at, item in enumerate(before.items)}
    return tuple(number[item.index] for item in after.items)


def _planned(item: WriteItem) -> PlannedItem:
    data = item.tensor_data
    if data is None or data.properties.memory_format != torch.contiguous_format:
        raise ValueError(f"{item.index.fqn}: is no dense tensor to torch's planner")
    return PlannedItem(
        key=item.index.fqn,
        sharded=item.type == WriteItemType.SHARD,
        dtype=data.properties.dtype,
        requires_grad=data.properties.requires_grad,
        pinned=data.properties.pin_memory,
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
        whole=tuple(data.size),
    )


def _write_item(item: PlannedItem) -> WriteItem:
    offsets = torch.Size(item.offsets)
    properties = TensorProperties(dtype=item.dtype, requires_grad=item.requires_grad, pin_memory=item.pinned)
    return WriteItem(
        index=MetadataIndex(item.key, offsets),
        type=WriteItemType.SHARD if item.sharded else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(item.sizes)),
            properties=properties,
            size=torch.Size(item.whole),
        ),
    )
