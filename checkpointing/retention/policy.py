"""Retention: a pure function that decides which checkpoints to delete, and the pass over one tier that deletes them."""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from checkpointing.config import CheckpointConfig
from checkpointing.event_sink import EmitEvent
from checkpointing.format.commit import parse_name
from checkpointing.format.manifest import Manifest
from checkpointing.retention.garbage import (
    DebrisFolder,
    DebrisState,
    attempt_ids,
    decide_debris,
    delete,
    delete_debris,
    find_debris,
    pinned_names,
)
from checkpointing.storage.backends import Storage
from checkpointing.storage.durable import number
from checkpointing.tiers.catalog import Entry, Owner
from checkpointing.tiers.tier import ResolvedTier
from checkpointing.verification.verdicts import CopyVerdict, bad_copies, newest_restore_tested, read_verdicts
from checkpointing.verification.verify import read_sealed

_log = logging.getLogger(__name__)

METRICS = "metrics"
"""Key in a checkpoint's facts under which the metrics for its step are stored, by name."""

FLOOR = 2
"""Minimum number of trusted checkpoints to keep, so that there is a fallback if the newest is damaged."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Retention rules: the newest `keep` (at least 2), every multiple of `every` steps, the best `best` by `metric`.

    The newest checkpoint that has passed a restore test is also always kept.
    """

    keep: int = 3
    every: int = 0
    best: int = 0
    metric: str = "loss"
    mode: str = "min"

    @classmethod
    def from_config(cls, keep: int, config: CheckpointConfig) -> "Policy":
        """Return the policy for a tier that keeps the newest `keep`."""
        best = config.best
        number_of_best = best.keep if best.metric else 0
        return cls(keep=keep, every=config.retention.every, best=number_of_best, metric=best.metric, mode=best.mode)


@dataclass(frozen=True, kw_only=True)
class RetentionDecision:
    """The decision on whether to keep one checkpoint, and the reason."""

    entry: Entry
    stays: bool
    reason: str


def decide_retention(
    entries: Sequence[Entry],
    policy: Policy,
    *,
    metrics: Mapping[str, float | None] | None = None,
    pinned: Collection[str] = (),
    refused: Collection[str] = (),
    held: Collection[str] = (),
    newest: str | None = None,
    restore_tested: str | None = None,
) -> list[RetentionDecision]:
    """Decide on every committed checkpoint. `entries` and the result are in order from newest to oldest.

    Checkpoints in `refused` (untrusted: SUSPECT, CORRUPT, refused by a restore or a verification) do not count towards
    those to keep, and stay as evidence. Checkpoints in `held` are being read. `newest` was just committed; after a
    rollback, it may not have the highest step. `restore_tested` is the newest checkpoint that has passed a restore
    test. `metrics` maps names to values; a checkpoint without a finite value is never among the best.
    """
    trusted = [entry for entry in entries if entry.name not in refused]
    recent = {entry.name for entry in trusted[: max(policy.keep, FLOOR)]}
    best = best_names(trusted, policy, metrics or {})

    def reason_to_stay(entry: Entry) -> str | None:
        if entry.name in refused:
            return "it is not trusted and is kept as evidence"
        if entry.name == newest:
            return "it was just committed"
        if entry.name in pinned:
            return "it is pinned"
        if entry.name in recent:
            return f"it is one of the newest {max(policy.keep, FLOOR)}"
        if entry.name == restore_tested:
            return "it is the newest one that passed a restore test"
        if policy.every and entry.step % policy.every == 0:
            return f"its step is a multiple of {policy.every}"
        if entry.name in best:
            return f"it is one of the best {policy.best} by {policy.metric}"
        return "it is being copied" if entry.name in held else None

    reasons = [(entry, reason_to_stay(entry)) for entry in entries]
    return [
        RetentionDecision(entry=entry, stays=why is not None, reason=why or _reason_to_delete(policy))
        for entry, why in reasons
    ]


