"""Fingerprints of what the ranks hold after a restore, compared with those taken at save, in any layout.

Every copy of a tensor is compared: a plain tensor by its own rank, a DTensor over the ranks of its mesh together.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpointing.engine.ranks.failure import Failed, result_or_failed
from checkpointing.engine.ranks.group import RankGroup
from checkpointing.engine.ranks.peer_codec import peer_message
from checkpointing.engine.restore.source import local_box, local_part
from checkpointing.engine.state.fingerprints import combine, fingerprint, partial
from checkpointing.errors import Refused
from checkpointing.format.index import FINGERPRINTS, parse_fingerprints
from checkpointing.storage.backends import Storage
from checkpointing.verification.verify import read_listed, read_sealed


@peer_message
@dataclass(frozen=True, slots=True)
class ShardFingerprint:
    """A rank's shard of a DTensor: where it lies, and `sums`, its part of the fingerprint.

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
    """What one rank tells: fingerprints of its plain tensors, those that differ alone, and of its shards, all."""

    differing: dict[str, str]
    shards: dict[str, ShardFingerprint]


def saved_fingerprints(storage: Storage, name: str) -> dict[str, str]:
    """The fingerprints taken at save, by key; empty when the checkpoint has none.

    Raises Refused, ManifestError or OSError.
    """
    manifest, faults = read_sealed(storage, name)
    if manifest is None:
        raise Refused(name, "; ".join(map(str, faults)), any(fault.is_damage for fault in faults))
    if manifest.file(FINGERPRINTS) is None:
        return {}
    return parse_fingerprints(read_listed(storage, manifest, FINGERPRINTS))


def differing_tensors(
    ranks: RankGroup, name: str, tensors: Mapping[str, Tensor], saved: Mapping[str, str]
) -> list[str]:
    """Collective: a line for each tensor that is not as it was saved, sorted, the same list on every rank.

    `tensors` are those of this rank that were loaded from the checkpoint `name`. Raises Refused on every rank when one
    of them could not compute its fingerprints.
    """
    told = ranks.gather(result_or_failed(lambda: _of_rank(ranks.rank, tensors, saved)))
    mine: list[str] | Failed | None = None if told is None else result_or_failed(lambda: _lines(name, told, saved))
    lines: list[str] | Failed = ranks.broadcast(mine)
    if isinstance(lines, Failed):
        raise Refused(name, lines.reason, damaged=False)
    return lines


def _of_rank(rank: int, tensors: Mapping[str, Tensor], saved: Mapping[str, str]) -> RankFingerprints:
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
            raise Refused(name, f"rank {rank}: {each.reason}", damaged=False)
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
