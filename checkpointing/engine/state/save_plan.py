"""The save plan: the files and positions of every rank's writes. All ranks agree on it once and then only confirm it.

torch's own planner assigns the writes (replicated tensors once, balanced by bytes). Rank 0 also creates the two files
that describe every checkpoint of this plan, DCP's `.metadata` and our `index.json`, which are identical for every save.
"""

import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner, create_default_local_save_plan
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from checkpointing.engine.collectives.group import Failed, RankGroup, result_or_failed
from checkpointing.engine.state.layout import (
    FileLayout,
    Item,
    PlannedFiles,
    Share,
    lay_out,
    lay_out_in_buckets,
)
from checkpointing.format.commit import Places, assign_places
from checkpointing.format.manifest import Index, Piece, TensorInfo
from checkpointing.message_codec import peer_message
from checkpointing.storage.digests import digest
from checkpointing.storage.shared_memory import PAGE

LEAST_WINDOW = 64 * PAGE
"""Minimum bucket size in bytes, regardless of the memory limit."""

Lay = Callable[[Sequence[Share], int], FileLayout]


@dataclass(frozen=True)
class AgreedPlan:
    """A rank's part of the agreed layout. `hash` is the same on all ranks, and rank 0 also has the descriptions."""

    hash: str
    layout: FileLayout
    buffers: int
    whole: bool
    """Whether, on every rank, one buffer holds all of the rank's data.

    It can then be written again and kept in memory.
    """
    metadata: bytes | None = None
    index: bytes | None = None
    everything: tuple[tuple[Item, ...], ...] = ()
    """On rank 0: the items of every rank."""
    places: Places = field(default_factory=dict)
    """Positions of this rank's files in its node's file; empty if they are separate files."""
    shared: tuple[str, ...] = ()
    """Keys of this rank's values that other ranks also hold and that are saved only once."""
    replicas: tuple[tuple[str, ...], ...] = ()
    """On rank 0: every rank's `shared`, as key and offsets, so that equal strings mean replicas."""

    @property
    def number(self) -> int:
        """The hash as a number that fits in an int64 tensor; never 0."""
        return int(self.hash[:15], 16) + 1

    @property
    def size(self) -> int:
        """Size in bytes of a checkpoint of this plan, without the small files that describe it.

        Known on rank 0 only.
        """
        return sum(item.piece.length for part in self.everything for item in part)

    def in_memory(self) -> PlannedFiles:
        """Return this rank's part as it is laid out in a buffer."""
        return PlannedFiles(self.hash, self.layout.files, self.layout.items, self.index)

    def on_disk(self) -> PlannedFiles:
        """Return this rank's part as it appears in a checkpoint's folder."""
        files = tuple((*self.places.get(name, (name, 0)), size) for name, _, size in self.layout.files)
        items = tuple(_move_item(self.places, item) for item in self.layout.items)
        return PlannedFiles(self.hash, files, items, self.index)


def _move_item(places: Places, item: Item) -> Item:
    """Return the item with its position in the node's file."""
    piece = item.piece
    file, at = places.get(piece.file, (piece.file, 0))
    return replace(item, piece=replace(piece, file=file, start=piece.start + at, data=piece.data + at))


