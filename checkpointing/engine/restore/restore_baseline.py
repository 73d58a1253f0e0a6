"""After a restore: what is known of the state that was loaded, to compare the next save with."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpointing.engine.ranks.failure import Failed, result_or_failed
from checkpointing.engine.ranks.group import RankGroup
from checkpointing.engine.state.plausibility import PlausibilityJudge, highest
from checkpointing.format.index import FINGERPRINTS, parse_fingerprints
from checkpointing.owner import Owner
from checkpointing.tiers.tier import ResolvedTier
from checkpointing.verification.verify import read_listed, read_sealed


class Restored(Protocol):
    """The part of a restore's result that is needed here."""

    @property
    def step(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def absent(self) -> Collection[str]: ...


def set_restore_baseline(
    ranks: RankGroup,
    places: Sequence[ResolvedTier],
    owner: Owner,
    judge: PlausibilityJudge,
    restored: Restored,
    tensors: Mapping[str, Tensor],
) -> int | None:
    """Collective: tell the judge what was restored; the newest step up to it that is committed somewhere.

    That is the step itself, unless it was loaded from memory and never reached a disk.
    """
    # What the checkpoint does not have is still as it was before, and about to be forgotten.
    loaded = {key: tensor for key, tensor in tensors.items() if key not in set(restored.absent)}
    counted = ranks.all_gather(_highest_count(judge, loaded))
    found = (
        result_or_failed(lambda: _known(places, restored.name)),
        result_or_failed(lambda: _committed(places, owner, restored)),
    )
    known, committed = ranks.broadcast(found if ranks.leads else None)
    judge.set_baseline(restored.step, highest(counted), {} if isinstance(known, Failed) else known)
    return restored.step if isinstance(committed, Failed) else committed


def _highest_count(judge: PlausibilityJudge, tensors: Mapping[str, Tensor]) -> float | None:
    """The steps that the optimizer has made, as this rank's tensors tell."""
    found = [tensor for key, tensor in tensors.items() if judge.trained_keys.counts(key)]
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in found]
    return highest([float(part) for part in parts if part.numel() == 1])


def _known(places: Sequence[ResolvedTier], name: str) -> dict[str, str]:
    """The fingerprints of a checkpoint, from whichever tier has them; none when it has none."""
    for place in places:
        manifest, _ = read_sealed(place.storage, name)
        if manifest is not None and manifest.file(FINGERPRINTS) is not None:
            return parse_fingerprints(read_listed(place.storage, manifest, FINGERPRINTS))
    return {}


def _committed(places: Sequence[ResolvedTier], owner: Owner, restored: Restored) -> int | None:
    entries = [entry for place in places for entry in place.catalog.accepted(owner)]
    if any(entry.name == restored.name for entry in entries):
        return restored.step
    return max((entry.step for entry in entries if entry.step <= restored.step), default=None)
