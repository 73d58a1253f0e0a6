"""DCP checkpoints of other tools: their bytes have no digests, so they are read only if the user allows it.

Their `.metadata` is unpickled with the same allow-list, and values are located through the records around them, whose
descriptions are read with substitute classes. A tensor in another form than a plain row of values is left to
torch.load, weights only.
"""

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from checkpointing.engine.restore.metadata_reader import AllowList, index_from_metadata, parse_metadata
from checkpointing.engine.restore.source import LoadSource, number_chunks, parse_dtype
from checkpointing.errors import CheckpointRefused
from checkpointing.format.commit import parse_name
from checkpointing.format.manifest import COMMIT, MANIFEST, METADATA, Index, Piece
from checkpointing.format.torch_record import make_reader, read_record
from checkpointing.storage.backends import Storage
from checkpointing.storage.digests import CHUNK

_BYTES_ITEM = ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata")
_PATHS = ("pathlib", "pathlib._local")
_STEP = re.compile(r"(\d+)$")


class ForeignAllowList(AllowList):
    """Allow-list that also accepts non-tensor items in order to skip them; their contents are never unpickled."""

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
    """Return folders with `.metadata` that orch did not write, highest number at the end of the name first."""
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


@dataclass(frozen=True)
class Described:
    """Index read from `.metadata`, with the sizes of the files that it names."""

    index: Index
    sizes: Mapping[str, int]


def describe(storage: Storage, name: str) -> Described:
    """Read the `.metadata` of a folder; raises Refused or OSError."""
    with storage.open(f"{name}/{METADATA}" if name else METADATA) as stream:
        data = stream.read()
    index = index_from_metadata(parse_metadata(data, name, ForeignAllowList))
    sizes = {file: size for file, size in storage.list(name).items() if size is not None}
    for piece in index.pieces:
        if piece.file not in sizes:
            raise CheckpointRefused(name, f"{METADATA} names {piece.file}, which is not there")
        if piece.start + piece.length > sizes[piece.file]:
            raise CheckpointRefused(name, f"{piece.file} has no bytes {piece.start}..{piece.start + piece.length}")
    return Described(index, {file: sizes[file] for file in sorted({piece.file for piece in index.pieces})})


def build_source(storage: Storage, name: str, told: Described) -> LoadSource:
    """Return the source of a foreign checkpoint; its chunks have no digests. Raises Refused or OSError."""
    pieces, odd = [], dict[int, Callable[[], Tensor]]()
    for number, piece in enumerate(told.index.pieces):
        dtype = told.index.tensors[piece.key].dtype
        located = _locate_piece(storage, name, piece, dtype)
        if located is None:
            odd[number] = partial(_load_piece, storage, name, piece, dtype)
        pieces.append(located or replace(piece, data=piece.start))
    return LoadSource(
        name=name,
        shards=number_chunks((file, size, CHUNK, None) for file, size in told.sizes.items()),
        index=Index(told.index.tensors, tuple(pieces)),
        open=lambda file: storage.open(f"{name}/{file}" if name else file),
        seen=frozenset(told.sizes),
        odd=odd,
    )


def _locate_piece(storage: Storage, name: str, piece: Piece, dtype: str) -> Piece | None:
    """Return the piece with the position of its values, or None if they are not one plain row."""
    try:
        with storage.open(f"{name}/{piece.file}" if name else piece.file) as stream:
            record = read_record(make_reader(stream), piece.start, piece.length)
    except ValueError:
        return None
    if (record.dtype, record.shape) != (dtype, piece.sizes):
        return None
    return replace(piece, data=piece.start + record.data, nbytes=record.nbytes)


def _load_piece(storage: Storage, name: str, piece: Piece, dtype: str) -> Tensor:
    """Load a tensor that is a view, quantized, or in a custom format; raises Refused if it does not match."""
    with storage.open(f"{name}/{piece.file}" if name else piece.file) as stream:
        stream.seek(piece.start)
        data = stream.read(piece.length)
    tensor: Tensor = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    fits = isinstance(tensor, Tensor) and tensor.dtype == parse_dtype(dtype) and tuple(tensor.shape) == piece.sizes
    if not fits or tensor.layout != torch.strided:
        raise CheckpointRefused(
            name, f"{piece.key}: what {piece.file} holds is not the tensor that {METADATA} describes"
        )
    return tensor.detach()