def layout_for_budget(files: int, host_memory: float) -> Lay:
    """Return a layout function for at most `host_memory` GiB of copies per rank. 0 means unlimited."""

    def lay(shares: Sequence[Share], rank: int) -> FileLayout:
        whole = lay_out(shares, rank, files)
        most = int(host_memory * (1 << 30))
        if not most or whole.buffer_bytes <= most:
            return whole
        return lay_out_in_buckets(shares, rank, max(LEAST_WINDOW, most // 2 // PAGE * PAGE))

    return lay


def agree_on_plan(
    ranks: RankGroup, tensors: Mapping[str, Tensor], lay: Lay, most: int = 0, *, by_node: bool = False
) -> AgreedPlan:
    """Agree on a plan. Collective. Raises ValueError on every rank if any rank's state cannot be saved.

    `most` is the limit on host memory in bytes (0: no limit); it decides whether there is a second buffer. `by_node`
    means one file per node.
    """
    planned = _distribute(ranks, result_or_failed(lambda: local_plan(tensors)))
    layout = result_or_failed(lambda: lay(planned.shares, ranks.rank))
    layouts = ranks.gather(layout if isinstance(layout, Failed) else (layout.items, len(layout.parts) == 1))
    places = _agreed_places(ranks, layout) if by_node else [{}] * ranks.size
    everything: tuple[tuple[Item, ...], ...] = ()
    described: tuple[str, bytes, bytes] | Failed | None = None
    agreed: tuple[str, bool] | Failed | None = None
    if layouts is not None:
        everything = tuple(found[0] for found in layouts if not isinstance(found, Failed))
        described = Failed.combine(layouts)
        if described is None:
            described = result_or_failed(lambda: _describe_plan(planned.metadata, _all_moved(places, everything)))
        # If one rank uses buckets, no rank may retry or keep copies, or the ranks would get out of step.
        whole = all(found[1] for found in layouts if not isinstance(found, Failed))
        agreed = described if isinstance(described, Failed) else (described[0], whole)
    outcome = ranks.broadcast(agreed)
    if isinstance(outcome, Failed):
        raise ValueError(outcome.reason)
    assert isinstance(layout, FileLayout)
    buffers = 1 if most and len(layout.parts) == 1 and 2 * layout.buffer_bytes > most else 2
    shared = tuple(piece.rpartition("@")[0] for piece in planned.shared)
    mine = AgreedPlan(outcome[0], layout, buffers, outcome[1], places=places[ranks.rank], shared=shared)
    if not isinstance(described, tuple):
        return mine
    _, metadata, index = described
    return replace(mine, metadata=metadata, index=index, everything=everything, replicas=planned.replicas)


def _agreed_places(ranks: RankGroup, layout: FileLayout | Failed) -> list[Places]:
    """Return the positions of every rank's files in the nodes' files. Collective.

    Each rank computes them for itself.
    """
    sizes = {} if isinstance(layout, Failed) else {name: size for name, _, size in layout.files}
    sizes_by_rank = ranks.all_gather((sizes, ranks.looks_after(shared=False)))
    return assign_places([files for files, _ in sizes_by_rank], [leads for _, leads in sizes_by_rank])


def _all_moved(places: Sequence[Places], everything: Sequence[Sequence[Item]]) -> list[list[Item]]:
    return [[_move_item(mine, item) for item in part] for mine, part in zip(places, everything, strict=True)]


# ---- a rank's local plan as plain fields to send; rank 0 rebuilds torch's classes


@peer_message
@dataclass(frozen=True)
class LocalPlan:
    """A rank's shares as if it were alone, and all keys of its state, including keys for which it writes nothing."""

    shares: tuple[Share, ...]
    keys: tuple[str, ...]


def _save_plan(plan: LocalPlan) -> SavePlan:
    """Return the plan in the form that torch's planner accepts."""
    # As in DCP for a flat state dict: tools that rebuild a nested dict look up the key's path here.
    return SavePlan([_write_item(share) for share in plan.shares], planner_data={key: (key,) for key in plan.keys})


def _write_item(share: Share) -> WriteItem:
    offsets = torch.Size(share.offsets)
    properties = TensorProperties(dtype=share.dtype, requires_grad=share.requires_grad, pin_memory=share.pinned)
    return WriteItem(
        index=MetadataIndex(share.key, offsets),
        type=WriteItemType.SHARD if share.sharded else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(share.shape)),
            properties=properties,
            size=torch.Size(share.whole),
        ),
    )


# ---- agreement


@dataclass(frozen=True)
class _Planned:
    shares: list[Share]
    shared: tuple[str, ...]
    metadata: Metadata | None = None
    replicas: tuple[tuple[str, ...], ...] = ()


def _distribute(ranks: RankGroup, plan: LocalPlan | Failed) -> _Planned:
    """Let torch's planner decide on rank 0, and send each rank its items.

    If that fails, raises ValueError on every rank.
    """
    plans = ranks.gather(plan)
    answers: list[Any] | None = None
    metadata = None
    replicas: tuple[tuple[str, ...], ...] = ()
    if plans is not None:
        whole = [each for each in plans if not isinstance(each, Failed)]
        agreed: tuple[list[tuple[int, ...]], Metadata] | Failed | None = Failed.combine(plans)
        if agreed is None:
            agreed = result_or_failed(lambda: _decide_items(whole))
        if isinstance(agreed, Failed):
            answers = [agreed] * ranks.size
        else:
            replicas = find_replicas(whole)
            answers, metadata = list(zip(agreed[0], replicas, strict=True)), agreed[1]
    answer = ranks.scatter(answers)
    if isinstance(answer, Failed):
        raise ValueError(answer.reason)
    assert isinstance(plan, LocalPlan)
    numbers, shared = answer
    return _Planned([plan.shares[number] for number in numbers], shared, metadata, replicas)


