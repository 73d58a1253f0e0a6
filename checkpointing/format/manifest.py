"""A checkpoint's `manifest.json`, `index.json` and `fingerprints.json`.

The index and the fingerprints are files of a checkpoint. They are listed in its manifest and can be read without torch
and without unpickling. The index is identical for every save with the same layout; the fingerprints differ. Other
tools' checkpoints have neither and are read through their `.metadata`.
"""

import json
import math
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from checkpointing.errors import ManifestError
from checkpointing.storage.digests import CHUNK, Bytes, digest
from checkpointing.storage.durable import canonical

INDEX = "index.json"
FINGERPRINTS = "fingerprints.json"
INDEX_SCHEMA = "orch.index/1"
FINGERPRINTS_SCHEMA = "orch.fingerprints/1"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A whole tensor: its dtype, as torch names it but without the prefix (`bfloat16`), and its global shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A saved shard. `start` and `length` bound its torch.save record, `data` and `nbytes` its raw values.

    The values are contiguous, row by row, in the machine's byte order; `offsets` and `sizes` locate them in the tensor.
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
        return canonical(value)


def parse_index(data: bytes) -> Index:
    """Parse `index.json`. Raises ManifestError for anything that `Index.encode` would not have written."""
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
        raise ManifestError(f"{INDEX} does not have schema {INDEX_SCHEMA}")
    return index


def _check(piece: Piece, info: TensorInfo) -> None:
    numbers = (*piece.offsets, *piece.sizes, piece.start, piece.length, piece.data, piece.nbytes)
    if any(type(number) is not int or number < 0 for number in numbers):
        raise ValueError(f"{piece.key}: a position or size is not an integer")
    if not len(piece.offsets) == len(piece.sizes) == len(info.shape):
        raise ValueError(f"{piece.key}: a piece and its tensor have different numbers of dimensions")
    ends = zip(piece.offsets, piece.sizes, info.shape, strict=True)
    if any(offset + size > limit for offset, size, limit in ends):
        raise ValueError(f"{piece.key}: a piece lies outside its tensor")
    inside = piece.start <= piece.data and piece.data + piece.nbytes <= piece.start + piece.length
    if not inside or (piece.nbytes and piece.nbytes % max(1, math.prod(piece.sizes))):
        raise ValueError(f"{piece.key}: a piece's values do not fit its frame")


def encode_fingerprints(values: dict[str, str]) -> bytes:
    """Return `fingerprints.json`; `values` maps each tensor's key to 16 hex digits."""
    value = {"schema": FINGERPRINTS_SCHEMA, "tensors": values}
    return canonical(value)


def parse_fingerprints(data: bytes) -> dict[str, str]:
    """Parse `fingerprints.json`. Raises ManifestError."""
    try:
        value = json.loads(data)
        tensors = {str(key): str(text) for key, text in value["tensors"].items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ManifestError(f"{FINGERPRINTS} is malformed: {error}") from error
    if value.get("schema") != FINGERPRINTS_SCHEMA or encode_fingerprints(tensors) != data:
        raise ManifestError(f"{FINGERPRINTS} does not have schema {FINGERPRINTS_SCHEMA}")
    return tensors


MANIFEST = "manifest.json"
COMMIT = "COMMIT"
METADATA = ".metadata"
SCHEMA = "orch.manifest/1"

_HEX = re.compile(r"[0-9a-f]{32}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,255}")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A checkpoint file. `chunks` are the xxh3-128 digests of `chunk_size` bytes each (the last may be shorter)."""

    name: str
    size: int
    chunks: tuple[str, ...]
    chunk_size: int = CHUNK

    def __post_init__(self) -> None:
        # A name that leads out of the folder, or an entry for COMMIT or the manifest itself, would escape verification.
        if not _FILE_NAME.fullmatch(self.name) or self.name in (".", "..", COMMIT, MANIFEST):
            raise ValueError(f"file name {self.name!r} is not allowed in a checkpoint")
        if type(self.size) is not int or type(self.chunk_size) is not int or self.size < 0 or self.chunk_size < 1:
            raise ValueError(f"{self.name}: invalid size {self.size!r} or chunk size {self.chunk_size!r}")
        if len(self.chunks) != -(-self.size // self.chunk_size):
            raise ValueError(f"{self.name}: {len(self.chunks)} digests for {self.size} bytes")
        if not all(isinstance(chunk, str) and _HEX.fullmatch(chunk) for chunk in self.chunks):
            raise ValueError(f"{self.name}: a digest is not 32 hex digits")

    @classmethod
    def from_bytes(cls, name: str, data: Bytes, chunk_size: int = CHUNK) -> "FileEntry":
        chunks = tuple(digest(data[at : at + chunk_size]) for at in range(0, len(data), chunk_size))
        return cls(name=name, size=len(data), chunks=chunks, chunk_size=chunk_size)


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of one checkpoint. `extra` is the caller's own state as JSON (data position, sizes, names)."""

    name: str
    step: int
    attempt: int
    nonce: str
    created_at: float
    torch: str
    world: dict[str, Any]
    files: tuple[FileEntry, ...]
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Total bytes of all files that the manifest lists."""
        return sum(entry.size for entry in self.files)

    def file(self, name: str) -> FileEntry | None:
        return next((entry for entry in self.files if entry.name == name), None)

    def _fields(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @property
    def digest(self) -> str:
        """Digest of the manifest's contents, stored in the file itself to reveal a torn or edited manifest."""
        return digest(canonical(self._fields()))

    def encode(self) -> bytes:
        """Return canonical JSON that includes the manifest's own digest."""
        return canonical({**self._fields(), "digest": self.digest})


def parse(data: bytes) -> Manifest:
    """Parse a manifest. Raises ManifestError for anything that `Manifest.encode` would not have written."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{MANIFEST} is not JSON (torn or damaged): {error}") from error
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        raise ManifestError(f"{MANIFEST} does not have schema {SCHEMA}")
    claimed = fields.pop("digest", None)
    if claimed != digest(canonical(fields)):
        raise ManifestError(f"{MANIFEST} does not match its own digest (torn or edited)")
    fields.pop("schema")
    try:
        files = tuple(FileEntry(**{**entry, "chunks": tuple(entry["chunks"])}) for entry in fields.pop("files"))
        manifest = Manifest(**fields, files=files)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ManifestError(f"{MANIFEST} is malformed: {error}") from error
    if manifest.encode() != data:
        raise ManifestError(f"{MANIFEST} is not in canonical form")
    return _check_manifest(manifest)


def _check_manifest(manifest: Manifest) -> Manifest:
    names = [entry.name for entry in manifest.files]
    if len(set(names)) != len(names):
        raise ManifestError(f"{MANIFEST} lists a file twice")
    if METADATA not in names:
        raise ManifestError(f"{MANIFEST} does not list {METADATA}")
    if type(manifest.step) is not int or type(manifest.attempt) is not int or not isinstance(manifest.extra, dict):
        raise ManifestError(f"{MANIFEST} is malformed: step, attempt or extra has the wrong type")
    return manifest
