"""Fills tensors from one checkpoint: land, verify, agree, exchange, and only then deliver.

Every rank reads its share of the chunks into memory of its own and verifies it there. Nothing is copied into a tensor
before all ranks have agreed that all bytes of all of them matched.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from checkpointing.engine.assigning import Readers, assign
from checkpointing.engine.exchange import Send, exchange, gather
from checkpointing.engine.failure import FAILURES, explain
from checkpointing.engine.group import Ranks
from checkpointing.engine.landing import Landing, Lend, Reader, threads
from checkpointing.engine.needs import Need, Shard, Strip, parts
from checkpointing.engine.sources import MayLack, Source, find_needs, local_part, rows_of
from checkpointing.errors import Refused

T = TypeVar("T")
_WORTH_A_THREAD = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What a load did; bytes are sums over all ranks, needed ones counted once however many ranks need them."""

    absent: tuple[str, ...]
    bytes_read: int
    bytes_needed: int


def together(ranks: Ranks, name: str, act: Callable[[], T]) -> list[T]:
    """Do this rank's part, and learn what came of the others'; raises the same Refused on every rank if one failed."""
    mine: list[T] = []
    failed = None
    try:
        mine.append(act())
    except FAILURES as error:
        failed = explain(error)
    told = ranks.all_gather((failed, mine))
    reasons = {reason: rank for rank, (reason, _) in reversed(list(enumerate(told))) if reason is not None}
    if reasons:
        raise Refused(name, "; ".join(sorted(reasons, key=reasons.__getitem__)[:4]))
    return [value for _, (value,) in told]


def load(source: Source, ranks: Ranks, tensors: Mapping[str, Tensor], may_lack: MayLack, lend: Lend) -> Loaded:
    """Collective: read and verify everything, then fill `tensors`; raises Refused, and then no tensor has changed."""
    share = Share(source, ranks, tensors)
    wanted = together(ranks, source.name, lambda: share.plan(may_lack))

    def read() -> "Held":
        _check_present(source, wanted)
        readers = assign(source.shards, [want.by_chunk for want in wanted], [want.seen for want in wanted])
        mine = [chunk for chunk, reading in enumerate(readers) if ranks.rank in reading]
        landing = Landing.over(source.shards, mine, lend)
        reader = Reader(source.name, source.shards, source.open, patience=source.patience, pause=source.pause)
        reader.read(mine, landing)
        return share.hold(landing, readers, reader.bytes_read)

    return share.finish(together(ranks, source.name, read), wanted)


def _check_present(source: Source, wanted: Sequence["Wanted"]) -> None:
    seen = frozenset[str]().union(*(want.seen for want in wanted))
    missing = [shard.name for shard in source.shards if shard.name not in seen]
    if missing:
        raise Refused(source.name, "; ".join(f"{name}: missing" for name in missing[:4]))


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a rank tells the others before anything is read."""

    seen: frozenset[str]
    by_chunk: dict[int, int]  # bytes needed of each chunk
    unique: int  # bytes needed that no other rank counts
    plain: dict[tuple[str, int], int]  # bytes needed of values that other ranks may count too, by file and place


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a rank tells the others once all it has read is verified: the needs that others must send it parts of."""

    bytes_read: int
    requests: list[tuple[str, list[Strip]]]  # file, rows