def find_replicas(plans: Sequence[LocalPlan]) -> tuple[tuple[str, ...], ...]:
    """Return the pieces of each rank that another rank also holds, as `key@offsets`."""
    pieces = [[f"{item.key}@{','.join(map(str, item.offsets))}" for item in plan.shares] for plan in plans]
    counts = Counter(piece for of_rank in pieces for piece in of_rank)
    return tuple(tuple(piece for piece in of_rank if counts[piece] > 1) for of_rank in pieces)


def _decide_items(local_plans: Sequence[LocalPlan]) -> tuple[list[tuple[int, ...]], Metadata]:
    """Return the numbers of the items that each rank writes, and the metadata of all items."""
    plans = [_save_plan(each) for each in local_plans]
    agreed, metadata = DefaultSavePlanner().create_global_plan(plans)
    kept = []
    for before, after in zip(plans, agreed, strict=True):
        number = {item.index: at for at, item in enumerate(before.items)}
        kept.append(tuple(number[item.index] for item in after.items))
    return kept, metadata


def local_plan(tensors: Mapping[str, Tensor]) -> LocalPlan:
    """Return this rank's plan as if it were alone. Raises ValueError for state without well-defined content."""
    with torch.no_grad():
        checked = {key: _check_tensor(key, tensor).detach() for key, tensor in sorted(tensors.items())}
        plan = create_default_local_save_plan(checked, is_coordinator=False)
    return LocalPlan(tuple(map(_share, plan.items)), tuple(checked))


def _check_tensor(key: str, tensor: Tensor) -> Tensor:
    """Return the tensor. Raises ValueError if its values cannot be copied into a file and back."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{key}: a {type(tensor).__name__} is not a tensor; put it in `extra`")
    if isinstance(tensor, DTensor):
        if any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(f"{key}: a partial DTensor has no value before it is reduced")
        _check_tensor(key, tensor._local_tensor)
        return tensor
    if tensor.is_meta:
        raise ValueError(f"{key}: a tensor on the meta device has no values: materialize it, or set it to None")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "nested" if tensor.is_nested else "quantized" if tensor.is_quantized else str(tensor.layout)
        raise ValueError(f"{key}: a {kind} tensor cannot be saved, only dense tensors can")
    if is_traceable_wrapper_subclass(tensor):
        raise ValueError(f"{key}: a {type(tensor).__name__} wraps other tensors: save those, as dense tensors")
    return tensor


def _share(item: WriteItem) -> Share:
    data = item.tensor_data
    if data is None or data.properties.memory_format != torch.contiguous_format:
        raise ValueError(f"{item.index.fqn}: torch's planner does not treat it as a dense tensor")
    return Share(
        key=item.index.fqn,
        dtype=data.properties.dtype,
        shape=tuple(data.chunk.sizes),
        offsets=tuple(data.chunk.offsets),
        whole=tuple(data.size),
        within=(0,) * len(data.chunk.sizes),
        sharded=item.type == WriteItemType.SHARD,
        requires_grad=data.properties.requires_grad,
        pinned=data.properties.pin_memory,
    )


def _describe_plan(metadata: Metadata | None, everything: Sequence[Sequence[Item]]) -> tuple[str, bytes, bytes]:
    assert metadata is not None
    items = [item for part in everything for item in part]
    tensors = {item.key: TensorInfo(str(item.dtype).removeprefix("torch."), item.share.whole) for item in items}
    index = Index(tensors, tuple(item.piece for item in items)).encode()
    # `.metadata` is left out of the hash, because another process may pickle the same content differently.
    name = f"{torch.__version__} {len(everything)} ".encode()
    return digest(name + index), metadata_bytes(metadata, [item.piece for item in items]), index


def metadata_bytes(metadata: Metadata, pieces: Sequence[Piece]) -> bytes:
    """Return DCP's description of these files, which is the same for every save."""
    known = {key: info for key, info in metadata.state_dict_metadata.items() if isinstance(info, TensorStorageMetadata)}
    tensors = {key: replace(info, chunks=[]) for key, info in known.items()}
    places = {}
    for piece in pieces:
        offsets, chunks = torch.Size(piece.offsets), tensors[piece.key].chunks
        places[MetadataIndex(piece.key, offsets, len(chunks))] = _StorageInfo(piece.file, piece.start, piece.length)
        chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(piece.sizes)))
    metadata = replace(metadata, state_dict_metadata={**tensors}, storage_data=places, storage_meta=StorageMeta())
    metadata.version = CURRENT_DCP_VERSION
    return pickle.dumps(metadata)
