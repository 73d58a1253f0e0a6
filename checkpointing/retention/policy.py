"""Which checkpoints may go (pure), and the pass over one tier that deletes them."""

import logging
import math
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from checkpointing.config import RetentionConfig
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
)
from checkpointing.retention.pins import pinned_names
from checkpointing.storage.backends import Storage
from checkpointing.storage.durable import number
from checkpointing.tiers.catalog import Entry
from checkpointing.tiers.tier import ResolvedTier
from checkpointing.verification.verdicts import known_bad
from checkpointing.verification.verify import read_sealed

__all__ = [
    "FLOOR",
    "Owner",
    "Policy",
    "delete",
    "apply_retention",
    "collect_debris",
    "decide_retention",
    "expired",
    "metric_of",
]

_log = logging.getLogger(__name__)

FLOOR = 2
"""So many trusted checkpoints always stay, so that a damaged newest one has a substitute."""

Metrics = MutableMapping[str, float | None]
EmitEvent = Callable[[str, dict[str, Any]], None]


class Owner(Protocol):
    """Whose checkpoints may be deleted: the attempt's own and those that its launch token lists."""

    @property
    def attempt(self) -> int: ...

    @property
    def nonce(self) -> str: ...

    @property
    def inherit(self) -> tuple[str, ...]: ...

    @property
    def ended_attempts(self) -> tuple[str, ...]:
        """`<attempt>-<nonce>` of earlier attempts, which write no more."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What stays: the newest `keep` (at least 2), every multiple of `every` steps, the `best` so many by `metric`."""

    keep: int = 3
    every: int = 0
    best: int = 0
    metric: str = "loss"
    mode: str = "min"

    @classmethod
    def of(cls, keep: int, config: RetentionConfig) -> "Policy":
        """The policy of a tier that keeps the newest `keep`."""
        return cls(keep=keep, every=config.every, best=config.best, metric=config.metric, mode=config.mode)


@dataclass(frozen=True, kw_only=True)
class RetentionDecision:
    """Whether one checkpoint stays, and why or why not."""

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
) -> list[RetentionDecision]:
    """Decide on every committed checkpoint; `entries` are newest first, and so is the result.

    `refused` ones (not trusted: SUSPECT, CORRUPT, refused by a restore or by a verification) count as nobody's
    substitute and stay as evidence. `held` ones are being read; `newest` was just committed, which after a roll-back
    need not be the highest step. `metrics` by name; a checkpoint without a finite one is never among the best.
    """
    trusted = [entry for entry in entries if entry.name not in refused]
    recent = {entry.name for entry in trusted[: max(policy.keep, FLOOR)]}
    best = _best(trusted, policy, metrics or {})

    def reason_to_stay(entry: Entry) -> str | None:
        if entry.name in refused:
            return "it is not trusted, and stays as evidence"
        if entry.name == newest:
            return "it was just committed"
        if entry.name in pinned:
            return "it is pinned"
        if entry.name in recent:
            return f"it is one of the newest {max(policy.keep, FLOOR)}"
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
    rules += [f"no multiple of {policy.every} steps"] if policy.every else []
    rules += [f"not one of the best {policy.best} by {policy.metric}"] if policy.best else []
    return ", ".join(rules)


def _best(trusted: Sequence[Entry], policy: Policy, metrics: Mapping[str, float | None]) -> set[str]:
    sign = 1.0 if policy.mode == "min" else -1.0
    found = [(metrics.get(entry.name), entry) for entry in trusted]
    rated = [(value * sign, entry) for value, entry in found if value is not None and math.isfinite(value)]
    # Newest first and a stable sort: of two equally good ones the newer stays.
    return {entry.name for _, entry in sorted(rated, key=lambda pair: pair[0])[: policy.best]}


def expired(entries: Sequence[Entry], policy: Policy, **facts: Any) -> list[tuple[Entry, str]]:
    """What `judge` (same arguments) lets go, oldest first, each with the reason."""
    return [(judged.entry, judged.reason) for judged in decide_retention(entries, policy, **facts) if not judged.stays][
        ::-1
    ]


def metric_of(manifest: Manifest, metric: str) -> float | None:
    """A number in the checkpoint's facts, by its key or by a dotted path (`eval.loss`); None when there is none."""
    value: Any = manifest.extra
    for key in (metric,) if metric in manifest.extra else metric.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    try:
        return number(value) if isinstance(value, (int, float, str)) and not isinstance(value, bool) else None
    except KeyError:  # a word, no number
        return None


