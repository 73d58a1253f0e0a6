"""Assignment of chunks to readers, and the exchange of verified bytes between ranks."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from checkpointing.engine.collectives.group import RankGroup
from checkpointing.engine.restore.read_buffers import ReadBuffers
from checkpointing.format.read_plan import Shard, Strip

Wanted = Mapping[int, int]
"""Bytes that a rank needs of each chunk, by the chunk's number."""

Readers = Sequence[tuple[int, ...]]
"""For every chunk, the ranks that read it."""

_ALMOST_ALL = 0.8
_NEARLY_AS_MUCH = 0.9


def assign(shards: Sequence[Shard], wanted: Sequence[Wanted], seen: Sequence[Collection[str]]) -> Readers:
    """Return for every chunk of all files the ranks that read it; the first one forwards what others need.

    `wanted` and `seen` are by rank: bytes needed of each chunk, files that the rank can read. A chunk has one reader,
    with one exception: a chunk of which two ranks each need almost all is read by both, which is as fast as sending it.
    Chunks that no rank needs are read too, because a checkpoint with any damage is not trusted.
    """
    loads = [0] * len(wanted)
    chosen: dict[int, tuple[int, ...]] = {}
    open_ones: list[tuple[int, int, list[int]]] = []
    for shard in shards:
        able = [rank for rank, names in enumerate(seen) if shard.name in names]
        assert able or not shard.count, f"nobody can read {shard.name}"
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
    # Chunks with one natural reader are settled by now; the rest balances the loads.
    for chunk, size, candidates in open_ones:
        reader = min(candidates, key=lambda rank: (loads[rank], rank))
        chosen[chunk] = (reader,)
        loads[reader] += size
    return [chosen[chunk] for chunk in sorted(chosen)]


def _candidates(able: list[int], wanted: Sequence[Wanted], chunk: int) -> list[int]:
    """Return the ranks that need nearly the most of a chunk, or all that can read it if it is needed nowhere."""
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
"""Maximum bytes that a rank sends, and receives, at a time."""

_SMALLEST = 1 << 20


@dataclass(frozen=True, slots=True)
class Send:
    """Bytes `low` to `high` of a packed slice, all of them in `chunk`."""

    rows: Sequence[Strip]
    chunk: int
    low: int
    high: int

    @property
    def nbytes(self) -> int:
        return self.high - self.low


def gather(buffers: ReadBuffers, piece: Send, goal: Tensor) -> None:
    """Copy a part of a packed slice out of the read buffers; `goal` has the same number of bytes."""
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
    """Send `sends[r]` to rank r and receive `receives[r]` from it, in its order and of equal size; collective."""
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


class _Outgoing:
    """The stream of bytes to one rank."""

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


class _Incoming:
    """The stream of bytes from one rank."""

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
