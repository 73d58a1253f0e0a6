"""Checkpoint names, node files, and the commit point: data first, marker last.

Ranks write to their regions concurrently and digest their own data, so no rank reads another's bytes.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from checkpointing.errors import FencedOff, ManifestError
from checkpointing.format.manifest import COMMIT, MANIFEST, FileEntry, Manifest
from checkpointing.storage.backends import Storage
from checkpointing.storage.digests import CHUNK, DigestSink, digest
from checkpointing.storage.durable import canonical

Places = Mapping[str, tuple[str, int]]
"""Where each of a rank's files is, keyed by name: the node's file and the offset in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A rank's file within its node's file; `filled` is the digest of its last chunk, zero-padded to full size."""

    file: str
    at: int
    entry: FileEntry
    filled: str

    @classmethod
    def from_entry(cls, entry: FileEntry, filled: str, places: Places) -> "Region":
        file, at = places[entry.name]
        return cls(file=file, at=at, entry=entry, filled=filled)


def file_name(node: int) -> str:
    """Return the name of a node's file; `node` is its index among the nodes that save."""
    return f"__node{node}.distcp"


def assign_places(sizes: Sequence[Mapping[str, int]], leads_node: Sequence[bool]) -> list[Places]:
    """Return the positions of every rank's files, given their sizes. A node's ranks come right after its leader."""
    found: list[Places] = []
    node, end = -1, 0
    for files, leads in zip(sizes, leads_node, strict=True):
        if leads or node < 0:
            node, end = node + 1, 0
        places = {}
        for name, size in files.items():
            places[name] = (file_name(node), end)
            end += -(-size // CHUNK) * CHUNK
        found.append(places)
    return found


def join_regions(regions: Sequence[Region]) -> list[FileEntry]:
    """Return the file entries for the nodes' files. Raises ValueError if the regions are not contiguous."""
    by_file: dict[str, list[Region]] = {}
    for region in sorted(regions, key=lambda region: region.at):
        by_file.setdefault(region.file, []).append(region)
    return [_join_parts(file, parts) for file, parts in by_file.items()]


def _join_parts(file: str, parts: Sequence[Region]) -> FileEntry:
    chunks: list[str] = []
    for part, after in zip(parts, (*parts[1:], None), strict=True):
        if part.at != len(chunks) * CHUNK or part.entry.chunk_size != CHUNK:
            raise ValueError(f"{file}: {part.entry.name} does not begin where the region before it ends")
        chunks += part.entry.chunks if after is None else (*part.entry.chunks[:-1], part.filled)
    last = parts[-1]
    return FileEntry(name=file, size=last.at + last.entry.size, chunks=tuple(chunks))


SCHEMA = "orch.commit/1"
DELETED = "DELETED"
"""Tombstone, published before COMMIT is deleted and itself deleted last.

A folder that has one is no longer a checkpoint.
"""

_NAME = re.compile(r"step-(\d{8,})\.(\d{3,})-([0-9a-z]{1,32})(?:-(\d{1,4}))?")
_HEX = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True, order=True)
class Name:
    """The parts of a checkpoint's name. `take` counts from 1 and grows with the attempt's restarts."""

    step: int
    attempt: int
    take: int = 1
    nonce: str

    def __str__(self) -> str:
        return checkpoint_name(self.step, self.attempt, self.nonce, self.take)


def checkpoint_name(step: int, attempt: int, nonce: str, take: int = 1) -> str:
    """Return a name such as `step-00000500.001-ab12cd34`; saves after the first restart end in `-2`, then `-3`, ..."""
    again = f"-{take}" if take > 1 else ""
    return f"step-{step:08d}.{attempt:03d}-{nonce}{again}"


def parse_name(name: str) -> Name | None:
    """Return the parts of a name, or None if `checkpoint_name` cannot have returned it."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    step, attempt, nonce, take = match.groups()
    parts = Name(step=int(step), attempt=int(attempt), nonce=nonce, take=int(take or 1))
    return parts if str(parts) == name else None


def fresh_name(step: int, attempt: int, nonce: str, taken: Iterable[str], first: int = 1) -> str:
    """Return the first unused name for this step, starting with take `first`. No folder is ever written twice."""
    bearers, take = set(taken), first
    while checkpoint_name(step, attempt, nonce, take) in bearers:
        take += 1
    return checkpoint_name(step, attempt, nonce, take)


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The marker that makes a checkpoint exist. `manifest` is the digest of its manifest's bytes."""

    manifest: str
    size: int
    committed_at: float

    def encode(self) -> bytes:
        """Return canonical JSON that includes its own digest, so that damage to the marker is detected too."""
        fields = {"schema": SCHEMA, **asdict(self)}
        return canonical({**fields, "digest": digest(canonical(fields))})


def read_commit(storage: Storage, name: str) -> Commit:
    """Parse a COMMIT. Raises OSError if it cannot be read, ManifestError if it is invalid."""
    with storage.open(f"{name}/{COMMIT}") as stream:
        data = stream.read()
    try:
        fields = json.loads(data)
        commit = Commit(**{key: value for key, value in fields.items() if key not in ("schema", "digest")})
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ManifestError(f"{COMMIT} is damaged: {error}") from error
    if not _HEX.fullmatch(str(commit.manifest)) or commit.encode() != data:
        raise ManifestError(f"{COMMIT} is damaged: it is not in canonical form")
    return commit


def write_file(
    storage: Storage, folder: str, name: str, data: bytes, quiet: Callable[[], None] = lambda: None
) -> FileEntry:
    """Write one small file durably. Raises OSError. Calls `quiet` before waiting for the disk.

    An fsync during large writes waits for all queued writes and delays those that follow.
    """
    with DigestSink(storage.create(f"{folder}/{name}")) as sink:
        sink.write(data)
        quiet()
    return FileEntry(name=name, size=sink.size, chunks=sink.chunks)


def seal(storage: Storage, manifest: Manifest, fence: Callable[[], bool], now: float) -> Commit:
    """Publish the manifest, then COMMIT, which makes the checkpoint exist. Raises FencedOff before COMMIT.

    Sealing again with the same manifest changes nothing, whether the first seal was made by another node leader that
    shares the folder or by an earlier try. With another manifest, or once deletion has begun, it raises
    FileExistsError.

    WARNING: every file that the manifest lists must be durable before this is called.
    """
    data = manifest.encode()
    commit = Commit(manifest=digest(data), size=manifest.size, committed_at=now)
    earlier = _sealed_earlier(storage, manifest.name)
    if _is_there(storage, f"{manifest.name}/{DELETED}"):
        raise FileExistsError(f"{manifest.name} is half-deleted; collect its remains first")
    if earlier is not None:
        if earlier.manifest != commit.manifest:
            raise FileExistsError(f"{manifest.name} is already committed with a different manifest")
        return earlier
    storage.publish(f"{manifest.name}/{MANIFEST}", data)
    # The fence is read as late as possible, because no new checkpoint may appear after a revocation.
    if not fence():
        raise FencedOff(
            manifest.step, "fenced off: the launch token of this attempt was revoked, or deleted, before COMMIT"
        )
    storage.publish(f"{manifest.name}/{COMMIT}", commit.encode())
    return commit


def _sealed_earlier(storage: Storage, name: str) -> Commit | None:
    try:
        return read_commit(storage, name)
    except FileNotFoundError:
        return None


def _is_there(storage: Storage, path: str) -> bool:
    try:
        storage.open(path).close()
    except FileNotFoundError:
        return False
    return True
