"""The restore ladder: load the newest checkpoint that all ranks can verify, from the fastest tier that has it."""

import gc
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from torch import Tensor

from checkpointing.config import MEMORY
from checkpointing.engine.collectives.group import Failed, RankGroup, result_or
from checkpointing.engine.restore.loader import Loaded, load, load_own, on_all_ranks, to_refusal
from checkpointing.engine.restore.metadata_reader import foreign_names, open_foreign, parse_step, read_index
from checkpointing.engine.restore.own_layout import Memory, owners
from checkpointing.engine.restore.source import LoadSource, OptionalKeys, Targets, number_chunks
from checkpointing.errors import CheckpointRefused, NothingVerifies, UnreadableNow, nothing_verifies
from checkpointing.event_sink import EmitEvent
from checkpointing.format.commit import parse_name
from checkpointing.format.manifest import Index, Manifest
from checkpointing.message_codec import peer_message
from checkpointing.storage.backends import Storage
from checkpointing.tiers.catalog import DistrustedCheckpoints, Owner
from checkpointing.tiers.copy_files import corrupt_copies, why_corrupt
from checkpointing.tiers.tier import ResolvedTier, absent_paths
from checkpointing.verification.verify import read_sealed


@peer_message
@dataclass(frozen=True)
class Candidate:
    """A checkpoint in a tier. `place` is the tier's number, or -1 for memory."""

    step: int
    name: str
    place: int
    foreign: bool = False


def rank_candidate(candidate: Candidate) -> tuple[Any, ...]:
    """Return a sort key: newest step first, then the fastest tier, then the latest attempt and take."""
    parts = parse_name(candidate.name)
    latest = (-parts.attempt, -parts.take, parts.nonce) if parts is not None else (0, 0, candidate.name)
    return -candidate.step, candidate.place, *latest


def newer_names(names: Sequence[str], found: Sequence[Candidate]) -> list[str]:
    """Return the `names` newer than every candidate in `found`, newest first."""
    known = [parts for candidate in found if (parts := parse_name(candidate.name)) is not None]
    newest = max(known, default=None)
    parsed = [parts for name in names if (parts := parse_name(name)) is not None]
    return [str(parts) for parts in sorted(parsed, reverse=True) if newest is None or parts > newest]


def agree_on_committed_step(
    ranks: RankGroup, places: Sequence[ResolvedTier], owner: Owner, restored: "Restored"
) -> int | None:
    """Return the newest committed step up to the restored step, or None if no step is committed. Collective.

    It is older than the restored step if that step was loaded from memory and never reached a disk.
    """
    answer = ranks.from_leader(lambda: [_find_committed(places, owner, restored)])
    return restored.step if isinstance(answer, Failed) else answer[0]


def _find_committed(places: Sequence[ResolvedTier], owner: Owner, restored: "Restored") -> int | None:
    entries = [entry for place in places for entry in place.catalog.entries_for_owner(owner)]
    if any(entry.name == restored.name for entry in entries):
        return restored.step
    return max((entry.step for entry in entries if entry.step <= restored.step), default=None)


T = TypeVar("T")
_log = logging.getLogger(__name__)

LATE_S = 30.0
"""Seconds to wait for checkpoints that must exist, because shared file systems may be slow to show new names."""

_PATIENCE_S = 0.2
_PROMPT_S = 0.0002