class Share:
    """One rank's part of loading `source` into `tensors`: what it needs, has read, passes on and delivers."""

    def __init__(self, source: Source, ranks: Ranks, tensors: Mapping[str, Tensor]) -> None:
        self._source, self._ranks, self._tensors = source, ranks, tensors
        self._needs: list[Need] = []
        self._rows: list[list[Strip]] = []
        self._odd: dict[int, Tensor] = {}
        self._readers: Readers = ()
        self._landing = Landing()
        self._absent: tuple[str, ...] = ()

    def plan(self, may_lack: MayLack) -> Wanted:
        """Find out what is needed; raises Refused when the checkpoint does not fit."""
        source = self._source
        self._needs, self._absent = find_needs(source, self._tensors, may_lack)
        self._rows = [[] if need.piece in source.odd else rows_of(source, need) for need in self._needs]
        by_chunk: dict[int, int] = {}
        unique, plain = 0, dict[tuple[str, int], int]()
        for need, rows in zip(self._needs, self._rows, strict=True):
            if not rows:
                continue
            for part in parts(rows, self._shard(need)):
                by_chunk[part.chunk] = by_chunk.get(part.chunk, 0) + part.high - part.low
            nbytes = sum(strip.nbytes for strip in rows)
            tensor = self._tensors[need.key]
            if isinstance(tensor, DTensor) and tensor.device_mesh.size() == self._ranks.size:
                unique += nbytes if _first_replica(tensor) else 0
            else:
                plain[self._shard(need).name, rows[0].offset] = nbytes
        return Wanted(seen=source.seen, by_chunk=by_chunk, unique=unique, plain=plain)

    def _shard(self, need: Need) -> Shard:
        return self._source.shard[self._source.index.pieces[need.piece].file]

    def hold(self, landing: Landing, readers: Readers, bytes_read: int) -> Held:
        """Take over what was read and verified; `readers` says of every chunk which ranks have it."""
        self._landing, self._readers = landing, readers
        me = self._ranks.rank
        requests = []
        for number, (need, rows) in enumerate(zip(self._needs, self._rows, strict=True)):
            if need.piece in self._source.odd:
                self._odd[number] = _region(self._source.odd[need.piece](), need.source, need.sizes)
            elif any(me not in readers[chunk] for chunk in self._span(need, rows)):
                requests.append((self._shard(need).name, rows))
        return Held(bytes_read=bytes_read, requests=requests)

    def _span(self, need: Need, rows: Sequence[Strip]) -> range:
        return self._shard(need).chunks(rows[0].offset, rows[-1].end)

    def finish(self, held: Sequence[Held], wanted: Sequence[Wanted]) -> Loaded:
        """Collective, when all ranks have agreed: pass on what others need, then fill the tensors."""
        sources, unfilled = self._sources()
        receives: list[list[Tensor]] = [[] for _ in held]
        for rows, shard, packed in unfilled:
            self._fill(rows, shard, packed, receives)
        if any(each.requests for each in held):
            exchange(self._ranks, self._landing, [self._sends(rank, each) for rank, each in enumerate(held)], receives)
        self._deliver(sources)
        plain = {place: nbytes for want in wanted for place, nbytes in want.plain.items()}
        return Loaded(
            absent=self._absent,
            bytes_read=sum(each.bytes_read for each in held),
            bytes_needed=sum(want.unique for want in wanted) + sum(plain.values()),
        )

    def _sources(self) -> tuple[list[Tensor], list[tuple[list[Strip], Shard, Tensor]]]:
        """For every need the memory that its values are or will be in; and the memory that is yet to be filled."""
        sources: list[Tensor] = []
        unfilled = []
        for number, (need, rows) in enumerate(zip(self._needs, self._rows, strict=True)):
            if number in self._odd:
                sources.append(self._odd[number])
                continue
            view = self._view(need, rows)
            if view is None:
                dtype = self._tensors[need.key].dtype
                packed = torch.empty(sum(strip.nbytes for strip in rows), dtype=torch.uint8)
                unfilled.append((rows, self._shard(need), packed))
                view = packed.view(dtype).view(need.sizes)
            sources.append(view)
        return sources, unfilled

    def _view(self, need: Need, rows: Sequence[Strip]) -> Tensor | None:
        """A need as a view of the landing; None when not all of it lies there in one piece, or at odd addresses."""
        chunks = self._span(need, rows)
        if not self._landing.holds(chunks):
            return None
        dtype = self._tensors[need.key].dtype
        flat, delta = self._landing.flat(chunks[0], dtype)
        start, rest = divmod(rows[0].offset + delta, dtype.itemsize)
        if rest:
            return None
        piece = self._source.index.pieces[need.piece]
        return flat.as_strided(need.sizes, _steps(piece.sizes), start)

    def _fill(self, rows: list[Strip], shard: Shard, packed: Tensor, receives: Sequence[list[Tensor]]) -> None:
        """Copy what this rank has itself; the rest is to be received from the rank that has it."""
        for part in parts(rows, shard):
            readers = self._readers[part.chunk]
            goal = packed[part.low : part.high]
            if self._ranks.rank in readers:
                gather(self._landing, Send(rows, part.chunk, part.low, part.high), goal)
            else:
                receives[readers[0]].append(goal)

    def _sends(self, rank: int, held: Held) -> list[Send]:
        """What a rank must be sent from here, in the order in which it will receive it."""
        if rank == self._ranks.rank:
            return []
        return [
            Send(rows, part.chunk, part.low, part.high)
            for file, rows in held.requests
            for part in parts(rows, self._source.shard[file])
            if self._readers[part.chunk][0] == self._ranks.rank and rank not in self._readers[part.chunk]
        ]

    def _deliver(self, sources: Sequence[Tensor]) -> None:
        with torch.no_grad():
            local = {key: local_part(self._tensors[key]) for key in {need.key for need in self._needs}}
            goals = [_region(local[need.key], need.goal, need.sizes) for need in self._needs]
            copy(goals, sources)


def copy(goals: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy all sources into their goals, by a few threads; on CUDA it waits for the copies."""
    groups = _evenly([goal.nbytes for goal in goals], threads())
    with ThreadPoolExecutor(max(1, len(groups)), thread_name_prefix="checkpoint-delivery") as pool:
        work = [pool.submit(_copy_some, goals[group], sources[group]) for group in groups[1:]]
        if groups:
            _copy_some(goals[groups[0]], sources[groups[0]])
        for each in work:
            each.result()
    if any(goal.is_cuda for goal in goals):
        torch.cuda.synchronize()


def _copy_some(goals: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    with torch.no_grad():  # every thread has a mode of its own
        torch._foreach_copy_(list(goals), list(sources), non_blocking=goals[0].is_cuda)


def _evenly(sizes: Sequence[int], count: int) -> list[slice]:
    """Neighbours in groups of about the same number of bytes; one group when there is little to do."""
    total, groups, start, filled = sum(sizes), list[slice](), 0, 0
    least = max(_WORTH_A_THREAD, -(-total // count))
    for at, size in enumerate(sizes):
        filled += size
        if filled >= least:
            groups.append(slice(start, at + 1))
            start, filled = at + 1, 0
    return [*groups, slice(start, len(sizes))] if start < len(sizes) else groups


def _region(tensor: Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
    if tuple(tensor.shape) == tuple(sizes):
        return tensor
    for dimension, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        tensor = tensor.narrow(dimension, offset, size)
    return tensor


def _steps(shape: Sequence[int]) -> list[int]:
    """Strides of a row-major array, in values."""
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= size
    return steps[::-1]


def _first_replica(tensor: DTensor) -> bool:
    """Whether of all ranks that hold the same part of a tensor this is the one that counts it."""
    coordinate = tensor.device_mesh.get_coordinate() or []
    return all(
        at == 0
        for at, placement in zip(coordinate, tensor.placements, strict=False)
        if isinstance(placement, Replicate)
    )
