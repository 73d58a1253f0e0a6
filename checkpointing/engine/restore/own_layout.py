"""The run's own save layout. Checkpoints in this layout, on disk or in memory, are read without planning.

Each rank holds or reads the files that it would write, and receives replicated tensors from the ranks that wrote them.
The fastest tier is the arena, which outlives the rank that filled it and may still hold an earlier generation's saves.
In memory, the files of all ranks together form one checkpoint, whose chunks are verified in place.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpointing.engine.collectives.group import RankGroup
from checkpointing.engine.restore.loader import Loaded, RankLoad, Readers, ReadResult, on_all_ranks
from checkpointing.engine.restore.read_buffers import ChunkReader, ReadBuffers
from checkpointing.engine.restore.source import LoadSource, OptionalKeys, local_box, number_chunks
from checkpointing.engine.state.layout import Item, PlannedFiles
from checkpointing.engine.state.save_plan import AgreedPlan
from checkpointing.format.manifest import INDEX, FileEntry, Index, Manifest, Piece, TensorInfo
from checkpointing.format.read_plan import Shard, intersect
from checkpointing.message_codec import peer_message
from checkpointing.writer.arena import Arena, BufferRecord

_FEW = 16


@peer_message
@dataclass(frozen=True)
class Facts:
    """Facts that ranks exchange: their file regions, and the pieces that others lack."""

    files: tuple[tuple[str, int, int], ...]  # name, start of the region, its size
    pieces: tuple[tuple[Piece, TensorInfo], ...]


class SavedLayout:
    """The layout in which a rank saves, used as a plan for reads."""

    def __init__(self, plan: PlannedFiles) -> None:
        self.plan = plan
        self._entries: dict[int, FileEntry] = {}  # entries for the index file, keyed by chunk size
        self._own = {item.piece: _info(item) for item in plan.items}
        self._alone = Index({piece.key: info for piece, info in self._own.items()}, tuple(self._own))

    def matches(self, manifest: Manifest) -> bool:
        """Return whether a checkpoint has exactly this layout. Known on rank 0 only."""
        entry, index = manifest.file(INDEX), self.plan.index
        if entry is None or index is None or entry.size != len(index):
            return False
        if entry.chunk_size not in self._entries:
            self._entries[entry.chunk_size] = FileEntry.from_bytes(INDEX, index, entry.chunk_size)
        return self._entries[entry.chunk_size] == entry

    def holds_nearly_all(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether this rank's files hold nearly all that it needs.

        If so, the rest is small enough to be sent.
        """
        needed = sum(_nbytes(tensor) for tensor in tensors.values())
        held = sum(item.piece.nbytes for item in self.plan.items)
        return (needed - held) * _FEW <= needed

    def lacking(self, tensors: Mapping[str, Tensor], alone: bool = False) -> list[str]:
        """Return the keys of the parts that this rank does not write in full.

        A lone rank writes every key that it knows.
        """
        if alone:
            return sorted(tensors.keys() - self._alone.tensors.keys())
        own: dict[str, list[Item]] = {}
        for item in self.plan.items:
            own.setdefault(item.key, []).append(item)
        return [key for key, tensor in tensors.items() if not _is_covered(tensor, own.get(key, ()))]

    def exchange_facts(
        self, ranks: RankGroup, lacking: Iterable[Sequence[str]], files: Sequence[tuple[str, int, int]]
    ) -> list[Facts]:
        """Return every rank's file regions (name, start, size), and the pieces that any rank lacks. Collective."""
        asked = set[str]().union(*lacking)
        pieces = tuple((item.piece, _info(item)) for item in self.plan.items if item.key in asked)
        return ranks.all_gather(Facts(tuple(files), pieces))

    def unknown_keys(self, lacking: Iterable[Sequence[str]], facts: Iterable[Facts]) -> set[str]:
        """Return the keys that some rank lacks and no rank has."""
        return set[str]().union(*lacking) - {piece.key for facts_of_rank in facts for piece, _ in facts_of_rank.pieces}

    def index(self, facts: Sequence[Facts]) -> Index:
        """Return the index that this rank needs: its own pieces, and all pieces that any rank lacks."""
        if not any(facts_of_rank.pieces for facts_of_rank in facts):
            return self._alone
        pieces = dict(self._own)
        for facts_of_rank in facts:
            pieces.update(facts_of_rank.pieces)
        return Index({piece.key: info for piece, info in pieces.items()}, tuple(pieces))


def owners(shards: Iterable[Shard], facts: Sequence[Facts]) -> Readers:
    """Return, for every chunk, the rank whose file region contains it; files without an owner belong to rank 0."""
    parts: dict[str, list[tuple[int, int, int]]] = {}
    for rank, facts_of_rank in enumerate(facts):
        for file, begin, size in facts_of_rank.files:
            parts.setdefault(file, []).append((begin, begin + size, rank))
    return [
        (next((rank for begin, end, rank in parts.get(shard.name, ()) if begin <= at < end), 0),)
        for shard in shards
        for at in range(0, shard.count * shard.chunk_size, shard.chunk_size)
    ]


def _info(item: Item) -> TensorInfo:
    return TensorInfo(str(item.dtype).removeprefix("torch."), item.share.whole)


def _nbytes(tensor: Tensor) -> int:
    return tensor._local_tensor.nbytes if isinstance(tensor, DTensor) else tensor.nbytes


