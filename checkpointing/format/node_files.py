"""PURE: the files of a node's ranks in one file, each from a multiple of a chunk on; between them lie zeros.

Ranks write to their regions at the same time, and digest what they write; nobody has to read another's bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from checkpointing.format.manifest import FileEntry
from checkpointing.storage.digests import CHUNK

Places = Mapping[str, tuple[str, int]]
"""Of a rank's files, by their names: the node's file, and where in it they begin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """A rank's file in its node's file; `filled` is the digest of its last chunk with zeros up to that chunk's end."""

    file: str
    at: int
    entry: FileEntry
    filled: str

    @classmethod
    def of(cls, entry: FileEntry, filled: str, places: Places) -> "Region":
        file, at = places[entry.name]
        return cls(file=file, at=at, entry=entry, filled=filled)


def file_name(node: int) -> str:
    """Of the node's file, by its place among the nodes that save."""
    return f"__node{node}.distcp"


def assign_places(sizes: Sequence[Mapping[str, int]], leads_node: Sequence[bool]) -> list[Places]:
    """For every rank the places of its files, given their sizes; a node's ranks follow its leader."""
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


def joined(regions: Sequence[Region]) -> list[FileEntry]:
    """The nodes' files; raises ValueError when regions do not follow each other."""
    by_file: dict[str, list[Region]] = {}
    for region in sorted(regions, key=lambda region: region.at):
        by_file.setdefault(region.file, []).append(region)
    return [_joined(file, parts) for file, parts in by_file.items()]


def _joined(file: str, parts: Sequence[Region]) -> FileEntry:
    chunks: list[str] = []
    for part, after in zip(parts, (*parts[1:], None), strict=True):
        if part.at != len(chunks) * CHUNK or part.entry.chunk_size != CHUNK:
            raise ValueError(f"{file}: {part.entry.name} does not begin where the region before it ends")
        chunks += part.entry.chunks if after is None else (*part.entry.chunks[:-1], part.filled)
    last = parts[-1]
    return FileEntry(name=file, size=last.at + last.entry.size, chunks=tuple(chunks))
