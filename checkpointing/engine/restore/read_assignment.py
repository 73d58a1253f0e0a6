"""Who reads which chunk: every byte once, by a rank that needs most of it, balanced by bytes. Pure, without torch."""

from collections.abc import Collection, Mapping, Sequence

from checkpointing.format.read_plan import Shard

Wanted = Mapping[int, int]
"""How many bytes of a chunk a rank needs, by the chunk's number."""

Readers = Sequence[tuple[int, ...]]
"""For every chunk the ranks that read it."""

_ALMOST_ALL = 0.8
_NEARLY_AS_MUCH = 0.9


def assign(shards: Sequence[Shard], wanted: Sequence[Wanted], seen: Sequence[Collection[str]]) -> Readers:
    """For every chunk of all files the ranks that read it, the first of which passes on what others need of it.

    `wanted` and `seen` are by rank: bytes needed of each chunk, files that the rank can read. A chunk has one reader.
    There is one exception: a chunk that two ranks need, both almost all of it, is read by both, which is no slower
    than to send it. Chunks that nobody needs are read too: a checkpoint with any damage is not trusted.
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
    # What has one natural reader is settled by now; the rest evens out the loads.
    for chunk, size, candidates in open_ones:
        reader = min(candidates, key=lambda rank: (loads[rank], rank))
        chosen[chunk] = (reader,)
        loads[reader] += size
    return [chosen[chunk] for chunk in sorted(chosen)]


def _candidates(able: list[int], wanted: Sequence[Wanted], chunk: int) -> list[int]:
    """The ranks that need about as much of a chunk as the one that needs most; all that can read it if none does."""
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
