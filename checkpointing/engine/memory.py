"""The fastest tier: what the arena still holds of an earlier generation's saves, if its bytes are as they were.

The arena outlives the rank that filled it. Each rank has its own files in it, and gets from others what they wrote for
all of them (replicated tensors).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from checkpointing.engine.arena import Arena, Record
from checkpointing.engine.group import Ranks
from checkpointing.engine.landing import Landing, Reader
from checkpointing.engine.loading import Held, Loaded, Share, together
from checkpointing.engine.needs import intersect
from checkpointing.engine.sources import MayLack, Source, in_one_row, local_box
from checkpointing.index import Index, Piece, TensorInfo

if TYPE_CHECKING:
    from checkpointing.engine.layout import Item

TIER = "memory"


class Laid(Protocol):
    """The part of a rank's plan that is needed here."""

    @property
    def hash(self) -> str: ...

    @property
    def items(self) -> tuple["Item", ...]: ...


@dataclass(frozen=True)
class _Facts:
    """What ranks tell each other of their files: names, sizes and chunk sizes, and pieces that others lack."""

    files: tuple[tuple[str, int, int], ...]
    pieces: tuple[tuple[Piece, TensorInfo], ...]


class Memory:
    """One rank's arena as a place to restore from, and as memory to land in meanwhile.

    `lay_frames` puts the frames into a buffer anew; without it no buffer is lent, since landing destroys them.
    """

    def __init__(self, arena: Arena, plan: Laid, lay_frames: Callable[[int], None] | None = None) -> None:
        self._arena, self._plan, self._lay_frames = arena, plan, lay_frames
        self._lent: set[int] = set()
        self._held: dict[str, tuple[int, Record]] = {}  # by the name of the save: buffer, record

    def names(self, ranks: Ranks) -> list[str]:
        """Collective: the saves of which every rank holds its part, the newest first."""
        self._held = {record.name: (at, record) for at, record in self._records()}
        told = ranks.all_gather(sorted(self._held))
        common = set(told[0]).intersection(*told[1:])
        for name in self._held.keys() - common:
            del self._held[name]
        return sorted(common, key=lambda name: (self.step(name), name), reverse=True)

    def _records(self) -> list[tuple[int, Record]]:
        found = ((at, self._arena.record(at)) for at in range(self._arena.buffers))
        return [(at, record) for at, record in found if record is not None and record.plan == self._plan.hash]

    def step(self, name: str) -> int:
        return self._held[name][1].step

    def extra(self, name: str) -> dict[str, Any]:
        """The caller's own facts that were saved with it."""
        return dict(self._held[name][1].extra)

    def load(self, name: str, ranks: Ranks, tensors: Mapping[str, Tensor], may_lack: MayLack) -> Loaded:
        """Collective: verify what is held of this save and fill `tensors`; raises Refused, then none has changed."""
        at, record = self._held[name]
        facts = self._told(record, ranks, tensors)
        source, owners = self._source(record, ranks.rank, facts)
        share = Share(source, ranks, tensors)
        wanted = together(ranks, record.name, lambda: share.plan(may_lack))

        def check() -> Held:
            shards = [source.shard[entry.name] for entry in record.files]
            landing = Landing.of(self._arena.buffer(at), zip(shards, record.places, strict=True))
            mine = [chunk for chunk, owner in enumerate(owners) if owner == ranks.rank]
            Reader(record.name, source.shards, source.open).check(mine, landing)
            return share.hold(landing, [(owner,) for owner in owners], 0)

        return share.finish(together(ranks, record.name, check), wanted)

    def _told(self, record: Record, ranks: Ranks, tensors: Mapping[str, Tensor]) -> list[_Facts]:
        told = together(ranks, record.name, lambda: self._lacking(tensors))
        asked = set[str]().union(*told)
        pieces = tuple((item.piece, _info(item)) for item in self._plan.items if item.key in asked)
        files = tuple((entry.name, entry.size, entry.chunk_size) for entry in record.files)
        return ranks.all_gather(_Facts(files, pieces))

    def _lacking(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Keys of which this rank has not saved all of its part itself."""
        own: dict[str, list[Item]] = {}
        for item in self._plan.items:
            own.setdefault(item.key, []).append(item)
        return [key for key, tensor in tensors.items() if not _served(tensor, own.get(key, ()))]

    def _source(self, record: Record, rank: int, facts: Sequence[_Facts]) -> tuple[Source, list[int]]:
        """All ranks' files as one checkpoint, and for every chunk the rank that has it."""
        digests = {entry.name: entry.chunks for entry in record.files}
        owned = [(owner, file) for owner, told in enumerate(facts) for file in told.files]
        shards = in_one_row((*file, digests[file[0]] if owner == rank else None) for owner, file in owned)
        owners = [owner for (owner, _), shard in zip(owned, shards, strict=True) for _ in range(shard.count)]
        pieces = {item.piece: _info(item) for item in self._plan.items}
        for told in facts:
            pieces.update(told.pieces)
        index = Index({piece.key: info for piece, info in pieces.items()}, tuple(pieces))
        return Source(name=record.name, shards=shards, index=index, open=_never, seen=frozenset(digests)), owners

    def forget(self, name: str) -> None:
        """What was refused is no candidate any more."""
        at, _ = self._held.pop(name)
        self._arena.clear(at)

    def lend(self, size: int) -> list[memoryview]:
        """Buffers to land in that hold no candidate any more."""
        if self._lay_frames is None:
            return []
        kept = {at for at, _ in self._held.values()}
        self._lent |= {at for at in range(self._arena.buffers) if at not in kept}
        for at in self._lent:
            self._arena.clear(at)
        return [self._arena.buffer(at) for at in sorted(self._lent)]

    def take_back(self) -> None:
        """Make the lent buffers what they were: nothing may land in them any more."""
        lent, self._lent = self._lent, set()
        for at in sorted(lent):
            assert self._lay_frames is not None
            self._lay_frames(at)


def _never(file: str) -> None:
    raise AssertionError(f"{file} is in memory")


def _info(item: "Item") -> TensorInfo:
    return TensorInfo(str(item.dtype).removeprefix("torch."), item.share.whole)


def _served(tensor: Tensor, items: Sequence["Item"]) -> bool:
    """Whether the rank's own items hold all of its part of a tensor."""
    local = local_box(tensor)
    needs = [intersect(item.piece, 0, local) for item in items if item.share.whole == tuple(tensor.shape)]
    return sum(math.prod(need.sizes) for need in needs if need is not None) == local.volume