@dataclass(frozen=True, kw_only=True)
class RestoreOptions:
    """Options for a restore. Steps in `suspects` are loaded only if nothing else can be.

    `optional_names` are inherited names that may be missing, because nodes outside this job may hold them.
    `trust_foreign` allows other tools' DCP checkpoints, whose bytes have no digests. `corrupt` are names from earlier
    attempts that must not be loaded; if nothing else exists, the restore fails. `verdicts` is the storage of the run's
    own folder, where restore tests and verifications record bad copies.
    """

    suspects: Collection[int] = ()
    optional_names: Collection[str] = ()
    corrupt: Collection[str] = ()
    verdicts: Storage | None = None
    trust_foreign: bool = False


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Result of a restore. `absent` are this rank's optional keys that the checkpoint does not have.

    `tier` is `memory` or the path of the tier. `bytes_read` counts the bytes that all ranks read from the tier,
    `bytes_needed` those that they needed, each counted once. If `verified` is False, the bytes had no digests.
    """

    step: int
    extra: dict[str, Any]
    name: str
    absent: tuple[str, ...] = ()
    tier: str = ""
    bytes_read: int = 0
    bytes_needed: int = 0
    verified: bool = True


class Restorer:
    """Searches for a loadable checkpoint. All ranks make every decision together, so all load the same one.

    `memory` may be set at any time before `run`.
    """

    def __init__(
        self,
        places: Sequence[ResolvedTier],
        ranks: RankGroup,
        owner: Owner,
        emit: EmitEvent,
        memory: Memory | None = None,
        options: RestoreOptions | None = None,
    ) -> None:
        options = options or RestoreOptions()
        self._places, self._ranks, self._owner, self._emit = tuple(places), ranks, owner, emit
        self._suspects, self._trust_foreign = frozenset(options.suspects), options.trust_foreign
        self._required_names = tuple(name for name in owner.inherit if name not in options.optional_names)
        self._optional_names = tuple(options.optional_names)
        self._corrupt, self._verdicts = tuple(options.corrupt), options.verdicts
        self.memory = memory
        self.distrusted = DistrustedCheckpoints()
        """Checkpoints that must no longer be relied on."""

    def run(self, tensors: Mapping[str, Tensor] | Targets, optional_keys: OptionalKeys) -> Restored | None:
        """Load the newest trusted checkpoint, or return None if there is none. Raises NothingVerifies."""
        with _without_gc():
            return self._try_candidates(tensors if isinstance(tensors, Targets) else Targets(tensors), optional_keys)

    def _try_candidates(self, targets: Targets, optional_keys: OptionalKeys) -> Restored | None:
        refusals: list[CheckpointRefused] = []
        found, missing = self._candidates()
        for name in missing:
            refusals.append(CheckpointRefused(name, "missing, although this attempt should inherit it", damaged=False))
            self._refuse(refusals[-1], None)
        for name in newer_names(self._optional_names, found):
            reason = "not found: it was deleted, or is on another node's disk"
            self._refuse(CheckpointRefused(name, reason, damaged=False), None)
        found = self._without_corrupt(found, refusals)
        ordered = self._without_suspects(found)
        for _, copies in groupby(ordered, key=lambda candidate: (candidate.foreign, candidate.step)):
            start = time.monotonic()
            restored = self._load_any_copy(list(copies), targets, optional_keys, refusals)
            if restored is None:
                continue
            facts = {"step": restored.step, "name": restored.name, "seconds": time.monotonic() - start}
            verified = {} if restored.verified else {"verified": False}
            self._emit_event("checkpoint.restored", **facts, tier=restored.tier, **verified)
            doubted = (each for each in found if each.step > restored.step or each.step in self._suspects)
            self.distrusted.pass_over(each.name for each in doubted if each.name != restored.name)
            return restored
        refusals += [CheckpointRefused(name, "was found CORRUPT, and no run resumes from it") for name in self._corrupt]
        if refusals:
            raise nothing_verifies(refusals)
        return None

    # ---- candidates

    def _candidates(self) -> tuple[list[Candidate], list[str]]:
        """Return the candidates, best first, and the required names that are missing and newer than all of them."""
        listed = [_or_refused(self._list_candidates)] if self._ranks.leads or self._has_node_local_places() else [None]
        listings = [each for (each,) in self._ranks.all_gather(listed) if each is not None]
        for each in listings:
            if isinstance(each, CheckpointRefused):
                # An unreadable folder must never look like a fresh start.
                raise NothingVerifies([CheckpointRefused("the checkpoint folder", each.reason)])
        names = {each for listing in listings if not isinstance(listing, CheckpointRefused) for each in listing}
        found = [candidate for candidate in names if not candidate.foreign]
        if self.memory is not None:
            memory = self.memory
            found += [Candidate(memory.step(name), name, -1) for name in memory.names(self._ranks)]
        foreign = [candidate for candidate in names if candidate.foreign]
        missing = newer_names(self._required_names, found)
        if missing and (absent := self._ranks.broadcast(absent_paths(self._places) if self._ranks.leads else [])):
            reason = f"missing, and the tier {absent[0]} has no folder on rank 0's node"
            raise NothingVerifies([CheckpointRefused(name, reason, damaged=False) for name in missing])
        return sorted(found, key=rank_candidate) + sorted(foreign, key=rank_candidate), missing

    def _has_node_local_places(self) -> bool:
        return any(not place.shared for place in self._places)

    def _list_candidates(self) -> list[Candidate]:
        """Return the candidates in this node's own tiers and, on rank 0, in the shared ones too.

        Raises OSError if a tier of the node's own is unreadable, or if a shared one is and no other tier has the newest
        checkpoint to inherit.
        """
        deadline = time.monotonic() + LATE_S
        while True:
            found, unread = self._read_places()
            if unread is not None and (not found or newer_names([*self._required_names, *self._optional_names], found)):
                raise unread
            # Only names in shared tiers can appear late; other nodes report their own tiers.
            late = self._ranks.leads and not self._has_node_local_places() and newer_names(self._required_names, found)
            if not late or time.monotonic() >= deadline:
                return found + self._list_foreign()
            time.sleep(_PATIENCE_S)

    def _read_places(self) -> tuple[list[Candidate], OSError | None]:
        found: list[Candidate] = []
        unread: OSError | None = None
        for number, place in enumerate(self._places):
            if not (self._ranks.leads or not place.shared):
                continue
            try:
                entries = place.catalog.entries_for_owner(self._owner)
                found += [Candidate(entry.step, entry.name, number) for entry in entries]
            except OSError as error:
                if not place.shared:
                    raise
                unread = unread or error
                _log.warning("%s cannot be read: %s", place.path, error)
        return found, unread

    def _list_foreign(self) -> list[Candidate]:
        if not (self._trust_foreign and self._ranks.leads):
            return []
        return [
            Candidate(parse_step(name), name, number, foreign=True)
            for number, place in enumerate(self._places)
            if place.shared
            for name in foreign_names(place.storage)
        ]

    def _without_corrupt(self, found: Sequence[Candidate], refusals: list[CheckpointRefused]) -> list[Candidate]:
        """Leave out checkpoints that were found CORRUPT after being committed, including their copies in memory."""
        mine = corrupt_copies(self._verdicts, self._places) if self._ranks.leads else ()
        copies = self._ranks.broadcast(mine)
        kept = []
        for candidate in found:
            reason = why_corrupt(copies, candidate.name, candidate.place)
            if not reason:
                kept.append(candidate)
                continue
            refusals.append(CheckpointRefused(candidate.name, f"was found CORRUPT: {reason}"))
            if candidate.place == 0:
                self._refuse(refusals[-1], candidate)
        return kept

    def _without_suspects(self, found: Sequence[Candidate]) -> list[Candidate]:
        """Move suspects to the end, so that they are loaded only if nothing else can be."""
        trusted = [candidate for candidate in found if candidate.step not in self._suspects]
        doubted = [candidate for candidate in found if candidate.step in self._suspects]
        if trusted:
            for step in sorted({candidate.step for candidate in doubted}, reverse=True):
                reason = "skipped: the same failure occurred twice after loading it"
                self._emit_event("checkpoint.suspect", step=step, reason=reason)
        return [*trusted, *doubted]

    # ---- loading

    def _load_any_copy(
        self,
        copies: Sequence[Candidate],
        targets: Targets,
        optional_keys: OptionalKeys,
        refusals: list[CheckpointRefused],
    ) -> Restored | None:
        """Load the first loadable copy of one step. Return None if all of them are permanently refused.

        Unreadable copies in shared tiers are retried for LATE_S seconds. Then UnreadableNow is raised, because loading
        an older checkpoint would mean repeating the training done since.
        """
        deadline = 0.0
        while True:
            unread: list[tuple[Candidate, CheckpointRefused]] = []
            restored = None
            for candidate in copies:
                try:
                    restored = self._load(candidate, targets, optional_keys)
                    break
                except CheckpointRefused as refusal:
                    if refusal.unreadable and candidate.place >= 0 and self._places[candidate.place].shared:
                        unread.append((candidate, refusal))
                        continue
                    refusals.append(refusal)
                    self._refuse(refusal, candidate)
            deadline = deadline or time.monotonic() + LATE_S  # not counting the first try, which may take a long time
            retry = restored is None and bool(unread) and time.monotonic() < deadline
            if not self._ranks.broadcast(retry):  # rank 0 decides, because the ranks' clocks differ
                break
            time.sleep(_PATIENCE_S)
            copies = [candidate for candidate, _ in unread]
        for candidate, unreadable in unread:
            self._refuse(unreadable, candidate)
        if unread and restored is None:
            places = [f"{self._places[candidate.place].path}/{candidate.name}" for candidate, _ in unread]
            raise UnreadableNow([unreadable for _, unreadable in unread], places)
        return restored

    def _load(self, candidate: Candidate, targets: Targets, optional_keys: OptionalKeys) -> Restored:
        if candidate.place < 0:
            return self._from_memory(candidate, targets, optional_keys)
        place = self._places[candidate.place]
        if candidate.foreign:
            return self._from_foreign(place, candidate, targets.resolve({}), optional_keys)
        manifest, index = self._agree_on_manifest(place, candidate.name)
        tensors = targets.resolve(manifest.extra)
        if index is None:
            loaded = self._fill_own_layout(place, manifest, tensors, optional_keys)
        else:
            loaded = self._fill(self._source(place, manifest, index), tensors, optional_keys)
        return _build_result(candidate, place.path, manifest.extra, loaded)

    def _from_memory(self, candidate: Candidate, targets: Targets, optional_keys: OptionalKeys) -> Restored:
        assert self.memory is not None
        extra = self._ranks.broadcast(self.memory.extra(candidate.name))
        try:
            loaded = self.memory.load(candidate.name, self._ranks, targets.resolve(extra), optional_keys)
        except CheckpointRefused:
            self.memory.forget(candidate.name)
            raise
        return _build_result(candidate, MEMORY, extra, loaded)

    def _from_foreign(
        self, place: ResolvedTier, candidate: Candidate, tensors: Mapping[str, Tensor], optional_keys: OptionalKeys
    ) -> Restored:
        source = self._local_result(candidate.name, lambda: open_foreign(place.storage, candidate.name))
        loaded = self._fill(source, tensors, optional_keys)
        return replace(_build_result(candidate, place.path, {}, loaded), verified=False)

    def _fill(self, source: LoadSource, tensors: Mapping[str, Tensor], optional_keys: OptionalKeys) -> Loaded:
        memory = self.memory
        if memory is None:
            return load(source, self._ranks, tensors, optional_keys, lambda _: [])
        try:
            return load(source, self._ranks, tensors, optional_keys, memory.lend)
        finally:
            memory.take_back()

    def _fill_own_layout(
        self, place: ResolvedTier, manifest: Manifest, tensors: Mapping[str, Tensor], optional_keys: OptionalKeys
    ) -> Loaded:
        """Load a checkpoint in the run's own layout: each rank reads the files that it would write."""
        memory, ranks, name = self.memory, self._ranks, manifest.name
        assert memory is not None
        layout = memory.on_disk
        lacking = on_all_ranks(ranks, name, lambda: layout.lacking(tensors, alone=ranks.size == 1))
        facts = layout.exchange_facts(ranks, lacking, layout.plan.files)
        fits = on_all_ranks(ranks, name, lambda: layout.holds_nearly_all(tensors))
        if not all(fits) or layout.unknown_keys(lacking, facts):
            index = self._local_result(name, lambda: read_index(place.storage, manifest))
            return self._fill(self._source(place, manifest, index), tensors, optional_keys)
        source = self._source(place, manifest, layout.index(facts))
        try:
            return load_own(source, owners(source.shards, facts), ranks, tensors, optional_keys, memory.lend)
        finally:
            memory.take_back()

    def _local_result(self, name: str, act: Any) -> Any:
        """Run `act` on all ranks and return this rank's result. Raises CheckpointRefused everywhere if one failed."""
        kept: list[Any] = []
        on_all_ranks(self._ranks, name, lambda: kept.append(act()))
        return kept[0]

    def _agree_on_manifest(self, place: ResolvedTier, name: str) -> tuple[Manifest, Index | None]:
        """Return the same manifest and index on all ranks. Raises CheckpointRefused on all of them.

        For a checkpoint in the run's own layout, no index is returned, because it is already known.
        """
        ranks = self._ranks
        if place.shared:
            mine = _or_refused(lambda: self._read_sealed(place, name)) if ranks.leads else None
            found: tuple[Manifest, Index | None] | CheckpointRefused | None = ranks.broadcast(mine)
            if isinstance(found, CheckpointRefused):
                raise CheckpointRefused(name, found.reason, found.damaged, unreadable=found.unreadable)
        else:
            manifests = ranks.all_gather(_or_refused(lambda: self._read_sealed(place, name)))
            found = next((each for each in manifests if not isinstance(each, CheckpointRefused)), None)
            if found is None:
                refused = [each for each in manifests if isinstance(each, CheckpointRefused)]
                raise CheckpointRefused(name, refused[0].reason, any(each.damaged for each in refused))
        assert found is not None
        return found

    def _read_sealed(self, place: ResolvedTier, name: str) -> tuple[Manifest, Index | None]:
        manifest, faults = read_sealed(place.storage, name)
        if manifest is None or (faults and place.shared):
            damaged = any(fault.is_damage for fault in faults)
            unreadable = all(fault.is_unreadable for fault in faults)
            raise CheckpointRefused(name, "; ".join(map(str, faults)), damaged, unreadable=unreadable)
        if self.memory is not None and place.shared and self.memory.on_disk.matches(manifest):
            return manifest, None
        return manifest, read_index(place.storage, manifest)

    def _source(self, place: ResolvedTier, manifest: Manifest, index: Index) -> LoadSource:
        storage, name = place.storage, manifest.name
        seen = {entry.name: entry.size for entry in manifest.files}
        if not place.shared:
            present = self._local_result(name, lambda: storage.list(name))
            seen = {file: size for file, size in seen.items() if present.get(file) == size}
        return LoadSource(
            name=name,
            shards=number_chunks((each.name, each.size, each.chunk_size, each.chunks) for each in manifest.files),
            index=index,
            open=lambda file: storage.open(f"{name}/{file}"),
            seen=frozenset(seen),
            patience=LATE_S if place.shared else 0.0,
            pause=_PATIENCE_S,
        )

    # ---- events

    def _refuse(self, refusal: CheckpointRefused, candidate: Candidate | None) -> None:
        if candidate is not None and refusal.damaged:
            tier = MEMORY if candidate.place < 0 else self._places[candidate.place].path
            self.distrusted.refuse(tier, refusal.name)
        parts = parse_name(refusal.name)
        step = candidate.step if candidate is not None else parts.step if parts is not None else 0
        where = {} if candidate is None else self._where(candidate.place)
        self._emit_event(
            "checkpoint.refused", step=step, name=refusal.name, reason=refusal.reason, damaged=refusal.damaged, **where
        )

    def _where(self, place: int) -> dict[str, str]:
        """Return the tier as event data, or an empty dict if there is only one tier to load from."""
        if place < 0:
            return {"tier": MEMORY}
        return {"tier": self._places[place].path} if len(self._places) > 1 or self.memory is not None else {}

    def _emit_event(self, kind: str, **data: Any) -> None:
        if self._ranks.leads:
            self._emit(kind, data)


def _build_result(candidate: Candidate, tier: str, extra: dict[str, Any], loaded: Loaded) -> Restored:
    return Restored(
        step=candidate.step,
        extra=extra,
        name=candidate.name,
        absent=loaded.absent,
        tier=tier,
        bytes_read=loaded.bytes_read,
        bytes_needed=loaded.bytes_needed,
    )


@contextmanager
def _without_gc() -> Iterator[None]:
    """Disable garbage collection, which can take longer than a restore, and shorten the GIL switch interval.

    Readers request the GIL twice per chunk, and Python's default interval is longer than a read.
    """
    enabled, interval = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(_PROMPT_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        if enabled:
            gc.enable()


def _or_refused(act: Callable[[], T]) -> T | CheckpointRefused:
    return result_or(act, to_refusal)
