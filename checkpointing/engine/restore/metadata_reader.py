"""Readers for a checkpoint's index and for DCP's `.metadata`, which is unpickled through an allow-list of classes.

Other tools' DCP checkpoints have no digests, so they are read only if the user allows it. Their values are located
through the records around them, whose descriptions are read with substitute classes. A tensor that is not stored as
plain contiguous values is left to torch.load, weights only.
"""

import copyreg
import io
import pickle
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpointing.engine.restore.source import LoadSource, number_chunks, parse_dtype
from checkpointing.errors import CheckpointRefused, ManifestError, UnsafePickle
from checkpointing.format.commit import parse_name
from checkpointing.format.manifest import (
    COMMIT,
    INDEX,
    MANIFEST,
    METADATA,
    FileEntry,
    Index,
    Manifest,
    Piece,
    TensorInfo,
    parse_index,
)
from checkpointing.format.torch_record import make_reader, read_record
from checkpointing.storage.backends import Storage
from checkpointing.storage.digests import CHUNK, digest
from checkpointing.verification.verify import read_listed

_META = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_META, name) for name in ("Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata")),
    *((_META, name) for name in ("MetadataIndex", "StorageMeta")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_LAYOUT, _FORMAT = ("torch.serialization", "_get_layout"), (_META, "_MEM_FORMAT_ENCODING")
_HELD = 2
_MALFORMED = (
    pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RuntimeError,
    MemoryError, ImportError,
)  # fmt: skip


class AllowList(pickle.Unpickler):
    """Unpickler limited to DCP's metadata classes and torch dtypes. It allows no bytes items and no other callables.

    A pickle can set attributes on everything that it names, so it gets private objects: subclasses of these classes,
    and substitutes for two functions, which return a layout or memory format just as the pickle names it.
    """

    def __init__(self, data: bytes, name: str) -> None:
        super().__init__(io.BytesIO(data))
        self._name = name
        self._made: dict[str, type] = {}
        self._format = lambda value: value
        # Extension codes resolved earlier come from this cache and bypass `find_class`.
        copyreg.clear_extension_cache()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            # Python before 3.11.4 pickles enum members this way.
            return lambda kind, member: self._enum_member(kind, member)
        if (module, name) in _ALLOWED:
            if name not in self._made:
                self._made[name] = _lenient_subclass(super().find_class(module, name))
            return self._made[name]
        if (module, name) == _FORMAT:
            return self._format
        if (module, name) == _LAYOUT:
            return lambda layout: layout
        found = getattr(torch, name, None) if module == "torch" else None
        if isinstance(found, torch.dtype) or found is torch.Size:
            return found
        raise UnsafePickle(self._name, f"{METADATA} requests {module}.{name}, which no checkpoint needs")

    def _enum_member(self, kind: Any, member: Any) -> Any:
        if kind is not self._format or member not in _MEM_FORMAT_ENCODING.__members__:
            raise UnsafePickle(self._name, f"{METADATA} requests an attribute {member!r}, which no checkpoint needs")
        return member


def _lenient_subclass(kind: type) -> type:
    """Return a subclass whose instances load their state as the class does, but only the parts that we read."""

    def take(self: Any, state: Any) -> None:
        if issubclass(kind, TensorProperties):
            state = {"dtype": state[0]}
        vars(self).update(state)

    return type(kind.__name__, (kind,), {"__setstate__": take})


class VerifiedFile:
    """Reads byte ranges from one file, checking every chunk against its digest. Keeps the most recent chunks."""

    def __init__(self, stream: BinaryIO, entry: FileEntry, name: str) -> None:
        self._stream, self._entry, self._name = stream, entry, name
        self._held: dict[int, bytes] = {}

    def read(self, offset: int, length: int) -> bytes:
        """Return these bytes.

        Raises CheckpointRefused if they do not match their digests or the file ends too early.
        """
        size = self._entry.chunk_size
        if offset < 0 or length < 0 or offset + length > self._entry.size:
            raise CheckpointRefused(self._name, f"{self._entry.name} has no bytes {offset}..{offset + length}")
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
                raise CheckpointRefused(self._name, f"{self._entry.name} chunk {index}: digest differs")
            while len(self._held) >= _HELD:
                self._held.pop(next(iter(self._held)))
            self._held[index] = data
        return self._held[index]


def read_index(storage: Storage, manifest: Manifest) -> Index:
    """Return a checkpoint's index from verified bytes. Raises CheckpointRefused or OSError."""
    try:
        return parse_index(read_listed(storage, manifest, INDEX))
    except ManifestError as error:
        raise CheckpointRefused(manifest.name, str(error)) from error


def read_metadata(storage: Storage, manifest: Manifest) -> Metadata:
    """Unpickle `.metadata` from verified bytes through the allow-list. Raises CheckpointRefused or OSError."""
    try:
        data = read_listed(storage, manifest, METADATA)
    except ManifestError as error:
        raise CheckpointRefused(manifest.name, str(error)) from error
    return parse_metadata(data, manifest.name)


def parse_metadata(data: bytes, name: str, kind: type[AllowList] = AllowList) -> Metadata:
    """Unpickle `.metadata` through an allow-list, for `index_from_metadata`. Raises CheckpointRefused."""
    try:
        metadata = kind(data, name).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise CheckpointRefused(name, f"{METADATA} does not describe a checkpoint")
        index_from_metadata(metadata)
    except _MALFORMED as error:
        raise CheckpointRefused(name, f"{METADATA} is malformed: {error}") from error
    return metadata


def index_from_metadata(metadata: Metadata) -> Index:
    """Return the tensors and records that `.metadata` lists. It does not say where in a record the values are."""
    items = metadata.state_dict_metadata.items()
    saved = {key: item for key, item in items if isinstance(item, TensorStorageMetadata)}
    tensors = {
        key: TensorInfo(str(item.properties.dtype).removeprefix("torch."), _whole(item.size))
        for key, item in saved.items()
    }
    sizes = {
        (key, _whole(chunk.offsets, len(info.shape))): _whole(chunk.sizes, len(info.shape))
        for key, info in tensors.items()
        for chunk in saved[key].chunks
    }
    pieces = []
    for at, place in metadata.storage_data.items():
        key, offsets = at.fqn, tuple(at.offset or ())
        if (key, offsets) in sizes:
            start, length = _whole((place.offset, place.length))
            pieces.append(Piece(key, str(place.relative_path), offsets, sizes[key, offsets], start, length, 0, 0))
    return Index(tensors, tuple(sorted(pieces, key=lambda piece: (piece.file, piece.start))))


def _whole(numbers: Iterable[Any], count: int | None = None) -> tuple[int, ...]:
    """Return the numbers as a tuple. Raises ValueError unless they are `count` non-negative integers."""
    found = tuple(numbers)
    if any(type(number) is not int or number < 0 for number in found) or count not in (None, len(found)):
        raise ValueError(f"{found} is not a position or size")
    return found


_BYTES_ITEM = (_META, "BytesStorageMetadata")
_PATHS = ("pathlib", "pathlib._local")
_STEP = re.compile(r"(\d+)$")


class ForeignAllowList(AllowList):
    """Allow-list that also accepts non-tensor items, but only to skip them. Their contents are never unpickled."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == _BYTES_ITEM or module in _PATHS:
            return _Leftover
        return super().find_class(module, name)


class _Leftover:
    """Substitute for a non-tensor item, and for the path where the checkpoint was written."""

    def __init__(self, *_: Any) -> None:
        return

    def __setstate__(self, state: Any) -> None:
        return


def foreign_names(storage: Storage) -> list[str]:
    """Return the folders with `.metadata` that orch did not write, highest trailing number first."""
    found = []
    for name, size in storage.list("").items():
        if size is not None or parse_name(name) is not None:
            continue
        files = storage.list(name)
        if METADATA in files and not {MANIFEST, COMMIT} & files.keys():
            found.append(name)
    return sorted(found, key=lambda name: (parse_step(name), name), reverse=True)


def parse_step(name: str) -> int:
    """Return the number at the end of a folder's name (`step-1000`, `iter_0001000`), or 0."""
    match = _STEP.search(name)
    return int(match.group(1)) if match else 0


def open_foreign(storage: Storage, name: str) -> LoadSource:
    """Return a foreign checkpoint as a source whose chunks have no digests. Raises CheckpointRefused or OSError."""
    with storage.open(f"{name}/{METADATA}" if name else METADATA) as stream:
        data = stream.read()
    index = index_from_metadata(parse_metadata(data, name, ForeignAllowList))
    present = {file: size for file, size in storage.list(name).items() if size is not None}
    pieces, odd = [], dict[int, Callable[[], Tensor]]()
    for number, piece in enumerate(index.pieces):
        if piece.file not in present:
            raise CheckpointRefused(name, f"{METADATA} names {piece.file}, which is missing")
        if piece.start + piece.length > present[piece.file]:
            raise CheckpointRefused(name, f"{piece.file} has no bytes {piece.start}..{piece.start + piece.length}")
        dtype = index.tensors[piece.key].dtype
        located = _locate_foreign(storage, name, piece, dtype)
        if located is None:
            odd[number] = partial(_load_piece, storage, name, piece, dtype)
        pieces.append(located or replace(piece, data=piece.start))
    files = sorted({piece.file for piece in pieces})
    return LoadSource(
        name=name,
        shards=number_chunks((file, present[file], CHUNK, None) for file in files),
        index=Index(index.tensors, tuple(pieces)),
        open=lambda file: storage.open(f"{name}/{file}" if name else file),
        seen=frozenset(files),
        odd=odd,
    )


def _locate_foreign(storage: Storage, name: str, piece: Piece, dtype: str) -> Piece | None:
    """Return the piece with the position of its values filled in, or None if they are not stored contiguously."""
    try:
        with storage.open(f"{name}/{piece.file}" if name else piece.file) as stream:
            record = read_record(make_reader(stream), piece.start, piece.length)
    except ValueError:
        return None
    if (record.dtype, record.shape) != (dtype, piece.sizes):
        return None
    return replace(piece, data=piece.start + record.data, nbytes=record.nbytes)


def _load_piece(storage: Storage, name: str, piece: Piece, dtype: str) -> Tensor:
    """Load a tensor that is a view, quantized, or in a custom format. Raises CheckpointRefused if it does not match."""
    with storage.open(f"{name}/{piece.file}" if name else piece.file) as stream:
        stream.seek(piece.start)
        data = stream.read(piece.length)
    tensor: Tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    fits = isinstance(tensor, Tensor) and tensor.dtype == parse_dtype(dtype) and tuple(tensor.shape) == piece.sizes
    if not fits or tensor.layout != torch.strided:
        raise CheckpointRefused(name, f"{piece.key}: the tensor in {piece.file} does not match {METADATA}")
    return tensor.detach()
