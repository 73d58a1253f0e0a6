"""Loading of tensors from one checkpoint: read, verify, agree, exchange, deliver, compare fingerprints.

Every copy of a tensor is compared: a plain tensor by its own rank, a DTensor by the ranks of its mesh together.

Every rank reads its share of the chunks into its own memory and verifies it there. No tensor is written before all
ranks have agreed that all of their bytes matched.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from checkpointing.engine.collectives.group import (
    Failed,
    RankGroup,
    explain,
    is_damage,
    is_misfit,
    is_unreadable,
    result_or,
    result_or_failed,
)
from checkpointing.engine.collectives.peer_codec import peer_message
from checkpointing.engine.restore.exchange import Readers, Send, assign, exchange, gather
from checkpointing.engine.restore.read_buffers import ChunkReader, Lend, ReadBuffers, threads
from checkpointing.engine.restore.source import (
    LoadSource,
    OptionalKeys,
    SliceBytes,
    find_slices,
    local_box,
    local_part,
    locate_slice,
)
from checkpointing.engine.state.fingerprints import combine, fingerprint, partial
from checkpointing.errors import CheckpointRefused
from checkpointing.format.manifest import FINGERPRINTS, parse_fingerprints
from checkpointing.format.read_plan import Slice, Strip, parts
from checkpointing.storage.backends import Storage
from checkpointing.verification.verify import read_listed, read_sealed


@peer_message
@dataclass(frozen=True, slots=True)
class ShardFingerprint:
    """A rank's shard of a DTensor: its position, and `sums`, its contribution to the fingerprint.

    `first_rank` is the lowest rank of the DTensor's mesh; ranks with the same one hold one copy together. `whole` is
    the number of values of the whole tensor.
    """

    first_rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    sums: tuple[int, int]
    whole: int


@peer_message
@dataclass(frozen=True)
class RankFingerprints:
    """Fingerprints of one rank: of its differing plain tensors, and of all its shards."""

    differing: dict[str, str]
    shards: dict[str, ShardFingerprint]


def saved_fingerprints(storage: Storage, name: str) -> dict[str, str]:
    """Return the fingerprints taken at save, by key; empty if the checkpoint has none.

    Raises Refused, ManifestError or OSError.
    """
    manifest, faults = read_sealed(storage, name)
    if manifest is None:
        raise CheckpointRefused(name, "; ".join(map(str, faults)), any(fault.is_damage for fault in faults))
    if manifest.file(FINGERPRINTS) is None:
        return {}
    return parse_fingerprints(read_listed(storage, manifest, FINGERPRINTS))


def differing_tensors(
    ranks: RankGroup, name: str, tensors: Mapping[str, Tensor], saved: Mapping[str, str]
) -> list[str]:
    """Return a line for each tensor that differs from its saved values, sorted, the same on every rank; collective.

    `tensors` are this rank's tensors loaded from the checkpoint `name`. Raises Refused on every rank if one of them
    could not compute its fingerprints.
    """
    told = ranks.gather(result_or_failed(lambda: _rank_fingerprints(ranks.rank, tensors, saved)))
    mine: list[str] | Failed | None = None if told is None else result_or_failed(lambda: _lines(name, told, saved))
    lines: list[str] | Failed = ranks.broadcast(mine)
    if isinstance(lines, Failed):
        raise CheckpointRefused(name, lines.reason, damaged=False)
    return lines


def _rank_fingerprints(rank: int, tensors: Mapping[str, Tensor], saved: Mapping[str, str]) -> RankFingerprints:
    differing, shards = dict[str, str](), dict[str, ShardFingerprint]()
    for key, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            box = local_box(tensor)
            sums = partial(local_part(tensor), box.offsets, tensor.shape) if box.volume else (0, 0)
            mesh = tensor.device_mesh.mesh
            shards[key] = ShardFingerprint(int(mesh.min()), box.offsets, box.sizes, sums, tensor.numel())
        elif (found := fingerprint(tensor)) != saved.get(key):
            differing[key] = found
    return RankFingerprints(differing, shards)


def _lines(name: str, told: Sequence[RankFingerprints | Failed], saved: Mapping[str, str]) -> list[str]:
    reports: list[RankFingerprints] = []
    for rank, each in enumerate(told):
        if isinstance(each, Failed):
            raise CheckpointRefused(name, f"rank {rank}: {each.reason}", damaged=False)
        reports.append(each)
    faults: dict[str, str] = {}
    for key, reason in (*_whole_faults(reports, saved), *_shard_faults(reports, saved)):
        faults.setdefault(key, reason)
    return [f"{key}: {faults[key]}" for key in sorted(faults)]


def _whole_faults(reports: Sequence[RankFingerprints], saved: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for rank, report in enumerate(reports):
        for key, found in report.differing.items():
            yield key, f"fingerprint is {found} on rank {rank}, {_at_save(key, saved)}"


def _shard_faults(reports: Sequence[RankFingerprints], saved: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    copies: dict[tuple[str, int], list[ShardFingerprint]] = {}
    for report in reports:
        for key, shard in report.shards.items():
            copies.setdefault((key, shard.first_rank), []).append(shard)
    for (key, first_rank), shards in copies.items():
        # Ranks that hold the same shard count once.
        places = {(shard.offsets, shard.sizes): shard.sums for shard in shards}
        held = sum(math.prod(sizes) for _, sizes in places)
        found = combine(places.values())
        if any(places[shard.offsets, shard.sizes] != shard.sums for shard in shards):
            yield key, f"ranks that hold the same shard of it hold other values (mesh of rank {first_rank})"
        elif held != shards[0].whole:
            yield key, f"the mesh of rank {first_rank} holds {held} of its {shards[0].whole} values"
        elif found != saved.get(key):
            yield key, f"fingerprint is {found} over the mesh of rank {first_rank}, {_at_save(key, saved)}"


def _at_save(key: str, saved: Mapping[str, str]) -> str:
    return f"at save it was {saved[key]}" if key in saved else "at save none was taken"


T = TypeVar("T")
_WORTH_A_THREAD = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """Result of a load; bytes are sums over all ranks, and bytes that several ranks need count once."""

    absent: tuple[str, ...]
    bytes_read: int
    bytes_needed: int


def to_refusal(error: BaseException, name: str = "") -> CheckpointRefused:
    """Return the refusal of a checkpoint whose load raised this error."""
    return CheckpointRefused(name, explain(error), is_damage(error), not is_misfit(error), is_unreadable(error))


def on_all_ranks(ranks: RankGroup, name: str, act: Callable[[], T]) -> list[T]:
    """Do this rank's part and return all ranks' results; raises the same Refused on every rank if one failed."""
    told: list[tuple[T | None, CheckpointRefused | None]] = ranks.all_gather(
        result_or(lambda: (act(), None), lambda error: (None, to_refusal(error)))
    )
    failures = [failure for _, failure in told if failure is not None]
    if failures:
        raise CheckpointRefused(
            name,
            "; ".join(list(dict.fromkeys(failure.reason for failure in failures))[:4]),
            damaged=any(failure.damaged for failure in failures),
            fits=all(failure.fits for failure in failures),
            unreadable=all(failure.unreadable for failure in failures),
        )
    return [cast(T, value) for value, _ in told]


def load(
    source: LoadSource, ranks: RankGroup, tensors: Mapping[str, Tensor], optional_keys: OptionalKeys, lend: Lend
) -> Loaded:
    """Read and verify everything, then fill `tensors`; collective. Raises Refused before any tensor has changed."""
    rank_load = RankLoad(source, ranks, tensors)
    wanted = on_all_ranks(ranks, source.name, lambda: rank_load.plan(optional_keys))

    lost = optional_keys.lost([want.surplus for want in wanted], source.index.tensors)
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise CheckpointRefused(source.name, f"has {lost[0]}{more}, which is not here", damaged=False, fits=False)

    def read() -> "ReadResult":
        _check_present(source, wanted)
        readers = assign(source.shards, [want.by_chunk for want in wanted], [want.seen for want in wanted])
        mine = [chunk for chunk, reading in enumerate(readers) if ranks.rank in reading]
        buffers = ReadBuffers.allocate(source.shards, mine, lend)
        reader = ChunkReader(source.name, source.shards, source.open, patience=source.patience, pause=source.pause)
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-reading") as pool:
            reading = pool.submit(reader.read, mine, buffers)
            requests = rank_load.expect(buffers, readers)
            reading.result()
        return ReadResult(bytes_read=reader.bytes_read, requests=requests)

    return rank_load.finish(on_all_ranks(ranks, source.name, read), wanted)


def load_own(
    source: LoadSource,
    readers: Readers,
    ranks: RankGroup,
    tensors: Mapping[str, Tensor],
    optional_keys: OptionalKeys,
    lend: Lend,
) -> Loaded:
    """Load a checkpoint in the run's own layout: like `load`, but readers are known, so planning overlaps reading."""
    rank_load = RankLoad(source, ranks, tensors)

    def read() -> tuple[RankNeeds, ReadResult]:
        mine = [chunk for chunk, (owner,) in enumerate(readers) if owner == ranks.rank]
        buffers = ReadBuffers.allocate(source.shards, mine, lend)
        reader = ChunkReader(source.name, source.shards, source.open, patience=source.patience, pause=source.pause)
        with ThreadPoolExecutor(1, thread_name_prefix="checkpoint-reading") as pool:
            reading = pool.submit(reader.read, mine, buffers)
            wanted = rank_load.plan(optional_keys)
            requests = rank_load.expect(buffers, readers)
            reading.result()
        return wanted, ReadResult(bytes_read=reader.bytes_read, requests=requests)

    told = on_all_ranks(ranks, source.name, read)
    return rank_load.finish([held for _, held in told], [wanted for wanted, _ in told])


