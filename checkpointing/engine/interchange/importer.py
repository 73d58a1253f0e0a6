"""Tensors of others as a committed checkpoint: stock shard files, index, fingerprints, manifest, COMMIT.

One machine, no ranks; tensors pass through a few rows at a time, and what is written is digested on its way.
"""

import pickle
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpointing.engine.interchange.external_tensors import ExternalTensors, put_values, spans
from checkpointing.engine.state.fingerprints import combine, partial
from checkpointing.engine.state.record_template import ALIGNMENT, RecordTemplate, template
from checkpointing.errors import Refused
from checkpointing.format.commit import Name, seal, write_file
from checkpointing.format.index import FINGERPRINTS, INDEX, Index, Piece, TensorInfo, encode_fingerprints
from checkpointing.format.manifest import METADATA, FileEntry, Manifest
from checkpointing.storage.backends import Storage
from checkpointing.storage.digests import DigestSink
from checkpointing.storage.shared_memory import PAGE
from checkpointing.verification.verify import Progress

FILE_BYTES = 16 << 30
"""A file of the checkpoint is closed once it is so large."""


@dataclass(frozen=True, kw_only=True)
class ImportedTensor:
    """One tensor of the new checkpoint and where it comes from; rows that its source lacks become zeros."""

    external: ExternalTensors
    name: str
    info: TensorInfo
    expected_fingerprint: str | None = None
    """The fingerprint that the source's maker wrote down for it."""

    @property
    def dtype(self) -> torch.dtype:
        found = getattr(torch, self.info.dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def as_it_is(self) -> bool:
        """Whether neither dtype nor shape changes on the way."""
        return self.external.tensors[self.name] == self.info


def write_checkpoint(
    storage: Storage,
    name: Name,
    tensors: Mapping[str, ImportedTensor],
    *,
    extra: dict[str, Any],
    world: dict[str, Any],
    progress: Progress | None = None,
) -> Manifest:
    """Write and commit; raises Refused when a source is not what its maker wrote, OSError. Debris is the caller's."""
    writer = _Writer(storage, str(name), tensors, progress)
    for key in sorted(tensors, key=lambda key: (-writer.template(key).nbytes, key)):
        writer.add(key)
    files = [*writer.finish()]
    index = Index({key: imported.info for key, imported in tensors.items()}, tuple(writer.pieces))
    described = {
        INDEX: index.encode(), FINGERPRINTS: encode_fingerprints(writer.fingerprints), METADATA: metadata_of(index)
    }  # fmt: skip
    for file, data in described.items():
        sink = write_file(storage, str(name), file, data)
        files.append(FileEntry(name=file, size=sink.size, chunks=sink.chunks))
    now = time.time()
    manifest = Manifest(
        name=str(name), step=name.step, attempt=name.attempt, nonce=name.nonce, created_at=now,
        torch=torch.__version__, world=world, files=tuple(files), extra=extra,
    )  # fmt: skip
    seal(storage, manifest, lambda: True, now)
    return manifest


def metadata_of(index: Index) -> bytes:
    """DCP's own description of the files of an index."""
    tensors: dict[str, TensorStorageMetadata] = {}
    for key, info in index.tensors.items():
        properties = TensorProperties(dtype=getattr(torch, info.dtype))
        tensors[key] = TensorStorageMetadata(properties=properties, size=torch.Size(info.shape), chunks=[])
    places = {}
    for piece in index.pieces:
        offsets, chunks = torch.Size(piece.offsets), tensors[piece.key].chunks
        places[MetadataIndex(piece.key, offsets, len(chunks))] = _StorageInfo(piece.file, piece.start, piece.length)
        chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(piece.sizes)))
    metadata = Metadata(
        state_dict_metadata={**tensors},
        # As DCP does for a flat state dict: tools that rebuild a nested one look the key's path up here.
        planner_data={key: (key,) for key in tensors},
        storage_data=places,
        storage_meta=StorageMeta(),
        version=CURRENT_DCP_VERSION,
    )
    return pickle.dumps(metadata)


class _Writer:
    """Fills shard files one after another."""

    def __init__(
        self, storage: Storage, folder: str, tensors: Mapping[str, ImportedTensor], progress: Progress | None
    ) -> None:
        self._storage, self._folder, self._tensors, self._progress = storage, folder, tensors, progress
        self._total, self._done = sum(self.template(key).nbytes for key in tensors), 0
        self._sink: DigestSink | None = None
        self._name = ""
        self._files: list[FileEntry] = []
        self.pieces: list[Piece] = []
        self.fingerprints: dict[str, str] = {}

    def template(self, key: str) -> RecordTemplate:
        imported = self._tensors[key]
        return template(imported.dtype, imported.info.shape)

    def add(self, key: str) -> None:
        """One tensor into the current file."""
        around, shape = self.template(key), self._tensors[key].info.shape
        sink = self._open()
        sink.write(bytes(-sink.size % ALIGNMENT))  # where a frame must begin for its values to be aligned
        start = sink.size
        try:
            sink.write(around.head)
            self._values(key, sink)
            sink.write(around.tail)
        except (Refused, OSError):
            sink.__exit__(OSError, None, None)  # given up: nothing waits for the disk
            raise
        data = start + len(around.head)
        zero = (0,) * len(shape)
        self.pieces.append(Piece(key, self._name, zero, shape, start, around.length, data, around.nbytes))
        if sink.size >= FILE_BYTES:
            self._close()

    def finish(self) -> list[FileEntry]:
        self._close()
        return self._files

    def _open(self) -> DigestSink:
        if self._sink is None:
            self._name = f"__0_{len(self._files)}.distcp"
            self._sink = DigestSink(self._storage.create(f"{self._folder}/{self._name}"))
        return self._sink

    def _close(self) -> None:
        sink, self._sink = self._sink, None
        if sink is None:
            return
        with sink:
            sink.write(bytes(-sink.size % PAGE))
        self._files.append(FileEntry(name=self._name, size=sink.size, chunks=sink.chunks))

    def _values(self, key: str, sink: DigestSink) -> None:
        imported = self._tensors[key]
        before, after = [], []
        for external, block, offsets in _blocks(imported):
            if external is not None:
                before.append(partial(external, offsets, imported.external.tensors[imported.name].shape))
            after.append(partial(block, offsets, imported.info.shape))
            put_values(sink, block)
            self._done += block.nbytes
            if self._progress:
                self._progress(self._done, self._total)
        found = combine(before)
        if imported.expected_fingerprint not in (None, found):
            reason = f"its values have fingerprint {found}, but its export wrote down {imported.expected_fingerprint}"
            raise Refused(imported.name, reason)
        self.fingerprints[key] = combine(after)


def _blocks(imported: ImportedTensor) -> Iterator[tuple[Tensor | None, Tensor, tuple[int, ...]]]:
    """As given, as written, and where; first what the source has, then zeros for rows that it lacks."""
    for block, offsets in imported.external.blocks(imported.name):
        yield block, block.to(imported.dtype), offsets
    have, want = imported.external.tensors[imported.name].shape, imported.info.shape
    if have != want:
        assert have[1:] == want[1:], "only rows can be lacking"
        assert have[0] < want[0], "only rows can be lacking"
        for span in spans((want[0] - have[0], *want[1:]), imported.dtype.itemsize):
            offsets = (span.offsets[0] + have[0], *span.offsets[1:])
            yield None, torch.zeros(span.sizes, dtype=imported.dtype), offsets
