"""Loads tensors from one checkpoint: assign chunks, read, verify, agree, exchange, deliver.

Every rank reads its share of the chunks into its own memory and verifies it there. No tensor is written before all
ranks have agreed that all of their bytes matched.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from checkpointing.engine.collectives.group import RankGroup, explain, result_or
from checkpointing.engine.restore.read_buffers import ChunkReader, Lend, ReadBuffers, threads
from checkpointing.engine.restore.source import (
    LoadSource,
    OptionalKeys,
    SliceBytes,
    find_slices,
    local_part,
    locate_slice,
)
from checkpointing.engine.state.layout import region
from checkpointing.errors import CheckpointRefused, ManifestError
from checkpointing.format.read_plan import Shard, Slice, Strip, parts, strides
from checkpointing.message_codec import peer_message

Wanted = Mapping[int, int]
"""Number of bytes that a rank needs from each chunk, keyed by chunk number."""

Readers = Sequence[tuple[int, ...]]
"""For every chunk, the ranks that read it."""

_ALMOST_ALL = 0.8
_NEARLY_AS_MUCH = 0.9


def assign(shards: Sequence[Shard], wanted: Sequence[Wanted], seen: Sequence[Collection[str]]) -> Readers:
    """Return, for every chunk, the ranks that read it; the first of them forwards what other ranks need.

    `wanted` and `seen` list, for each rank, the number of bytes needed from each chunk and the files that it can read.
    A chunk has one reader, unless exactly two ranks need it and each needs almost all of it. Then both read it, which
    is as fast as sending it. Chunks that no rank needs are read too, because a checkpoint with any damage is not
    trusted.
    """
    loads = [0] * len(wanted)
    chosen: dict[int, tuple[int, ...]] = {}
    open_ones: list[tuple[int, int, list[int]]] = []
    for shard in shards:
        able = [rank for rank, names in enumerate(seen) if shard.name in names]
        assert able or not shard.count, f"no rank can read {shard.name}"
        for chunk in range(shard.first, shard.first + shard.count):
            start, end = shard.span(chunk)
            candidates = _candidates(able, wanted, chunk)
            if len(candidates) == 1:
                chosen[chunk] = tuple(candidates[:1])
                loads[candidates[0]] += end - start
            elif _a_pair(candidates, wanted, chunk, end - start):
                chosen[chunk] = tuple(candidates)
                for rank in candidates:
                    loads[rank] += end - start
            else:
                open_ones.append((chunk, end - start, candidates))
    # Chunks with an obvious reader are already assigned; the others are used to balance the load.
    for chunk, size, candidates in open_ones:
        reader = min(candidates, key=lambda rank: (loads[rank], rank))
        chosen[chunk] = (reader,)
        loads[reader] += size
    return [chosen[chunk] for chunk in sorted(chosen)]


def _candidates(able: list[int], wanted: Sequence[Wanted], chunk: int) -> list[int]:
    """Return the ranks that need close to the most of a chunk, or all ranks that can read it if none needs it."""
    needs = {rank: need for rank in able if (need := wanted[rank].get(chunk, 0))}
    most = max(needs.values(), default=0)
    return [rank for rank, need in needs.items() if need >= _NEARLY_AS_MUCH * most] or able


def _a_pair(candidates: list[int], wanted: Sequence[Wanted], chunk: int, size: int) -> bool:
    needing = [rank for rank, needs in enumerate(wanted) if needs.get(chunk, 0)]
    return (
        needing == candidates
        and len(needing) == 2
        and all(wanted[rank][chunk] >= _ALMOST_ALL * size for rank in needing)
    )


ROUND = 256 << 20
"""Maximum bytes that a rank sends and receives in one round."""

_SMALLEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Send:
    """Bytes `low` to `high` of a packed slice, all within `chunk`."""

    rows: Sequence[Strip]
    chunk: int
    low: int
    high: int

    @property
    def nbytes(self) -> int:
        return self.high - self.low


def gather(buffers: ReadBuffers, piece: Send, goal: Tensor) -> None:
    """Copy part of a packed slice out of the read buffers into `goal`, which has the same number of bytes."""
    flat, delta = buffers.flat(piece.chunk)
    at = done = 0
    for strip in piece.rows:
        low, high = max(piece.low - at, 0), min(piece.high - at, strip.nbytes)
        if low < high:
            _copy_rows(flat, delta + strip.offset, strip, low, high, goal[done : done + high - low])
            done += high - low
        at += strip.nbytes


def _copy_rows(flat: Tensor, start: int, strip: Strip, low: int, high: int, goal: Tensor) -> None:
    """Copy bytes `low` to `high` of a strip at `start`: a partial first row, whole rows, a partial last row."""
    if strip.repeats == 1 or strip.stride == strip.length:
        goal.copy_(flat[start + low : start + high])
        return
    (row, skip), (last, rest) = divmod(low, strip.length), divmod(high, strip.length)
    if row == last:
        goal.copy_(flat[start + row * strip.stride + skip : start + row * strip.stride + rest])
        return
    if skip:
        begin = start + row * strip.stride
        goal[: strip.length - skip].copy_(flat[begin + skip : begin + strip.length])
        goal, row = goal[strip.length - skip :], row + 1
    whole = (last - row) * strip.length
    if whole:
        source = flat.as_strided((last - row, strip.length), (strip.stride, 1), start + row * strip.stride)
        goal[:whole].view(last - row, strip.length).copy_(source)
    if rest:
        begin = start + last * strip.stride
        goal[whole:].copy_(flat[begin : begin + rest])


def exchange(
    ranks: RankGroup, buffers: ReadBuffers, sends: Sequence[Sequence[Send]], receives: Sequence[Sequence[Tensor]]
) -> None:
    """Send `sends[r]` to rank r and receive `receives[r]` from it, with matching order and sizes. Collective."""
    totals = [sum(piece.nbytes for piece in pieces) for pieces in sends]
    coming = [sum(len(goal) for goal in goals) for goals in receives]
    cap = max(ROUND // ranks.size, _SMALLEST)
    rounds = max(ranks.all_gather(-(-max(totals, default=0) // cap)))
    outgoing = [_Outgoing(buffers, pieces) for pieces in sends]
    incoming = [_Incoming(goals) for goals in receives]
    for number in range(rounds):
        out = [_share(total, cap, number) for total in totals]
        back = [_share(total, cap, number) for total in coming]
        sent = torch.empty(sum(out), dtype=torch.uint8, device="cpu")
        got = torch.empty(sum(back), dtype=torch.uint8, device="cpu")
        for stream, block in zip(outgoing, sent.split(out), strict=True):
            stream.fill(block)
        dist.all_to_all_single(got, sent, back, out, group=ranks._group)
        for sink, block in zip(incoming, got.split(back), strict=True):
            sink.take(block)


def _share(total: int, cap: int, number: int) -> int:
    return max(0, min(cap, total - number * cap))


class _Outgoing:  # bytes to one rank
    def __init__(self, buffers: ReadBuffers, pieces: Sequence[Send]) -> None:
        self._buffers, self._rest = buffers, list(reversed(pieces))

    def fill(self, block: Tensor) -> None:
        while len(block):
            piece = self._rest.pop()
            if piece.nbytes > len(block):
                cut = piece.low + len(block)
                self._rest.append(Send(piece.rows, piece.chunk, cut, piece.high))
                piece = Send(piece.rows, piece.chunk, piece.low, cut)
            gather(self._buffers, piece, block[: piece.nbytes])
            block = block[piece.nbytes :]


class _Incoming:  # bytes from one rank
    def __init__(self, goals: Sequence[Tensor]) -> None:
        self._rest = list(reversed(goals))

    def take(self, block: Tensor) -> None:
        while len(block):
            goal = self._rest.pop()
            if len(goal) > len(block):
                self._rest.append(goal[len(block) :])
                goal = goal[: len(block)]
            goal.copy_(block[: len(goal)])
            block = block[len(goal) :]


T = TypeVar("T")
_WORTH_A_THREAD = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Result of a load. Byte counts are totals over all ranks; bytes that several ranks need count once."""

    absent: tuple[str, ...]
    bytes_read: int
    bytes_needed: int