def _check_present(source: LoadSource, wanted: Sequence["RankNeeds"]) -> None:
    seen = frozenset[str]().union(*(want.seen for want in wanted))
    missing = [shard.name for shard in source.shards if shard.name not in seen]
    if missing:
        # A file that exists nowhere fails the check by name; these may be on nodes outside this job.
        raise CheckpointRefused(source.name, "; ".join(f"{name}: missing" for name in missing[:4]), damaged=False)


@peer_message
@dataclass(frozen=True, kw_only=True)
class RankNeeds:
    """Needs of a rank, exchanged before anything is read."""

    seen: frozenset[str]
    by_chunk: dict[int, int]  # bytes needed of each chunk
    unique: int  # bytes needed that no other rank counts
    plain: dict[tuple[str, int], int]  # bytes needed of values that other ranks may count too, by file and offset
    surplus: bytes  # as in OptionalKeys


@peer_message
@dataclass(frozen=True, kw_only=True)
class ReadResult:
    """Result of a rank's verified read: the slices of which other ranks must send it parts."""

    bytes_read: int
    requests: "Requests"


Requests = list[tuple[str, list[Strip]]]
"""Files, and rows in them."""


class RankLoad:
    """A rank's part of loading `source` into `tensors`: what it needs, reads, forwards and delivers."""

    def __init__(self, source: LoadSource, ranks: RankGroup, tensors: Mapping[str, Tensor]) -> None:
        self._source, self._ranks, self._tensors = source, ranks, tensors
        self._slices: list[Slice] = []
        self._slice_bytes: list[SliceBytes | None] = []  # None for an odd piece
        self._readers: Readers = ()
        self._buffers = ReadBuffers()
        self._goals: list[Tensor] = []  # destination of each slice; its source is below
        self._sources: list[Tensor] = []
        self._unfilled: list[tuple[SliceBytes, Tensor]] = []  # memory of values that are not in one piece
        self._absent: tuple[str, ...] = ()

    def plan(self, optional_keys: OptionalKeys) -> RankNeeds:
        """Determine what is needed; raises Refused if the checkpoint does not fit."""
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
                self._goals.append(_region(local[need.key], need.goal, need.sizes))
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
            return _region(self._source.odd[need.piece](), need.source, need.sizes)
        view = self._view(need, slice_bytes)
        if view is None:
            packed = torch.empty(slice_bytes.nbytes, dtype=torch.uint8, device="cpu")
            self._unfilled.append((slice_bytes, packed))
            view = packed.view(self._tensors[need.key].dtype).view(need.sizes)
        return view

    def _view(self, need: Slice, slice_bytes: SliceBytes) -> Tensor | None:
        """Return a slice as a view of the buffers, or None if it is not in one piece there or misaligned."""
        if not self._buffers.holds(slice_bytes.chunks):
            return None
        dtype = self._tensors[need.key].dtype
        flat, delta = self._buffers.flat(slice_bytes.chunks[0], dtype)
        start, rest = divmod(slice_bytes.rows[0].offset + delta, dtype.itemsize)
        if rest:
            return None
        return flat.as_strided(need.sizes, _steps(self._source.index.pieces[need.piece].sizes), start)

    def _fill(self, slice_bytes: SliceBytes, packed: Tensor, receives: Sequence[list[Tensor]]) -> None:
        """Copy what this rank has itself; the rest comes from the ranks that have it."""
        for part in parts(slice_bytes.rows, slice_bytes.shard):
            readers = self._readers[part.chunk]
            goal = packed[part.low : part.high]
            if self._ranks.rank in readers:
                gather(self._buffers, Send(slice_bytes.rows, part.chunk, part.low, part.high), goal)
            else:
                receives[readers[0]].append(goal)

    def _sends(self, rank: int, held: ReadResult) -> list[Send]:
        """Return what to send to a rank, in the order in which it will receive it."""
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
    """Group neighbours into slices of about the same number of bytes; one group if there is little to do."""
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


@lru_cache(maxsize=4096)
def _steps(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a row-major array, in values."""
    steps, step = [], 1
    for size in reversed(shape):
        steps.append(step)
        step *= size
    return tuple(steps[::-1])


def _first_replica(tensor: DTensor) -> bool:
    """Return whether this rank counts a tensor's part, among all ranks that hold the same part."""
    coordinate: Sequence[int] = tensor.device_mesh.get_coordinate() or ()
    return all(
        at == 0
        for at, placement in zip(coordinate, tensor.placements, strict=False)
        if isinstance(placement, Replicate)
    )
