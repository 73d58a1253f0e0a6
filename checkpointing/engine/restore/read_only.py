"""Read-only restore of one named checkpoint of any run, for restore tests.

Every loaded copy of a tensor is compared with the fingerprint taken at save time: a plain tensor by its own rank, a
DTensor by the ranks of its mesh together.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpointing.engine.collectives.group import Failed, RankGroup, World, result_or_failed
from checkpointing.engine.restore.restorer import Restored, Restorer
from checkpointing.engine.restore.source import ONLY_RNG, OptionalKeys, Targets, TensorsFor, local_box, local_part
from checkpointing.engine.state.fingerprints import combine, fingerprint, partial
from checkpointing.errors import CheckpointRefused, SaveFailed
from checkpointing.event_sink import EmitEvent, EventSink
from checkpointing.format.commit import parse_name
from checkpointing.message_codec import peer_message
from checkpointing.storage.backends import Storage, open_storage
from checkpointing.tiers.catalog import Catalog, Owner
from checkpointing.tiers.tier import ResolvedTier
from checkpointing.verification.verify import read_fingerprints, read_sealed


@peer_message
@dataclass(frozen=True, slots=True)
class ShardFingerprint:
    """A rank's shard of a DTensor: its position, and its contribution to the fingerprint (`sums`).

    `first_rank` is the lowest rank of the DTensor's mesh; ranks with the same `first_rank` together hold one copy.
    `whole` is the number of values in the whole tensor.
    """

    first_rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    sums: tuple[int, int]
    whole: int


@peer_message
@dataclass(frozen=True)
class RankFingerprints:
    """One rank's fingerprints: those of its plain tensors that differ, and those of all its shards."""

    differing: dict[str, str]
    shards: dict[str, ShardFingerprint]


def saved_fingerprints(storage: Storage, name: str) -> dict[str, str]:
    """Return the fingerprints taken at save time, by key; empty if the checkpoint has none.

    Raises CheckpointRefused, ManifestError or OSError.
    """
    manifest, faults = read_sealed(storage, name)
    if manifest is None:
        raise CheckpointRefused(name, "; ".join(map(str, faults)), any(fault.is_damage for fault in faults))
    return read_fingerprints(storage, manifest) or {}


def differing_tensors(
    ranks: RankGroup, name: str, tensors: Mapping[str, Tensor], saved: Mapping[str, str]
) -> list[str]:
    """Return a sorted list with a line for each tensor that differs from its saved values. Collective.

    The list is the same on every rank. `tensors` are this rank's tensors, loaded from the checkpoint `name`. Raises
    CheckpointRefused on every rank if any rank could not compute its fingerprints.
    """
    parts = ranks.gather(result_or_failed(lambda: _rank_fingerprints(ranks.rank, tensors, saved)))
    lines = ranks.from_leader(lambda: _lines(name, parts or (), saved))
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


def _lines(name: str, parts: Sequence[RankFingerprints | Failed], saved: Mapping[str, str]) -> list[str]:
    if failed := Failed.combine(parts):
        raise CheckpointRefused(name, failed.reason, damaged=False)
    reports = [each for each in parts if isinstance(each, RankFingerprints)]
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
        # A shard that several ranks hold counts once.
        places = {(shard.offsets, shard.sizes): shard.sums for shard in shards}
        held = sum(math.prod(sizes) for _, sizes in places)
        found = combine(places.values())
        if any(places[shard.offsets, shard.sizes] != shard.sums for shard in shards):
            yield key, f"ranks with the same shard hold different values (mesh of rank {first_rank})"
        elif held != shards[0].whole:
            yield key, f"the mesh of rank {first_rank} holds {held} of its {shards[0].whole} values"
        elif found != saved.get(key):
            yield key, f"fingerprint is {found} over the mesh of rank {first_rank}, {_at_save(key, saved)}"


def _at_save(key: str, saved: Mapping[str, str]) -> str:
    return f"but was {saved[key]} when saved" if key in saved else "but none was taken when saving"


