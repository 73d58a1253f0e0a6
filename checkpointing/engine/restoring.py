"""The ladder of restore: newest committed checkpoint first, verified by all ranks together, else the next older one."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from checkpointing.catalog import Catalog
from checkpointing.commit import parse_name
from checkpointing.engine.failure import FAILURES, explain
from checkpointing.engine.group import Ranks
from checkpointing.engine.reader import MayLack, plan_read, read_into, read_metadata
from checkpointing.engine.saving import Owner, Tell
from checkpointing.errors import NothingVerifies, Refused
from checkpointing.manifest import Manifest
from checkpointing.verify import all_chunks, check_chunks, read_sealed

T = TypeVar("T")

LATE_S = 30.0
"""How long to wait for what must be there by what others have seen: shared file systems show names late."""

_PATIENCE_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What was loaded; `absent` are optional keys of this rank that the checkpoint does not have."""

    step: int
    extra: dict[str, Any]
    name: str
    absent: tuple[str, ...] = ()


class Restorer:
    """Tries checkpoints in turn; every decision is taken by all ranks together, so all load the same one."""

    def __init__(self, catalog: Catalog, ranks: Ranks, owner: Owner, tell: Tell) -> None:
        self._catalog, self._storage = catalog, catalog.storage
        self._ranks, self._owner, self._tell = ranks, owner, tell
        self.refused: set[str] = set()
        self._touched = False

    def run(self, tensors: Mapping[str, Tensor], may_lack: MayLack) -> Restored | None:
        """Load the newest checkpoint that can be trusted; None when there is none; raises NothingVerifies."""
        self._touched = False
        refusals: list[Refused] = []
        found, missing = self._candidates()
        for name in missing:
            refusals.append(Refused(name, "not there, although this attempt is to inherit it"))
            self._refuse(refusals[-1])
        for name in found:
            start = time.monotonic()
            try:
                restored = self._load(name, tensors, may_lack)
            except Refused as refusal:
                refusals.append(refusal)
                self._refuse(refusal)
                continue
            self._say("checkpoint.restored", step=restored.step, name=name, seconds=time.monotonic() - start)
            return restored
        if refusals:
            raise NothingVerifies(refusals, touched=self._touched)
        return None

    def _candidates(self) -> tuple[list[str], list[str]]:
        """What there is to load, newest first, and what should be there and be newer than all of it, but is not."""
        listed: tuple[list[str], list[str]] | Refused | None = None
        if self._ranks.leads:
            listed = _try("", self._await_inherited)
        listed = self._ranks.broadcast(listed)
        if isinstance(listed, Refused):
            # Not knowing what there is must never look like a fresh start.
            raise NothingVerifies([Refused("the checkpoint folder", listed.reason)], touched=False)
        return listed

    def _await_inherited(self) -> tuple[list[str], list[str]]:
        owner, deadline = self._owner, time.monotonic() + LATE_S
        while True:
            found = [entry.name for entry in self._catalog.accepted(owner.attempt, owner.nonce, owner.inherit)]
            missing = _newer(owner.inherit, found)
            if not missing or time.monotonic() >= deadline:
                return found, missing
            time.sleep(_PATIENCE_S)

    def _load(self, name: str, tensors: Mapping[str, Tensor], may_lack: MayLack) -> Restored:
        manifest = self._sealed(name)
        self._together(name, lambda: self._check_share(manifest))
        # Only from here on is anything unpickled: every byte on every rank's share matched its digest.
        metadata = self._together(name, lambda: read_metadata(self._storage, manifest))
        plan, absent = self._together(name, lambda: plan_read(name, metadata, tensors, may_lack))
        self._touched = True
        self._together(name, lambda: read_into(self._storage, manifest, metadata, plan, tensors))
        return Restored(step=manifest.step, extra=manifest.extra, name=name, absent=absent)

    def _sealed(self, name: str) -> Manifest:
        """The manifest as rank 0 reads it, the same object on every rank; raises Refused on all of them."""
        found: Manifest | Refused | None = None
        if self._ranks.leads:
            found = _try(name, lambda: self._read_sealed(name))
        found = self._ranks.broadcast(found)
        if isinstance(found, Refused):
            raise found
        return found

    def _read_sealed(self, name: str) -> Manifest:
        manifest, faults = read_sealed(self._storage, name)
        if manifest is None or faults:
            raise Refused(name, "; ".join(map(str, faults)))
        return manifest

    def _check_share(self, manifest: Manifest) -> None:
        chunks = all_chunks(manifest)
        rank, size = self._ranks.rank, self._ranks.size
        mine = chunks[rank * len(chunks) // size : (rank + 1) * len(chunks) // size]
        self._await_files(manifest, {chunk.file.name for chunk in mine})
        faults = check_chunks(self._storage, manifest.name, mine)
        if faults:
            raise Refused(manifest.name, "; ".join(map(str, faults[:4])))

    def _await_files(self, manifest: Manifest, files: set[str]) -> None:
        deadline = time.monotonic() + LATE_S
        while not files <= self._storage.list(manifest.name).keys() and time.monotonic() < deadline:
            time.sleep(_PATIENCE_S)

    def _together(self, name: str, act: Callable[[], T]) -> T:
        """Do this rank's part; raises the same Refused on every rank when any of them failed."""
        result = _try(name, act)
        told = self._ranks.all_gather(result.reason if isinstance(result, Refused) else None)
        reasons = {reason: rank for rank, reason in reversed(list(enumerate(told))) if reason is not None}
        if reasons:
            ordered = sorted(reasons, key=reasons.__getitem__)
            raise Refused(name, "; ".join(ordered[:4]))
        assert not isinstance(result, Refused)
        return result

    def _refuse(self, refusal: Refused) -> None:
        self.refused.add(refusal.name)
        parts = parse_name(refusal.name)
        assert parts is not None
        self._say("checkpoint.refused", step=parts.step, name=refusal.name, reason=refusal.reason)

    def _say(self, kind: str, **data: Any) -> None:
        if self._ranks.leads:
            self._tell(kind, data)


def _newer(names: Sequence[str], found: Sequence[str]) -> list[str]:
    """Those of `names` that are newer than everything in `found`, newest first."""
    newest = parse_name(found[0]) if found else None
    parsed = [parts for name in names if (parts := parse_name(name)) is not None]
    return [str(parts) for parts in sorted(parsed, reverse=True) if newest is None or parts > newest]


def _try(name: str, act: Callable[[], T]) -> T | Refused:
    try:
        return act()
    except Refused as refusal:
        return refusal
    except FAILURES as error:
        return Refused(name, explain(error))
