"""Verified bytes from the rank that read them to the ranks that need them, in rounds of bounded size."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from checkpointing.engine.ranks.group import RankGroup
from checkpointing.engine.restore.read_buffers import ReadBuffers
from checkpointing.format.read_plan import Strip

ROUND = 256 << 20
"""Most bytes that a rank sends, and receives, at a time."""

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
    """Copy a part of a packed slice out of the read buffers; `goal` has as many bytes."""
    flat, delta = buffers.flat(piece.chunk)
    at = done = 0
    for strip in piece.rows:
        low, high = max(piece.low - at, 0), min(piece.high - at, strip.nbytes)
        if low < high:
            _copy_rows(flat, delta + strip.offset, strip, low, high, goal[done : done + high - low])
            done += high - low
        at += strip.nbytes


def _copy_rows(flat: Tensor, start: int, strip: Strip, low: int, high: int, goal: Tensor) -> None:
    """Bytes `low` to `high` of a strip that begins at `start`: a torn first row, whole ones, a torn last one."""
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
    """Collective: to rank r go `sends[r]`, from rank r come `receives[r]`, memory of as many bytes, in its order."""
    totals = [sum(piece.nbytes for piece in pieces) for pieces in sends]
    coming = [sum(len(goal) for goal in goals) for goals in receives]
    cap = max(ROUND // ranks.size, _SMALLEST)
    rounds = max(ranks.all_gather(-(-max(totals, default=0) // cap)))
    outgoing = [_Outgoing(buffers, pieces) for pieces in sends]
    incoming = [_Incoming(goals) for goals in receives]
    for number in range(rounds):
        out = [_share(total, cap, number) for total in totals]
        back = [_share(total, cap, number) for total in coming]
        sent, got = torch.empty(sum(out), dtype=torch.uint8), torch.empty(sum(back), dtype=torch.uint8)
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
