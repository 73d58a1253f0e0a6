"""Reads what describes a checkpoint: `index.json`, or the `.metadata` of older ones; verified bytes, known classes."""

import copyreg
import io
import pickle
from collections.abc import Iterable
from dataclasses import replace
from enum import Enum
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from checkpointing.digests import digest
from checkpointing.engine.locating import locate_values
from checkpointing.engine.sources import MayLack
from checkpointing.errors import ManifestError, Refused, UnsafePickle
from checkpointing.index import INDEX, Index, Piece, TensorInfo, parse_index
from checkpointing.manifest import METADATA, FileEntry, Manifest
from checkpointing.storage import Storage

__all__ = [
    "AllowList", "MayLack", "VerifiedFile", "described", "metadata_from", "read_index", "read_metadata", "resolved",
]  # fmt: skip

_META = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_META, name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")),
    *((_META, name) for name in ("MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}
_HELD = 2


class AllowList(pickle.Unpickler):
    """Builds DCP's metadata classes and torch dtypes, nothing else: no bytes items, no callables of anyone else."""

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(io.BytesIO(data))
        self._name = name
        # What an extension code stood for once is taken from this cache without asking `find_class`.
        copyreg.clear_extension_cache()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return self._enum_member  # how Python before 3.11.4 pickles the members of an enum
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise UnsafePickle(self._name, f"{METADATA} asks for {module}.{name}, which no checkpoint needs")

    def _enum_member(self, kind: Any, member: str) -> Any:
        if not (isinstance(kind, type) and issubclass(kind, Enum) and member in kind.__members__):
            raise UnsafePickle(self._name, f"{METADATA} asks for an attribute {member!r}, which no checkpoint needs")
        return kind.__members__[member]


class VerifiedFile:
    """Ranges of one file, every chunk compared with its digest as it is read; keeps the last chunks."""

    def __init__(self, stream: BinaryIO, entry: FileEntry, name: str) -> None:
        self._stream, self._entry, self._name = stream, entry, name
        self._held: dict[int, bytes] = {}

    def read(self, offset: int, length: int) -> bytes:
        """Exactly these bytes; raises Refused when the file has others, or fewer."""
        size = self._entry.chunk_size
        if offset < 0 or length < 0 or offset + length > self._entry.size:
            raise Refused(self._name, f"{self._entry.name} has no bytes {offset}..{offset + length}")
        pieces = []
        while length > 0:
            start = offset % size
            piece = self._chunk(offset // size)[start : start + length]
            pieces.append(piece)
            offset, length = offset + len(piece), length - len(piece)
        return b"".join(pieces)

    def _chunk(self, index: int) -> bytes:
        if index not in self._held:
            start = index * self._entry.chunk_size
            self._stream.seek(start)
            data = self._stream.read(min(self._entry.chunk_size, self._entry.size - start))
            if digest(data) != self._entry.chunks[index]:
                raise Refused(self._name, f"{self._entry.name} chunk {index}: digest differs")
            while len(self._held) >= _HELD:
                self._held.pop(next(iter(self._held)))
            self._held[index] = data
        return self._held[index]


def _read(storage: Storage, manifest: Manifest, file: str) -> bytes:
    entry = manifest.file(file)
    assert entry is not None
    with storage.open(f"{manifest.name}/{file}") as stream:
        return VerifiedFile(stream, entry, manifest.name).read(0, entry.size)


def read_index(storage: Storage, manifest: Manifest) -> Index:
    """`index.json` from verified bytes; raises Refused or OSError."""
    try:
        return parse_index(_read(storage, manifest, INDEX))
    except ManifestError as error:
        raise Refused(manifest.name, str(error)) from error


def read_metadata(storage: Storage, manifest: Manifest) -> Metadata:
    """Unpickle `.metadata` from verified bytes through the allow-list; raises Refused (UnsafePickle) or OSError."""
    return metadata_from(_read(storage, manifest, METADATA), manifest.name)


def metadata_from(data: bytes, name: str, kind: type[AllowList] = AllowList) -> Metadata:
    """Unpickle a `.metadata` through an allow-list; raises Refused (UnsafePickle)."""
    try:
        metadata = kind(data, name).load()
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise Refused(name, f"{METADATA} is malformed: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise Refused(name, f"{METADATA} does not describe a checkpoint")
    return metadata


def described(metadata: Metadata) -> Index:
    """The tensors and frames that `.metadata` tells of; where the values lie in the frames it does not say."""
    tensors = {
        key: TensorInfo(str(saved.properties.dtype).removeprefix("torch."), tuple(saved.size))
        for key, saved in metadata.state_dict_metadata.items()
        if isinstance(saved, TensorStorageMetadata)
    }
    sizes = {
        (key, tuple(chunk.offsets)): tuple(chunk.sizes)
        for key in tensors
        for chunk in metadata.state_dict_metadata[key].chunks
    }
    pieces = []
    for at, place in metadata.storage_data.items():
        key, offsets = at.fqn, tuple(at.offset or ())
        if (key, offsets) in sizes:
            frame = (place.relative_path, offsets, sizes[key, offsets], place.offset, place.length)
            pieces.append(Piece(key, *frame, 0, 0))
    return Index(tensors, tuple(sorted(pieces, key=lambda piece: (piece.file, piece.start))))


def resolved(storage: Storage, manifest: Manifest, index: Index, files: Iterable[str]) -> list[Piece]:
    """The pieces in `files` with the places of their values, by way of verified frames; raises Refused or OSError."""
    found = []
    for file in files:
        entry = manifest.file(file)
        if entry is None:
            raise Refused(manifest.name, f"{METADATA} names {file}, which the manifest does not list")
        with storage.open(f"{manifest.name}/{file}") as stream:
            verified = VerifiedFile(stream, entry, manifest.name)
            found += [_placed(verified, manifest.name, piece) for piece in index.pieces if piece.file == file]
    return found


def _placed(verified: VerifiedFile, name: str, piece: Piece) -> Piece:
    try:
        data, nbytes = locate_values(verified.read, piece.start, piece.length)
    except ValueError as error:
        raise Refused(name, f"{piece.file} has no whole frame of {piece.key} at {piece.start}: {error}") from error
    return replace(piece, data=data, nbytes=nbytes)
