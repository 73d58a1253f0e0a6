"""The run's own save layout: a checkpoint in the same layout needs no planning before it is read.

Each rank has, or reads, the files that it would write itself, and receives from others the replicated tensors that they
wrote for all.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpointing.engine.collectives.group import RankGroup
from checkpointing.engine.collectives.peer_codec import peer_message
from checkpointing.engine.restore.exchange import Readers
from checkpointing.engine.restore.source import local_box
from checkpointing.format.manifest import INDEX, Index, Manifest, Piece, TensorInfo
from checkpointing.format.read_plan import Shard, intersect
from checkpointing.storage.digests import digest

if TYPE_CHECKING:
    from checkpointing.engine.state.layout import Item

_FEW = 16


class PlannedFiles(Protocol):
    """The part of a rank's plan that is needed here; `index` is rank 0's."""

    @property
    def hash(self) -> str: ...

    @property
    def index(self) -> bytes | None: ...

    @property
    def files(self) -> "tuple[tuple[str, int, int], ...]": ...

    @property
    def items(self) -> "tuple[Item, ...]": ...


@peer_message
@dataclass(frozen=True)
class Facts:
    """Facts exchanged by ranks: their file regions, and pieces that others lack."""

    files: tuple[tuple[str, int, int], ...]  # name, start of the region, its size
    pieces: tuple[tuple[Piece, TensorInfo], ...]


class SavedLayout:
    """A rank's plan for reading."""

    def __init__(self, plan: PlannedFiles) -> None:
        self.plan = plan
        self._digests: dict[int, tuple[str, ...]] = {}  # of the index, by chunk size
        self._own = {item.piece: _info(item) for item in plan.items}
        self._alone = Index({piece.key: info for piece, info in self._own.items()}, tuple(self._own))

    def matches(self, manifest: Manifest) -> bool:
        """Return whether a checkpoint has exactly this layout; known on rank 0."""
        entry, index = manifest.file(INDEX), self.plan.index
        if entry is None or index is None or entry.size != len(index):
            return False
        if entry.chunk_size not in self._digests:
            pieces = (index[at : at + entry.chunk_size] for at in range(0, len(index), entry.chunk_size))
            self._digests[entry.chunk_size] = tuple(map(digest, pieces))
        return self._digests[entry.chunk_size] == entry.chunks

    def holds_nearly_all(self, tensors: Mapping[str, Tensor]) -> bool:
        """Return whether this rank's files hold nearly all that it needs; the rest is small enough to be sent."""
        needed = sum(_nbytes(tensor) for tensor in tensors.values())
        held = sum(item.piece.nbytes for item in self.plan.items)
        return (needed - held) * _FEW <= needed

    def lacking(self, tensors: Mapping[str, Tensor], alone: bool = False) -> list[str]:
        """Return keys whose part this rank does not write completely itself; a lone rank writes every key it knows."""
        if alone:
            return sorted(tensors.keys() - self._alone.tensors.keys())
        own: dict[str, list[Item]] = {}
        for item in self.plan.items:
            own.setdefault(item.key, []).append(item)
        return [key for key, tensor in tensors.items() if not _is_covered(tensor, own.get(key, ()))]

    def exchange_facts(
        self, ranks: RankGroup, lacking: Iterable[Sequence[str]], files: Sequence[tuple[str, int, int]]
    ) -> list[Facts]:
        """Return every rank's file regions (name, start, size), and the pieces that any rank lacks; collective."""
        asked = set[str]().union(*lacking)
        pieces = tuple((item.piece, _info(item)) for item in self.plan.items if item.key in asked)
        return ranks.all_gather(Facts(tuple(files), pieces))

    def unknown_keys(self, lacking: Iterable[Sequence[str]], facts: Iterable[Facts]) -> set[str]:
        """Return keys that some rank lacks and no rank has."""
        return set[str]().union(*lacking) - {piece.key for told in facts for piece, _ in told.pieces}

    def index(self, facts: Sequence[Facts]) -> Index:
        """Return the index that this rank needs: its own pieces and all pieces that any rank lacks."""
        if not any(told.pieces for told in facts):
            return self._alone
        pieces = dict(self._own)
        for told in facts:
            pieces.update(told.pieces)
        return Index({piece.key: info for piece, info in pieces.items()}, tuple(pieces))


def owners(shards: Iterable[Shard], facts: Sequence[Facts]) -> Readers:
    """Return for every chunk the rank whose file region contains it; files without an owner belong to rank 0."""
    parts: dict[str, list[tuple[int, int, int]]] = {}
    for rank, told in enumerate(facts):
        for file, begin, size in told.files:
            parts.setdefault(file, []).append((begin, begin + size, rank))
    return [
        (next((rank for begin, end, rank in parts.get(shard.name, ()) if begin <= at < end), 0),)
        for shard in shards
        for at in range(0, shard.count * shard.chunk_size, shard.chunk_size)
    ]


def _info(item: "Item") -> TensorInfo:
    return TensorInfo(str(item.dtype).removeprefix("torch."), item.share.whole)


def _nbytes(tensor: Tensor) -> int:
    return tensor._local_tensor.nbytes if isinstance(tensor, DTensor) else tensor.nbytes


def _is_covered(tensor: Tensor, items: Sequence["Item"]) -> bool:
    """Return whether the rank's items hold all of its part; an empty part needs an item, to report the tensor."""
    local = local_box(tensor)
    needs = [intersect(item.piece, 0, local) for item in items if item.share.whole == tuple(tensor.shape)]
    return bool(items) and sum(math.prod(need.sizes) for need in needs if need is not None) == local.volume
