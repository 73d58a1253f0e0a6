"""`index.json`: where every tensor's bytes lie in a checkpoint's files; `fingerprints.json`: what they are worth.

Both are ordinary files of a checkpoint, listed in its manifest, readable without torch and without unpickling. The
index of a run's layout is the same for every save, the fingerprints differ. A checkpoint that has neither (a foreign
one) is read by way of its `.metadata`.
"""

import json
import math
from dataclasses import dataclass, field

from checkpointing.errors import ManifestError

INDEX = "index.json"
FINGERPRINTS = "fingerprints.json"
INDEX_SCHEMA = "orch.index/1"
FINGERPRINTS_SCHEMA = "orch.fingerprints/1"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A whole tensor: dtype by torch's name without the prefix (`bfloat16`), global shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """One saved shard. `start` and `length` bound its torch.save record, `data` and `nbytes` its raw values.

    The values are contiguous, row by row, in the machine's byte order; `offsets` and `sizes` place them in the tensor.
    """

    key: str
    file: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    length: int
    data: int
    nbytes: int


@dataclass(frozen=True)
class Index:
    """All tensors of a checkpoint and all their pieces."""

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    pieces: tuple[Piece, ...] = ()

    def encode(self) -> bytes:
        value = {
            "schema": INDEX_SCHEMA,
            "tensors": {key: [info.dtype, info.shape] for key, info in sorted(self.tensors.items())},
            "pieces": [
                [p.key, p.file, p.offsets, p.sizes, p.start, p.length, p.data, p.nbytes]
                for p in sorted(self.pieces, key=lambda p: (p.key, p.offsets, p.file))
            ],
        }
        return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    def of(self, key: str) -> tuple[Piece, ...]:
        """The pieces of one tensor."""
        return tuple(piece for piece in self.pieces if piece.key == key)


def parse_index(data: bytes) -> Index:
    """Read `index.json`; raises ManifestError on anything that `Index.encode` would not have written."""
    try:
        value = json.loads(data)
        tensors = {key: TensorInfo(str(dtype), tuple(shape)) for key, (dtype, shape) in value["tensors"].items()}
        pieces = tuple(Piece(k, f, tuple(o), tuple(z), s, n, d, b) for k, f, o, z, s, n, d, b in value["pieces"])
        index = Index(tensors, pieces)
        for piece in pieces:
            _check(piece, tensors[piece.key])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ManifestError(f"{INDEX} is malformed: {error}") from error
    if value.get("schema") != INDEX_SCHEMA or index.encode() != data:
        raise ManifestError(f"{INDEX} is not of schema {INDEX_SCHEMA}")
    return index


def _check(piece: Piece, info: TensorInfo) -> None:
    numbers = (*piece.offsets, *piece.sizes, piece.start, piece.length, piece.data, piece.nbytes)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{piece.key}: a place is not a whole number")
    if not len(piece.offsets) == len(piece.sizes) == len(info.shape):
        raise ValueError(f"{piece.key}: a piece has another number of dimensions than its tensor")
    ends = zip(piece.offsets, piece.sizes, info.shape, strict=True)
    if any(offset + size > limit for offset, size, limit in ends):
        raise ValueError(f"{piece.key}: a piece lies outside of its tensor")
    inside = piece.start <= piece.data and piece.data + piece.nbytes <= piece.start + piece.length
    if not inside or (piece.nbytes and piece.nbytes % max(1, math.prod(piece.sizes))):
        raise ValueError(f"{piece.key}: a piece's values do not fit its frame")


def encode_fingerprints(values: dict[str, str]) -> bytes:
    """`values` maps each tensor's key to 16 hex digits."""
    value = {"schema": FINGERPRINTS_SCHEMA, "tensors": values}
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def parse_fingerprints(data: bytes) -> dict[str, str]:
    """Read `fingerprints.json`; raises ManifestError."""
    try:
        value = json.loads(data)
        tensors = {str(key): str(text) for key, text in value["tensors"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ManifestError(f"{FINGERPRINTS} is malformed: {error}") from error
    if value.get("schema") != FINGERPRINTS_SCHEMA or encode_fingerprints(tensors) != data:
        raise ManifestError(f"{FINGERPRINTS} is not of schema {FINGERPRINTS_SCHEMA}")
    return tensors
