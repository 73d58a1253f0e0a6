"""After a restore: what is known of the state that was loaded, to compare the next save with."""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor

from checkpointing.engine.failure import Failed, attempt
from checkpointing.engine.group import Ranks
from checkpointing.engine.judging import Judge
from checkpointing.engine.plausibility import highest
from checkpointing.engine.saving import Owner
from checkpointing.index import FINGERPRINTS, parse_fingerprints
from checkpointing.tiers import TierPlace
from checkpointing.verify import read_listed, read_sealed


class Restored(Protocol):
    """The part of a restore's result that is needed here."""

    @property
    def step(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def absent(self) -> Collection[str]: ...


def look_back(
    ranks: Ranks,
    places: Sequence[TierPlace],
    owner: Owner,
    judge: Judge,
    restored: Restored,
    tensors: Mapping[str, Tensor],
) -> int | None:
    """Collective: tell the judge what was restored; the newest step up to it that is committed somewhere.

    That is the step itself, unless it was loaded from memory and never reached a disk.
    """
    # What the checkpoint does not have is still as it was before, and about to be forgotten.
    loaded = {key: tensor for key, tensor in tensors.items() if key not in set(restored.absent)}
    counted = ranks.all_gather(_highest_count(judge, loaded))
    found = (attempt(lambda: _known(places, restored.name)), attempt(lambda: _committed(places, owner, restored)))
    known, committed = ranks.broadcast(found if ranks.leads else None)
    judge.begin(restored.step, highest(counted), {} if isinstance(known, Failed) else known)
    return restored.step if isinstance(committed, Failed) else committed


def _highest_count(judge: Judge, tensors: Mapping[str, Tensor]) -> float | None:
    """The steps that the optimizer has made, as this rank's tensors tell."""
    found = [tensor for key, tensor in tensors.items() if judge.watched.counts(key)]
    parts = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in found]
    return highest([float(part) for part in parts if part.numel() == 1])


def _known(places: Sequence[TierPlace], name: str) -> dict[str, str]:
    """The fingerprints of a checkpoint, from whichever tier has them; none when it has none."""
    for place in places:
        manifest, _ = read_sealed(place.storage, name)
        if manifest is not None and manifest.file(FINGERPRINTS) is not None:
            return parse_fingerprints(read_listed(place.storage, manifest, FINGERPRINTS))
    return {}


def _committed(places: Sequence[TierPlace], owner: Owner, restored: Restored) -> int | None:
    entries = [entry for place in places for entry in place.catalog.accepted(owner.attempt, owner.nonce, owner.inherit)]
    if any(entry.name == restored.name for entry in entries):
        return restored.step
    return max((entry.step for entry in entries if entry.step <= restored.step), default=None)