def _reason_to_delete(policy: Policy) -> str:
    rules = [f"not one of the newest {max(policy.keep, FLOOR)}"]
    rules += [f"not a multiple of {policy.every} steps"] if policy.every else []
    rules += [f"not one of the best {policy.best} by {policy.metric}"] if policy.best else []
    return ", ".join(rules)


def best_names(trusted: Sequence[Entry], policy: Policy, metrics: Mapping[str, float | None]) -> tuple[str, ...]:
    """Return the best of `trusted` (newest first) according to `metrics`: at most `policy.best` names, best first."""
    sign = 1.0 if policy.mode == "min" else -1.0
    found = [(metrics.get(entry.name), entry) for entry in trusted]
    rated = [(value * sign, entry) for value, entry in found if value is not None and math.isfinite(value)]
    # The input is newest first and the sort is stable, so of two equally good checkpoints, the newer one stays.
    return tuple(entry.name for _, entry in sorted(rated, key=lambda pair: pair[0])[: policy.best])


def select_expired(entries: Sequence[Entry], policy: Policy, **facts: Any) -> list[tuple[Entry, str]]:
    """Return the entries that `decide_retention` would not keep, oldest first, with reasons.

    Takes the same arguments.
    """
    decisions = reversed(decide_retention(entries, policy, **facts))
    return [(judged.entry, judged.reason) for judged in decisions if not judged.stays]


