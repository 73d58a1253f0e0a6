"""The fastest tier: an earlier generation's saves that are still intact in the arena.

The arena outlives the rank that filled it. Each rank has its own files in it; the files of all ranks together are
treated as one checkpoint, whose chunks are verified in place.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor

from checkpointing.engine.collectives.group import RankGroup
from checkpointing.engine.restore.loader import Loaded, RankLoad, ReadResult, on_all_ranks
from checkpointing.engine.restore.read_buffers import ChunkReader, ReadBuffers
from checkpointing.engine.restore.saved_layout import PlannedFiles, SavedLayout, owners
from checkpointing.engine.restore.source import LoadSource, OptionalKeys, number_chunks
from checkpointing.writer.arena import Arena, BufferRecord

_WORTH_IT = 8  # rewrite a buffer's templates only if at least this fraction (1/8) of it is used


class Memory:
    """A rank's arena as a source for restores, and as landing memory for reads.

    `write_templates` rewrites the templates of a buffer; without it no buffer is lent, because reading into a buffer
    destroys them.
    """

    def __init__(
        self, arena: Arena, plan: PlannedFiles, write_templates: Callable[[int], None] | None = None,
        on_disk: PlannedFiles | None = None,
    ) -> None:  # fmt: skip
        """Create the tier; `on_disk` is the plan with its files as in a checkpoint's folder, if they differ."""
        self._arena, self._write_templates = arena, write_templates
        self.layout, self.on_disk = SavedLayout(plan), SavedLayout(on_disk or plan)
        self._lent: set[int] = set()
        self._held: dict[str, tuple[int, BufferRecord]] = {}  # by the name of the save: buffer, record

    def names(self, ranks: RankGroup) -> list[str]:
        """Return the saves of which every rank holds its part, newest first; collective."""
        self._held = {record.name: (at, record) for at, record in self._records()}
        told = ranks.all_gather(sorted(self._held))
        common = set(told[0]).intersection(*told[1:])
        for name in self._held.keys() - common:
            del self._held[name]
        return sorted(common, key=lambda name: (self.step(name), name), reverse=True)

    def _records(self) -> list[tuple[int, BufferRecord]]:
        found = ((at, self._arena.record(at)) for at in range(self._arena.buffers))
        return [(at, record) for at, record in found if record is not None and record.plan == self.layout.plan.hash]

    def step(self, name: str) -> int:
        return self._held[name][1].step

    def extra(self, name: str) -> dict[str, Any]:
        """Return the caller's own facts saved with it."""
        return dict(self._held[name][1].extra)

    def load(self, name: str, ranks: RankGroup, tensors: Mapping[str, Tensor], optional_keys: OptionalKeys) -> Loaded:
        """Verify this save's copy in memory and fill `tensors`; collective. Raises Refused before any has changed."""
        at, record = self._held[name]
        lacking = on_all_ranks(ranks, record.name, lambda: self.layout.lacking(tensors))
        facts = self.layout.exchange_facts(ranks, lacking, [(entry.name, 0, entry.size) for entry in record.files])
        files = ranks.all_gather([(entry.name, entry.size, entry.chunk_size) for entry in record.files])
        digests = {entry.name: entry.chunks for entry in record.files}
        shards = number_chunks((*file, digests.get(file[0])) for told in files for file in told)
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
        """Return at most one buffer without a candidate as landing memory; it may be too small for all bytes."""
        kept = {at for at, _ in self._held.values()}
        free = [at for at in range(self._arena.buffers) if at not in kept]
        if self._write_templates is None or not free or size < self._arena.buffer_bytes // _WORTH_IT:
            return []
        self._lent.add(free[0])
        self._arena.clear(free[0])
        return [self._arena.buffer(free[0])]

    def take_back(self) -> None:
        """Restore the padding and templates of the lent buffers; nothing may land in them after that."""
        lent, self._lent = self._lent, set()
        for at in sorted(lent):
            assert self._write_templates is not None
            buffer = self._arena.buffer(at)
            for start, end in _gaps(self.layout.plan):
                buffer[start:end] = bytes(end - start)
            self._write_templates(at)


def _gaps(plan: PlannedFiles) -> Iterator[tuple[int, int]]:
    """Yield the padding of the files, which is written with them but belongs to no tensor."""
    at = 0
    for item in sorted(plan.items, key=lambda item: item.place):
        start = item.place - (item.piece.data - item.piece.start)
        if at < start:
            yield at, start
        at = start + item.piece.length
    yield at, max((offset + size for _, offset, size in plan.files), default=at)


def _never(file: str) -> NoReturn:
    raise AssertionError(f"{file} is in memory")