class ReadOnlyCheckpoint:
    """Stand-in for a `Checkpointer` that only restores the checkpoint `name` from the folder or URL `place`.

    It saves and deletes nothing, starts no process and allocates no memory for saves. All ranks call the same methods
    in the same order, and each must be able to see the whole checkpoint in `place`.
    """

    committed_step: int | None = None
    """The checkpoint's step, once it has been restored."""
    failure: str | None = None
    lasting: SaveFailed | None = None
    save_seconds: Sequence[float] = ()

    def __init__(self, place: str, name: str, on_event: EmitEvent, world: World) -> None:
        """Create one process group. Collective.

        Raises ValueError for an invalid `name`, and whatever `open_storage` raises. `on_event` is called on rank 0.
        """
        if parse_name(name) is None:
            raise ValueError(f"{name!r} is not the name of a checkpoint")
        path = place if "://" in place else str(Path(place).absolute())
        storage = open_storage(path)
        tier = ResolvedTier(path=path, storage=storage, catalog=Catalog(path, storage))
        # No checkpoint has an empty nonce, so this owner may load only the inherited checkpoint.
        owner = Owner(attempt=0, nonce="", inherit=(name,), fence=lambda: False)
        self._name, self._storage, self._events = name, storage, EventSink(on_event)
        self._ranks = world.group()
        self._restorer = Restorer((tier,), self._ranks, owner, self._events.emit)
        self._loaded: dict[str, Tensor] = {}
        self._saved: dict[str, str] = {}
        self.restore_result: Restored | None = None

    @property
    def has_fingerprints(self) -> bool:
        """Whether the checkpoint has fingerprints to compare with. Known on all ranks after `restore`."""
        return bool(self._saved)

    def restore(self, tensors: Mapping[str, Tensor] | TensorsFor, optional_keys: OptionalKeys = ONLY_RNG) -> Restored:
        """Fill `tensors` in place from this checkpoint. The arguments are those of `Checkpointer.restore`.

        Raises NothingVerifies on every rank if it cannot be loaded. Waits up to `restorer.LATE_S` seconds for a missing
        checkpoint, because shared file systems may be slow to show new names.
        """
        targets = Targets(tensors)
        restored = self._restorer.run(targets, optional_keys)
        assert restored is not None, "a checkpoint that is inherited and missing is an error"
        saved = self._ranks.from_leader(lambda: saved_fingerprints(self._storage, self._name))
        if isinstance(saved, Failed):
            raise CheckpointRefused(self._name, saved.reason, damaged=False)
        absent = set(restored.absent)
        self._loaded = {key: tensor for key, tensor in targets.last.items() if key not in absent}
        self._saved, self.restore_result, self.committed_step = saved, restored, restored.step
        return restored

    def fingerprint_faults(self) -> list[str]:
        """Return a line for each loaded tensor whose values differ from the saved ones. Collective.

        The list is sorted and the same on every rank. This reads the current values, so call it before training.
        Tensors that no rank has loaded are not compared. If the checkpoint has no fingerprints (see
        `has_fingerprints`), the list is empty. Raises CheckpointRefused.
        """
        if not self.has_fingerprints:
            return []
        return differing_tensors(self._ranks, self._name, self._loaded, self._saved)

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Do nothing, because nothing is saved."""

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        extra: dict[str, Any],
        rank_state: dict[str, Any] | None = None,
        trained: Collection[str] = (),
    ) -> bool:
        """Raise RuntimeError."""
        raise RuntimeError(f"step {step} is not saved: {self._name} was opened read-only")

    def before_optimizer_step(self) -> None:
        """Return immediately, because no copy of the tensors is in progress."""

    def wait(self) -> None:
        """Return once a write of every event has been attempted."""
        self._events.flush()

    def close(self, flush_for: Callable[[], float] | None = None) -> None:
        """Release the process group. Raises the error that kept an event from being written."""
        self._loaded = {}
        self._ranks.close()
        self._events.close()