def read_metric(manifest: Manifest, metric: str) -> float | None:
    """Return the workload's metric with this name at the checkpoint's step, else a fact such as `loss`, else None."""
    own = manifest.extra.get(METRICS)
    value: Any = own[metric] if isinstance(own, dict) and metric in own else manifest.extra.get(metric)
    try:
        return number(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else None
    except KeyError:  # a word, not a number
        return None


class TierRetention:
    """Deletes expired checkpoints and debris in one tier. The next pass retries failed deletions.

    It never raises OSError: old checkpoints that cannot be deleted yet must not fail a run.
    """

    def __init__(
        self, tier: ResolvedTier, policy: Policy, owner: Owner, emit: EmitEvent, pins: Storage | None = None
    ) -> None:
        """Create the retention for one tier.

        `pins` is the storage of the run's own folder (default: the tier's storage).
        """
        self._tier, self._policy, self._owner, self._emit = tier, policy, owner, emit
        self._pins = pins or tier.storage
        self.metrics: dict[str, float | None] = {}
        """Metric values by checkpoint name, for checkpoints whose files were found complete."""

    def apply(self, newest: str, refused: Collection[str] = (), held: Collection[str] = ()) -> None:
        """Run one pass after `newest` has been committed.

        Names in `refused` are not trusted; those in `held` are being read.
        """
        parts: list[Callable[[], bool]] = [
            lambda: self._delete_expired(newest, refused, held),
            lambda: self._delete_orphaned(held),
            lambda: self._collect(held),
        ]
        for part in parts:
            try:
                if not part():
                    return
            except OSError as error:
                _log.warning("%s: old checkpoints could not be deleted yet: %s", self._tier.path, error)

    def collect_debris(self, there: Collection[str]) -> None:
        """Collect the unfinished checkpoints among the folders in `there`. Called at startup.

        This is needed because a disk full of debris has no room for a save, and retention runs only after a save.
        """
        try:
            self._collect((), there)
        except OSError as error:
            _log.warning("%s: half-written checkpoints could not be deleted yet: %s", self._tier.path, error)

    def _delete_expired(self, newest: str, refused: Collection[str], held: Collection[str]) -> bool:
        """Delete expired checkpoints; return False if the fence was lost."""
        entries = self._tier.catalog.entries_for_owner(self._owner)
        pinned = pinned_names(self._pins)
        if len(entries) <= max(self._policy.keep, FLOOR):
            return True
        # Read after the pins, so that a checkpoint that is pinned during its test always has a visible pin or verdict.
        verdicts = read_verdicts(self._pins)
        refused = {*refused, *bad_copies(verdicts, self._tier.path, self._tier.storage)}
        refused |= self._unsound(entries, refused)
        tested = self._newest_restore_tested(verdicts, entries, refused)
        facts = {"metrics": self.metrics, "pinned": pinned, "refused": refused, "held": held, "newest": newest}
        gone = select_expired(entries, self._policy, restore_tested=tested, **facts)
        return self._delete([entry for entry, _ in gone])

    def _delete_orphaned(self, held: Collection[str]) -> bool:
        """Delete ended attempts' checkpoints from a node-local disk, once this attempt has FLOOR of its own.

        Inherited ones and the newest restore-tested one stay.
        """
        tier, owner, ended_attempts = self._tier, self._owner, attempt_ids(self._owner.ended_attempts)
        if tier.shared or not ended_attempts:
            return True
        committed = tier.catalog.committed_entries()
        own = [entry for entry in committed if (entry.attempt, entry.nonce) == (owner.attempt, owner.nonce)]
        if len(own) < FLOOR:
            return True
        ended = [entry for entry in committed if (entry.attempt, entry.nonce) in ended_attempts]
        left = [entry for entry in ended if entry.name not in {*owner.inherit, *held}][::-1]
        tested = self._newest_restore_tested(read_verdicts(self._pins), committed) if left else None
        return self._delete([entry for entry in left if entry.name != tested])

    def _newest_restore_tested(
        self, verdicts: Sequence[CopyVerdict], entries: Sequence[Entry], refused: Collection[str] = ()
    ) -> str | None:
        names = {entry.name for entry in entries if entry.name not in refused}
        return newest_restore_tested(verdicts, self._tier.path, self._tier.storage, names)

    def _delete(self, entries: Sequence[Entry]) -> bool:
        """Delete entries; return False if the fence was lost.

        A failure is raised after the other entries have been tried.
        """
        errors = []
        for entry in entries:
            try:
                # Read again, because a user may pin it while older ones are being deleted.
                if entry.name in pinned_names(self._pins):
                    continue
                if not delete(self._tier.storage, entry.name, self._owner.fence):
                    return False
            except OSError as error:
                errors.append(error)
            else:
                self._emit_deleted(entry.name)
        if errors:
            raise errors[0]
        return True

    def _emit_deleted(self, name: str) -> None:
        parts = parse_name(name)
        step = parts.step if parts is not None else 0
        self._emit("checkpoint.deleted", {"step": step, "name": name, "tier": self._tier.path})

    def _unsound(self, entries: Sequence[Entry], refused: Collection[str]) -> set[str]:
        """Return the entries whose files do not match the commit by name or size.

        They do not count towards those to keep.
        """
        unsound = set()
        for entry in entries:
            if entry.name in refused or entry.name in self.metrics:
                continue
            manifest, faults = read_sealed(self._tier.storage, entry.name)
            # On a node's own disk, other nodes' files are expected to be missing.
            if manifest is None or (faults and self._tier.shared):
                unsound.add(entry.name)
                continue
            self.metrics[entry.name] = read_metric(manifest, self._policy.metric)
        return unsound

    def _collect(self, held: Collection[str], there: Collection[str] | None = None) -> bool:
        """Collect debris, only in the folders in `there` if given.

        Report the deletions that other processes left unfinished.
        """
        owner = self._owner
        ended = {(parts.attempt, parts.nonce) for name in owner.inherit if (parts := parse_name(name)) is not None}
        ended |= attempt_ids(owner.ended_attempts)
        verdicts = decide_debris(
            [folder for folder in find_debris(self._tier.catalog) if there is None or folder.name in there],
            owner=(owner.attempt, owner.nonce),
            ended=ended,
            inherit=owner.inherit,
            busy=held,
        )

        def gone(folder: DebrisFolder) -> None:
            if folder.state is DebrisState.TOMBSTONED and folder.attempt_id in {(owner.attempt, owner.nonce), *ended}:
                self._emit_deleted(folder.name)

        delete_debris(self._tier.storage, verdicts, owner.fence, gone)
        return True