def apply_retention(
    place: ResolvedTier,
    policy: Policy,
    owner: Owner,
    newest: str,
    fence: Callable[[], bool],
    refused: Collection[str],
    emit: EmitEvent,
    *,
    held: Collection[str] = (),
    pins: Storage | None = None,
    metrics: Metrics | None = None,
) -> None:
    """Delete in one tier what `policy` no longer keeps and what died half-written; what fails is tried next time.

    `pins` is the storage of the run's own folder (default: the tier's own), `metrics` a cache between calls. Never
    raises OSError: old checkpoints that cannot be deleted yet are no reason to fail.
    """
    retention_pass = _RetentionPass(place, policy, owner, newest, fence, emit, held, pins or place.storage)
    metrics = metrics if metrics is not None else {}
    parts: list[Callable[[], bool]] = [
        lambda: retention_pass.delete_expired(refused, metrics),
        retention_pass.delete_orphaned,
        retention_pass.collect,
    ]
    for part in parts:
        try:
            if not part():
                return
        except OSError as error:
            _log.warning("%s: old checkpoints could not be deleted yet: %s", place.path, error)


def collect_debris(
    place: ResolvedTier, owner: Owner, there: Collection[str], fence: Callable[[], bool], emit: EmitEvent
) -> None:
    """At a start: collect what died half-written among the folders `there`; raises no OSError either.

    A disk that is full of debris takes no save, and retention comes only after one.
    """
    try:
        _RetentionPass(place, Policy(), owner, "", fence, emit, (), place.storage).collect(there)
    except OSError as error:
        _log.warning("%s: half-written checkpoints could not be deleted yet: %s", place.path, error)


@dataclass(frozen=True)
class _RetentionPass:
    place: ResolvedTier
    policy: Policy
    owner: Owner
    newest: str
    fence: Callable[[], bool]
    emit: EmitEvent
    held: Collection[str]
    pins: Storage

    def delete_expired(self, refused: Collection[str], metrics: Metrics) -> bool:
        """False when the fence was lost."""
        owner, catalog = self.owner, self.place.catalog
        entries = catalog.accepted(owner.attempt, owner.nonce, owner.inherit)
        pinned = pinned_names(self.pins)
        rule = self.policy
        if len(entries) <= max(rule.keep, FLOOR):
            return True
        refused = {*refused, *known_bad(self.pins, self.place.path, self.place.storage)}
        refused |= self._unsound(entries, refused, metrics)
        facts = {"metrics": metrics, "pinned": pinned, "refused": refused, "held": self.held, "newest": self.newest}
        return self._delete([entry for entry, _ in expired(entries, rule, **facts)])

    def delete_orphaned(self) -> bool:
        """On a node's own disk: delete what attempts that are over left to nobody, once this one has its own there."""
        place, owner, ended_attempts = self.place, self.owner, attempt_ids(self.owner.ended_attempts)
        if place.shared or not ended_attempts:
            return True
        committed = place.catalog.committed()
        own = [entry for entry in committed if (entry.attempt, entry.nonce) == (owner.attempt, owner.nonce)]
        if len(own) < FLOOR:
            return True
        left = [entry for entry in committed if (entry.attempt, entry.nonce) in ended_attempts]
        return self._delete([entry for entry in left if entry.name not in {*owner.inherit, *self.held}][::-1])

    def _delete(self, entries: Sequence[Entry]) -> bool:
        """False when the fence was lost; one that cannot be deleted keeps none of the others, then raises OSError."""
        errors = []
        for entry in entries:
            try:
                # Asked again: somebody may pin it while its elders are being deleted.
                if entry.name in pinned_names(self.pins):
                    continue
                if not delete(self.place.storage, entry.name, self.fence):
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
        self.emit("checkpoint.deleted", {"step": step, "name": name, "tier": self.place.path})

    def _unsound(self, entries: Sequence[Entry], refused: Collection[str], metrics: Metrics) -> set[str]:
        """Those that no longer are what was committed, by names and sizes: no substitutes for anything."""
        unsound = set()
        for entry in entries:
            if entry.name in refused or entry.name in metrics:
                continue
            manifest, faults = read_sealed(self.place.storage, entry.name)
            # On a node's own disk the files of other nodes are missing, and that is right.
            if manifest is None or (faults and self.place.shared):
                unsound.add(entry.name)
                continue
            metrics[entry.name] = metric_of(manifest, self.policy.metric)
        return unsound

    def collect(self, there: Collection[str] | None = None) -> bool:
        """Collect debris, `there` limits it to some folders; a deletion that somebody began is told at its end."""
        owner = self.owner
        ended = {(parts.attempt, parts.nonce) for name in owner.inherit if (parts := parse_name(name)) is not None}
        ended |= attempt_ids(owner.ended_attempts)
        verdicts = decide_debris(
            [folder for folder in find_debris(self.place.catalog) if there is None or folder.name in there],
            owner=(owner.attempt, owner.nonce),
            ended=ended,
            inherit=owner.inherit,
            busy=self.held,
        )

        def gone(folder: DebrisFolder) -> None:
            if folder.state is DebrisState.TOMBSTONED and folder.attempt_id in {(owner.attempt, owner.nonce), *ended}:
                self._emit_deleted(folder.name)

        delete_debris(self.place.storage, verdicts, self.fence, gone)
        return True