def to_refusal(error: BaseException) -> CheckpointRefused:
    """Return the refusal of a checkpoint whose load raised this error."""
    if isinstance(error, CheckpointRefused):
        return error
    unreadable = isinstance(error, OSError) and not isinstance(error, FileNotFoundError)
    return CheckpointRefused("", explain(error), damaged=isinstance(error, ManifestError), unreadable=unreadable)


def on_all_ranks(ranks: RankGroup, name: str, act: Callable[[], T]) -> list[T]:
    """Return the results of `act` on all ranks. Raises the same CheckpointRefused on every rank if one failed."""
    results: list[tuple[T | None, CheckpointRefused | None]] = ranks.all_gather(
        result_or(lambda: (act(), None), lambda error: (None, to_refusal(error)))
    )
    failures = [failure for _, failure in results if failure is not None]
    if failures:
        raise CheckpointRefused(
            name,
            "; ".join(list(dict.fromkeys(failure.reason for failure in failures))[:4]),
            damaged=any(failure.damaged for failure in failures),
            fits=all(failure.fits for failure in failures),
            unreadable=all(failure.unreadable for failure in failures),
        )
    return [cast(T, value) for value, _ in results]


def load(
    source: LoadSource, ranks: RankGroup, tensors: Mapping[str, Tensor], optional_keys: OptionalKeys, lend: Lend
) -> Loaded:
    """Read and verify everything, then fill `tensors`. Collective.

    If it raises CheckpointRefused, nothing has changed.
    """
    rank_load = RankLoad(source, ranks, tensors)
    wanted = on_all_ranks(ranks, source.name, lambda: rank_load.plan(optional_keys))

    lost = optional_keys.lost([want.surplus for want in wanted], source.index.tensors)
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise CheckpointRefused(source.name, f"has {lost[0]}{more}, which the model lacks", damaged=False, fits=False)

    def read() -> "ReadResult":
        _check_present(source, wanted)
        readers = assign(source.shards, [want.by_chunk for want in wanted], [want.seen for want in wanted])
        mine = [chunk for chunk, reading in enumerate(readers) if ranks.rank in reading]
        requests, count = _read_chunks(source, mine, lend, lambda buffers: rank_load.expect(buffers, readers))
        return ReadResult(bytes_read=count, requests=requests)

    return rank_load.finish(on_all_ranks(ranks, source.name, read), wanted)


