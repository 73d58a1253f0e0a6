"""Checkpoints built from tensors: any sharding, and any inconsistency in their description."""

import io
import math
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    # torch complains once, when it is imported, that NumPy is not there; orch does not use it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    import torch
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

from checkpointing.engine.state.fingerprints import fingerprint
from checkpointing.format.commit import checkpoint_name, seal, write_file
from checkpointing.format.manifest import (
    FINGERPRINTS,
    INDEX,
    METADATA,
    Index,
    Manifest,
    Piece,
    TensorInfo,
    encode_fingerprints,
)
from checkpointing.format.torch_record import make_reader, read_record
from checkpointing.storage.backends import LocalStorage

NONCE = "ab12cd34"
Box = tuple[tuple[int, ...], tuple[int, ...]]


def rows(shape: Sequence[int], parts: int) -> list[Box]:
    """Boxes of one shape, cut along the first dimension."""
    return _cut(shape, parts, 0)


def columns(shape: Sequence[int], parts: int) -> list[Box]:
    """Boxes of one shape, cut along the second dimension."""
    return _cut(shape, parts, 1)


def _cut(shape: Sequence[int], parts: int, dimension: int) -> list[Box]:
    step = -(-shape[dimension] // parts)
    boxes = []
    for start in range(0, shape[dimension], step):
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[dimension], sizes[dimension] = start, min(step, shape[dimension] - start)
        boxes.append((tuple(offsets), tuple(sizes)))
    return boxes


@dataclass
class Built:
    """A checkpoint that is not written yet: change what you like, then `write`."""

    tensors: dict[str, torch.Tensor]
    index: Index
    metadata: Metadata
    files: dict[str, bytes]
    fingerprints: dict[str, str] | None
    extra: dict[str, Any] = field(default_factory=dict)
    world: dict[str, Any] = field(default_factory=lambda: {"ranks": 1})
    nonce: str = NONCE

    def pieces(self, change: Callable[[Piece], Piece | None]) -> None:
        """Change what the index says of shards; None leaves one out."""
        self.index = Index(self.index.tensors, tuple(new for piece in self.index.pieces if (new := change(piece))))

    def write(self, root: Path, step: int = 5) -> Path:
        """Seal it as it is; returns its folder."""
        storage, name = LocalStorage(root), checkpoint_name(step, 1, self.nonce)
        files = {**self.files, METADATA: pickle.dumps(self.metadata), INDEX: self.index.encode()}
        if self.fingerprints is not None:
            files[FINGERPRINTS] = encode_fingerprints(self.fingerprints)
        entries = [write_file(storage, name, file, data) for file, data in files.items()]
        manifest = Manifest(
            name=name, step=step, attempt=1, nonce=self.nonce, created_at=1000.0, torch=torch.__version__,
            world=self.world, files=tuple(entries), extra=self.extra,
        )  # fmt: skip
        seal(storage, manifest, lambda: True, 1000.0)
        return root / name


def build(tensors: Mapping[str, torch.Tensor], boxes: Mapping[str, Sequence[Box]] | None = None) -> Built:
    """A sound checkpoint: the shards of `boxes` one to a rank, other tensors whole in the file of rank 0."""
    streams: dict[int, io.BytesIO] = {}
    pieces, storage_data = [], {}
    for key, tensor in tensors.items():
        whole = [((0,) * tensor.ndim, tuple(tensor.shape))]
        for rank, (offsets, sizes) in enumerate((boxes or {}).get(key, whole)):
            part = tensor
            for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
                part = part.narrow(dimension, offset, size)
            piece = _put(streams.setdefault(rank, io.BytesIO()), f"__{rank}_0.distcp", key, part.clone(), offsets)
            pieces.append(piece)
            storage_data[MetadataIndex(key, torch.Size(offsets))] = _StorageInfo(piece.file, piece.start, piece.length)
    infos = {key: TensorInfo(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for key, t in tensors.items()}
    described = {key: _described(tensor, [p for p in pieces if p.key == key]) for key, tensor in tensors.items()}
    return Built(
        tensors=dict(tensors),
        index=Index(infos, tuple(pieces)),
        metadata=Metadata(state_dict_metadata=dict(described), storage_data=storage_data),
        files={f"__{rank}_0.distcp": stream.getvalue() for rank, stream in streams.items()},
        fingerprints={key: fingerprint(tensor) for key, tensor in tensors.items()},
    )


def _put(stream: io.BytesIO, file: str, key: str, part: torch.Tensor, offsets: tuple[int, ...]) -> Piece:
    start = stream.tell()
    saved = io.BytesIO()
    torch.save(part, saved)
    stream.write(saved.getvalue())
    template = read_record(make_reader(saved), 0, len(saved.getvalue()))
    assert template.nbytes == math.prod(part.shape) * part.itemsize
    length = len(saved.getvalue())
    return Piece(key, file, offsets, tuple(part.shape), start, length, start + template.data, template.nbytes)


def _described(tensor: torch.Tensor, pieces: Sequence[Piece]) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=tensor.dtype),
        size=tensor.shape,
        chunks=[ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes)) for piece in pieces],
    )
