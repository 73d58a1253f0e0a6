"""`manifest.json`: what a checkpoint consists of, with a digest for every chunk and one for itself."""

import json
import re
from dataclasses import asdict, dataclass, field
from typing import Any

from checkpointing.errors import ManifestError
from checkpointing.storage.digests import CHUNK, digest
from checkpointing.storage.durable import canonical

MANIFEST = "manifest.json"
COMMIT = "COMMIT"
METADATA = ".metadata"
SCHEMA = "orch.manifest/1"

_HEX = re.compile(r"[0-9a-f]{32}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,255}")


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a checkpoint; `chunks` are xxh3-128 digests of `chunk_size` bytes each, the last may be shorter."""

    name: str
    size: int
    chunks: tuple[str, ...]
    chunk_size: int = CHUNK

    def __post_init__(self) -> None:
        # A name that leaves the folder, or a seal that vouches for itself, would escape verification.
        if not _FILE_NAME.fullmatch(self.name) or self.name in (".", "..", COMMIT, MANIFEST):
            raise ValueError(f"file name {self.name!r} is not one of a checkpoint")
        if type(self.size) is not int or type(self.chunk_size) is not int or self.size < 0 or self.chunk_size < 1:
            raise ValueError(f"{self.name}: size {self.size!r} in chunks of {self.chunk_size!r} bytes makes no sense")
        if len(self.chunks) != -(-self.size // self.chunk_size):
            raise ValueError(f"{self.name}: {len(self.chunks)} digests for {self.size} bytes")
        if not all(isinstance(chunk, str) and _HEX.fullmatch(chunk) for chunk in self.chunks):
            raise ValueError(f"{self.name}: a digest is not 32 hex digits")


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of one checkpoint; `extra` is the caller's own state in JSON (data position, sizes, names)."""

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
        """Bytes of all files that the manifest lists."""
        return sum(entry.size for entry in self.files)

    def file(self, name: str) -> FileEntry | None:
        return next((entry for entry in self.files if entry.name == name), None)

    def _fields(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}

    @property
    def digest(self) -> str:
        """Digest of the manifest's content; stands inside the file and makes a torn or edited one evident."""
        return digest(canonical(self._fields()))

    def encode(self) -> bytes:
        """Canonical JSON with the self digest."""
        return canonical({**self._fields(), "digest": self.digest})


def parse(data: bytes) -> Manifest:
    """Read a manifest; raises ManifestError on anything that `Manifest.encode` would not have written."""
    try:
        fields = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"{MANIFEST} is not JSON (torn or damaged): {error}") from error
    if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
        raise ManifestError(f"{MANIFEST} is not of schema {SCHEMA}")
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
    return _checked(manifest)


def _checked(manifest: Manifest) -> Manifest:
    names = [entry.name for entry in manifest.files]
    if len(set(names)) != len(names):
        raise ManifestError(f"{MANIFEST} lists a file twice")
    if METADATA not in names:
        raise ManifestError(f"{MANIFEST} does not list {METADATA}")
    if type(manifest.step) is not int or type(manifest.attempt) is not int or not isinstance(manifest.extra, dict):
        raise ManifestError(f"{MANIFEST} is malformed: step, attempt or extra has the wrong type")
    return manifest