def _read_chunks(
    source: LoadSource, chunks: Sequence[int], lend: Lend, meanwhile: Callable[[ReadBuffers], T]
) -> tuple[T, int]:
    """Read and verify chunks while `meanwhile` prepares for them. Return its result and the number of bytes read."""
    buffers = ReadBuffers.allocate(source.shards, chunks, lend)
    reader = ChunkReader(source.name, source.shards, source.open, patience=source.patience, pause=source.pause)
    with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-reading") as pool:
        reading = pool.submit(reader.read, chunks, buffers)
        prepared = meanwhile(buffers)
        reading.result()
    return prepared, reader.bytes_read


def load_own(
    source: LoadSource, readers: Readers, ranks: RankGroup, tensors: Mapping[str, Tensor], optional_keys: OptionalKeys,
    lend: Lend,
) -> Loaded:  # fmt: skip
    """Load a checkpoint in the run's own layout.

    Like `load`, but the readers are known, so planning overlaps reading.
    """
    rank_load = RankLoad(source, ranks, tensors)

    def read() -> tuple[RankNeeds, ReadResult]:
        def prepare(buffers: ReadBuffers) -> tuple[RankNeeds, Requests]:
            return rank_load.plan(optional_keys), rank_load.expect(buffers, readers)

        mine = [chunk for chunk, (owner,) in enumerate(readers) if owner == ranks.rank]
        (wanted, requests), count = _read_chunks(source, mine, lend, prepare)
        return wanted, ReadResult(bytes_read=count, requests=requests)

    results = on_all_ranks(ranks, source.name, read)
    return rank_load.finish([held for _, held in results], [wanted for wanted, _ in results])


def _check_present(source: LoadSource, wanted: Sequence["RankNeeds"]) -> None:
    seen = frozenset[str]().union(*(want.seen for want in wanted))
    missing = [shard.name for shard in source.shards if shard.name not in seen]
    if missing:
        # Not damage: these files may be on nodes outside this job.
        raise CheckpointRefused(source.name, "; ".join(f"{name}: missing" for name in missing[:4]), damaged=False)