def _is_covered(tensor: Tensor, items: Sequence[Item]) -> bool:
    """Return whether the rank's items hold its whole part of the tensor. Even an empty part needs an item."""
    local = local_box(tensor)
    needs = [intersect(item.piece, 0, local) for item in items if item.share.whole == tuple(tensor.shape)]
    return bool(items) and sum(math.prod(need.sizes) for need in needs if need is not None) == local.volume


_MIN_USED_SHARE = 8  # rewrite a buffer's templates only if at least this fraction (1/8) of it is used


class Memory:
    """A rank's arena, as a source for restores and as landing memory for reads.

    `write_templates` rewrites a buffer's templates. Without it, no buffer is lent, because reading into a buffer
    destroys its templates.
    """

    def __init__(
        self, arena: Arena, plan: AgreedPlan, write_templates: Callable[[int], None] | None = None
    ) -> None:  # fmt: skip
        self._arena, self._write_templates = arena, write_templates
        self.layout, self.on_disk = SavedLayout(plan.in_memory()), SavedLayout(plan.on_disk())
        self._lent: set[int] = set()
        self._held: dict[str, tuple[int, BufferRecord]] = {}  # (buffer, record), keyed by the save's name

    def names(self, ranks: RankGroup) -> list[str]:
        """Return the names of the saves of which every rank holds its part, newest first. Collective."""
        self._held = {record.name: (at, record) for at, record in self._records()}
        held_names = ranks.all_gather(sorted(self._held))
        common = set(held_names[0]).intersection(*held_names[1:])
        for name in self._held.keys() - common:
            del self._held[name]
        return sorted(common, key=lambda name: (self.step(name), name), reverse=True)

    def _records(self) -> list[tuple[int, BufferRecord]]:
        found = ((at, self._arena.record(at)) for at in range(self._arena.buffers))
        return [(at, record) for at, record in found if record is not None and record.plan == self.layout.plan.hash]

    def step(self, name: str) -> int:
        return self._held[name][1].step

    def extra(self, name: str) -> dict[str, Any]:
        """Return the caller's own facts from this save."""
        return dict(self._held[name][1].extra)

    def load(self, name: str, ranks: RankGroup, tensors: Mapping[str, Tensor], optional_keys: OptionalKeys) -> Loaded:
        """Verify this save in memory, then fill `tensors`. Collective. Raises CheckpointRefused if it is damaged."""
        at, record = self._held[name]
        lacking = on_all_ranks(ranks, record.name, lambda: self.layout.lacking(tensors))
        facts = self.layout.exchange_facts(ranks, lacking, [(entry.name, 0, entry.size) for entry in record.files])
        files = ranks.all_gather([(entry.name, entry.size, entry.chunk_size) for entry in record.files])
        digests = {entry.name: entry.chunks for entry in record.files}
        shards = number_chunks((*file, digests.get(file[0])) for regions in files for file in regions)
        source = LoadSource(
            name=record.name, shards=shards, index=self.layout.index(facts), open=_never, seen=frozenset(digests)
        )
        readers = owners(shards, facts)
        rank_load = RankLoad(source, ranks, tensors)
        wanted = on_all_ranks(ranks, record.name, lambda: rank_load.plan(optional_keys))

        def check() -> ReadResult:
            own = [source.shard[entry.name] for entry in record.files]
            buffers = ReadBuffers.from_memory(self._arena.buffer(at), zip(own, record.places, strict=True))
            mine = [chunk for chunk, (owner,) in enumerate(readers) if owner == ranks.rank]
            ChunkReader(record.name, source.shards, source.open).check(mine, buffers)
            return ReadResult(bytes_read=0, requests=rank_load.expect(buffers, readers))

        return rank_load.finish(on_all_ranks(ranks, record.name, check), wanted)

    def forget(self, name: str) -> None:
        """Remove a refused save from the candidates."""
        at, _ = self._held.pop(name)
        self._arena.clear(at)

    def lend(self, size: int) -> list[memoryview]:
        """Return at most one buffer that holds no candidate, as landing memory.

        It may be too small for all the bytes.
        """
        kept = {at for at, _ in self._held.values()}
        free = [at for at in range(self._arena.buffers) if at not in kept]
        if self._write_templates is None or not free or size < self._arena.buffer_bytes // _MIN_USED_SHARE:
            return []
        self._lent.add(free[0])
        self._arena.clear(free[0])
        return [self._arena.buffer(free[0])]

    def take_back(self) -> None:
        """Restore the padding and templates of the lent buffers. Nothing may be read into them after that."""
        lent, self._lent = self._lent, set()
        for at in sorted(lent):
            assert self._write_templates is not None
            buffer = self._arena.buffer(at)
            for start, end in _gaps(self.layout.plan):
                buffer[start:end] = bytes(end - start)
            self._write_templates(at)


def _gaps(plan: PlannedFiles) -> Iterator[tuple[int, int]]:
    """Yield the ranges of padding in the files, which is written with them but belongs to no tensor."""
    at = 0
    for item in sorted(plan.items, key=lambda item: item.place):
        start = item.place - (item.piece.data - item.piece.start)
        if at < start:
            yield at, start
        at = start + item.piece.length
    yield at, max((offset + size for _, offset, size in plan.files), default=at)


def _never(file: str) -> NoReturn:
    raise AssertionError(f"{file} is in memory")
