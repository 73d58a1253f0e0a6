"""One rank's shard file and the `.metadata` that names them all, in the format that plain DCP reads."""

import pickle
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from checkpointing.commit import write_file
from checkpointing.digests import DigestSink
from checkpointing.engine.failure import FAILURES
from checkpointing.engine.staging import Staged
from checkpointing.manifest import METADATA, FileEntry
from checkpointing.storage import Storage


@dataclass(frozen=True)
class Written:
    """What one rank has made durable."""

    files: tuple[FileEntry, ...]
    results: tuple[WriteResult, ...]


def shard_name(rank: int) -> str:
    """DCP's own name for the only file of a rank."""
    return f"__{rank}_0.distcp"


def agree(plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Rank 0's part of planning: who writes what, replicated tensors once, balanced by bytes; raises ValueError."""
    return DefaultSavePlanner().create_global_plan(list(plans))


def write_shard(storage: Storage, folder: str, rank: int, plan: SavePlan, staged: Staged) -> Written:
    """Write this rank's items into one new file, durably; no items, no file. Raises OSError with the true cause."""
    if not plan.items:
        return Written((), ())
    name = shard_name(rank)
    sink = DigestSink(storage.create(f"{folder}/{name}"))
    try:
        with sink:
            results = [_write_item(sink, name, item.index, staged) for item in plan.items]
    except FAILURES:
        # torch reports a full disk as a wrong position; the sink has seen the real error.
        if sink.error is not None:
            raise sink.error from None
        raise
    return Written((_described(name, sink),), tuple(results))


def _described(name: str, sink: DigestSink) -> FileEntry:
    return FileEntry(name=name, size=sink.size, chunks=sink.chunks)


def _write_item(sink: DigestSink, name: str, index: MetadataIndex, staged: Staged) -> WriteResult:
    offset = sink.tell()
    torch.save(staged.local[index.fqn], sink)
    length = sink.tell() - offset
    return WriteResult(index=index, size_in_bytes=length, storage_data=_StorageInfo(name, offset, length))


def write_metadata(
    storage: Storage, folder: str, save_id: str, metadata: Metadata, results: Iterable[WriteResult]
) -> FileEntry:
    """Write `.metadata` durably, once all shards are."""
    metadata.version = CURRENT_DCP_VERSION
    metadata.storage_data = {result.index: result.storage_data for result in results}
    # No checkpoint_id: a folder's old path inside its own metadata would only mislead after a copy.
    metadata.storage_meta = StorageMeta(save_id=save_id)
    return _described(METADATA, write_file(storage, folder, METADATA, pickle.dumps(metadata)))