@peer_message
@dataclass(frozen=True, kw_only=True)
class RankNeeds:
    """A rank's needs, which the ranks exchange."""

    seen: frozenset[str]
    by_chunk: dict[int, int]  # bytes needed from each chunk
    unique: int  # bytes needed that no other rank counts
    plain: dict[tuple[str, int], int]  # bytes needed that other ranks may also count, keyed by file and offset
    surplus: bytes  # as in OptionalKeys


@peer_message
@dataclass(frozen=True, kw_only=True)
class ReadResult:
    """Result of a rank's verified read. `requests` are the slices of which other ranks read a part."""

    bytes_read: int
    requests: "Requests"


Requests = list[tuple[str, list[Strip]]]
"""File names, and the rows needed from each file."""


class RankLoad:
    """A rank's part of loading `source` into `tensors`: what it needs, reads, forwards and delivers."""

    def __init__(self, source: LoadSource, ranks: RankGroup, tensors: Mapping[str, Tensor]) -> None:
        self._source, self._ranks, self._tensors = source, ranks, tensors
        self._slices: list[Slice] = []
        self._slice_bytes: list[SliceBytes | None] = []  # None for an irregular piece
        self._readers: Readers = ()
        self._buffers = ReadBuffers()
        self._goals: list[Tensor] = []  # destination of each slice, whose source is in `_sources`
        self._sources: list[Tensor] = []
        self._unfilled: list[tuple[SliceBytes, Tensor]] = []  # memory for values that are not contiguous in the buffers
        self._absent: tuple[str, ...] = ()

    def plan(self, optional_keys: OptionalKeys) -> RankNeeds:
        """Determine what is needed. Raises CheckpointRefused if the checkpoint does not fit."""
        source = self._source
        self._slices, self._absent = find_slices(source, self._tensors, optional_keys)
        surplus = optional_keys.surplus(self._tensors, source.index.tensors)
        self._slice_bytes = [None if need.piece in source.odd else locate_slice(source, need) for need in self._slices]
        by_chunk: dict[int, int] = {}
        unique, plain = 0, dict[tuple[str, int], int]()
        for need, slice_bytes in zip(self._slices, self._slice_bytes, strict=True):
            if slice_bytes is None:
                continue
            for chunk, nbytes in slice_bytes.by_chunk():
                by_chunk[chunk] = by_chunk.get(chunk, 0) + nbytes
            tensor = self._tensors[need.key]
            if isinstance(tensor, DTensor) and tensor.device_mesh.size() == self._ranks.size:
                unique += slice_bytes.nbytes if _first_replica(tensor) else 0
            else:
                plain[slice_bytes.shard.name, slice_bytes.rows[0].offset] = slice_bytes.nbytes
        return RankNeeds(seen=source.seen, by_chunk=by_chunk, unique=unique, plain=plain, surplus=surplus)

    def expect(self, buffers: ReadBuffers, readers: Readers) -> Requests:
        """Prepare for the data being read; return the slices of which other ranks read a part.

        `readers` lists the ranks that read each chunk.
        """
        self._buffers, self._readers = buffers, readers
        me, requests = self._ranks.rank, []
        with torch.no_grad():
            local = {key: local_part(self._tensors[key]) for key in {need.key for need in self._slices}}
            for need, slice_bytes in zip(self._slices, self._slice_bytes, strict=True):
                self._goals.append(region(local[need.key], need.goal, need.sizes))
                self._sources.append(self._slice_memory(need, slice_bytes))
                if slice_bytes is not None and any(me not in readers[chunk] for chunk in slice_bytes.chunks):
                    requests.append((slice_bytes.shard.name, slice_bytes.rows))
        return requests

    def finish(self, held: Sequence[ReadResult], wanted: Sequence[RankNeeds]) -> Loaded:
        """Forward what others need, then fill the tensors; collective, after all ranks have agreed."""
        receives: list[list[Tensor]] = [[] for _ in held]
        for slice_bytes, packed in self._unfilled:
            self._fill(slice_bytes, packed, receives)
        if any(each.requests for each in held):
            exchange(self._ranks, self._buffers, [self._sends(rank, each) for rank, each in enumerate(held)], receives)
        copy(self._goals, self._sources)
        plain = {place: nbytes for want in wanted for place, nbytes in want.plain.items()}
        return Loaded(
            absent=self._absent,
            bytes_read=sum(each.bytes_read for each in held),
            bytes_needed=sum(want.unique for want in wanted) + sum(plain.values()),
        )

    def _slice_memory(self, need: Slice, slice_bytes: SliceBytes | None) -> Tensor:
        """Return the memory that holds or will hold a slice's values."""
        if slice_bytes is None:
            return region(self._source.odd[need.piece](), need.source, need.sizes)
        view = self._view(need, slice_bytes)
        if view is None:
            packed = torch.empty(slice_bytes.nbytes, dtype=torch.uint8, device="cpu")
            self._unfilled.append((slice_bytes, packed))
            view = packed.view(self._tensors[need.key].dtype).view(need.sizes)
        return view

    def _view(self, need: Slice, slice_bytes: SliceBytes) -> Tensor | None:
        """Return a slice as a view of the buffers, or None if it is misaligned or not contiguous in them."""
        if not self._buffers.holds(slice_bytes.chunks):
            return None
        dtype = self._tensors[need.key].dtype
        flat, delta = self._buffers.flat(slice_bytes.chunks[0], dtype)
        start, rest = divmod(slice_bytes.rows[0].offset + delta, dtype.itemsize)
        if rest:
            return None
        return flat.as_strided(need.sizes, strides(self._source.index.pieces[need.piece].sizes), start)

    def _fill(self, slice_bytes: SliceBytes, packed: Tensor, receives: Sequence[list[Tensor]]) -> None:
        """Copy the parts that this rank has read; register the other parts as receives."""
        for part in parts(slice_bytes.rows, slice_bytes.shard):
            readers = self._readers[part.chunk]
            goal = packed[part.low : part.high]
            if self._ranks.rank in readers:
                gather(self._buffers, Send(slice_bytes.rows, part.chunk, part.low, part.high), goal)
            else:
                receives[readers[0]].append(goal)

    def _sends(self, rank: int, held: ReadResult) -> list[Send]:
        """Return the parts to send to a rank, in the order in which it receives them."""
        if rank == self._ranks.rank:
            return []
        return [
            Send(rows, part.chunk, part.low, part.high)
            for file, rows in held.requests
            for part in parts(rows, self._source.shard[file])
            if self._readers[part.chunk][0] == self._ranks.rank and rank not in self._readers[part.chunk]
        ]


def copy(goals: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy all sources to their goals with a few threads; on CUDA, wait for the copies."""
    groups = _evenly([goal.nbytes for goal in goals], threads())
    gpu = next((goal.device for goal in goals if goal.is_cuda), None)
    # A new thread uses GPU 0.
    begin: dict[str, Any] = {} if gpu is None else {"initializer": torch.cuda.set_device, "initargs": (gpu,)}
    with ThreadPoolExecutor(max(1, len(groups)), thread_name_prefix="checkpoint-delivery", **begin) as pool:
        work = [pool.submit(_copy_some, goals[group], sources[group]) for group in groups[1:]]
        if groups:
            _copy_some(goals[groups[0]], sources[groups[0]])
        for each in work:
            each.result()
    if gpu is not None:
        torch.cuda.synchronize(gpu)


def _copy_some(goals: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    with torch.no_grad():  # the mode is per thread
        torch._foreach_copy_(list(goals), list(sources), non_blocking=goals[0].is_cuda)


def _evenly(sizes: Sequence[int], count: int) -> list[slice]:
    """Group neighbours into slices of about the same size in bytes, or into one if there is little to do."""
    total, groups, start, filled = sum(sizes), list[slice](), 0, 0
    least = max(_WORTH_A_THREAD, -(-total // count))
    for at, size in enumerate(sizes):
        filled += size
        if filled >= least:
            groups.append(slice(start, at + 1))
            start, filled = at + 1, 0
    return [*groups, slice(start, len(sizes))] if start < len(sizes) else groups


def _first_replica(tensor: DTensor) -> bool:
    """Return whether this rank is the first of the ranks that hold the same part of a tensor."""
    coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    return all(
        at == 0
        for at, placement in zip(coordinate, tensor.placements, strict=False)
        if isinstance(placement, Replicate)
    )
