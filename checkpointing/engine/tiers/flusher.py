"""Flushing: what is committed in a fast tier is copied to the slower ones, beside training and saving."""

import errno
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence

from checkpointing.config import RetentionConfig
from checkpointing.engine.ranks.background_thread import start_background_thread
from checkpointing.engine.ranks.failure import FAILURES, explain
from checkpointing.engine.ranks.group import RankGroup
from checkpointing.engine.save.saver import EmitEvent, Owner
from checkpointing.engine.tiers.bounded_io import BoundedIO
from checkpointing.engine.tiers.transfer import Copier, Route, Transfer, TransferFailure, TransferTimeouts, tried
from checkpointing.errors import Refused
from checkpointing.format.commit import parse_name
from checkpointing.format.manifest import Manifest
from checkpointing.retention.policy import Metrics, Policy, apply_retention, delete
from checkpointing.storage.backends import Storage
from checkpointing.tiers.copy_plan import Choice, TierContents, choose_checkpoint
from checkpointing.tiers.lustre_striping import make_folder
from checkpointing.tiers.tier import ResolvedTier
from checkpointing.verification.verify import read_sealed

__all__ = ["Copier", "Flusher", "TransferTimeouts"]

_log = logging.getLogger(__name__)

_POLL_SECONDS, _SLACK = 1.0, 30.0  # seconds


class Flusher:
    """One per rank, made by all ranks together; with fewer than two tiers it does nothing.

    All ranks call `committed`, `drain` and `close` in the same order. Newest first: what was committed while a copy was
    under way is skipped in favour of the newest one. A tier that fails or hangs is reported (`checkpoint.failed`,
    `checkpoint.stuck`, with the tier) and tried again after the next commit; it holds up neither saves nor training.
    """

    def __init__(
        self,
        places: Sequence[ResolvedTier],
        ranks: RankGroup,
        owner: Owner,
        link: Callable[[], Copier],
        emit: EmitEvent,
        *,
        leads_node: bool = True,
        retention: RetentionConfig | None = None,
        refused: Callable[[str], Collection[str]] = lambda tier: (),
        pins: Storage | None = None,
        patience: TransferTimeouts | None = None,
    ) -> None:
        """Begin with what an earlier generation or attempt has left undone.

        Takes `ranks` over: a group for this thread alone. `link` gives the writer of the moment, `refused` the names
        of checkpoints in a tier that are not to be relied on, `pins` is the storage of the run's own folder.
        """
        self._places, self._ranks, self._owner, self._emit = tuple(places), ranks, owner, emit
        self._refused, self._pins, self._patience = refused, pins, patience or TransferTimeouts()
        self._policies = [Policy.of(place.keep, retention or RetentionConfig()) for place in self._places]
        self._metrics: list[Metrics] = [{} for _ in self._places]
        self._bounded_io = [BoundedIO(place.path) for place in self._places]
        self._transfer = Transfer(
            self._places,
            self._bounded_io,
            ranks,
            owner,
            link,
            self._patience,
            leads_node,
            lambda: self._closing,
            self._report_failure,
        )
        self._last: dict[int, str] = {}
        self._bad: set[tuple[int, str]] = set()
        self._changed = threading.Condition()
        self._signals = self._done = self._whole = self._everything = 0
        self._stuck: set[int] = set()
        self._reached = [0] * len(self._places)
        self._latest: str | None = None
        self._closing = self._ended = False
        self.held: frozenset[str] = frozenset()
        """Checkpoints that are being copied: retention must leave them alone."""
        self._thread: threading.Thread | None = None
        if len(self._places) > 1:
            self._signals = self._everything = 1
            self._thread = start_background_thread(self._serve, "checkpoint-flush")

    def committed(self, name: str, manifest: Manifest | None = None) -> None:
        """A save was committed in the first tier; returns at once. The manifest itself is read back from there."""
        with self._changed:
            self._latest = name
            self._signal()

    def drain(self, timeout: float | Callable[[], float]) -> bool:
        """Bring the newest checkpoint to every tier, whatever `every` says; False when that failed or took too long.

        `timeout` in seconds, or what says once a second how many are left; rank 0's counts for all.
        """
        if self._thread is None:
            return True
        with self._changed:
            self._everything = at = self._signal()
        self._await(at, timeout if callable(timeout) else _until(time.monotonic() + timeout))
        with self._changed:
            arrived, late = self._whole >= at, self._done < at and not self._ended
        if late:
            self._report_late(at)
        return arrived

    def _await(self, at: int, left: Callable[[], float]) -> None:
        # The others hear from rank 0 that it waits no longer; one that left earlier would take its copies along.
        slack = 0.0 if self._ranks.leads else _SLACK
        with self._changed:
            while self._done < at and not self._ended and (rest := left() + slack) > 0:
                self._changed.wait(min(rest, _POLL_SECONDS))

    def close(self, timeout: float = 10.0) -> None:
        """End, without waiting for a copy that is under way: the run's next start goes on with it."""
        if self._thread is not None:
            with self._changed:
                self._closing = True
                self._signal()
            self._thread.join(timeout)
            if self._thread.is_alive():
                _log.warning("a checkpoint tier does not answer; the next start goes on with what is not copied yet")
                return  # the group is in use
            self._thread = None
        self._ranks.close()

    def _signal(self) -> int:
        """Ranks number the same signals in the same way, whenever each of them comes to hear of one."""
        self._signals += 1
        self._changed.notify_all()
        return self._signals

    def _serve(self) -> None:
        try:
            while self._round():
                pass
        except FAILURES as error:
            # The group itself broke: the generation is at its end, and so is this thread.
            _log.warning("checkpoints are no longer copied to further tiers: %s", explain(error))
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _round(self) -> bool:
        """Deal with all signals that rank 0 has heard by now; False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._signals > self._done)
            order = (self._signals, self._everything > self._done, self._closing)
        upto, everything, closing = self._ranks.broadcast(order if self._ranks.leads else None)
        if closing:
            return False
        arrived = []
        # The same on all ranks: who gave no answer, or was too slow, waits for those who did answer.
        for target in sorted(range(1, len(self._places)), key=lambda target: target in self._stuck):
            arrived.append(self._serve_tier(target, everything))
            self._reached[target] = upto
        with self._changed:
            # A rank that has yet to hear of some of them finds them done already.
            self._done = upto
            self._whole = upto if all(arrived) else self._whole
            self._changed.notify_all()
        return True

    def _serve_tier(self, target: int, everything: bool) -> bool:
        """Bring one tier up to date; False when it should have received something and did not."""
        route = self._ranks.broadcast(tried(lambda: self._route(target, everything)) if self._ranks.leads else None)
        self._stuck.discard(target)
        if route == ():
            return True
        start = time.monotonic()
        failure = route if isinstance(route, TransferFailure) else self._carried(route)
        if failure is None:
            self._arrived(route, time.monotonic() - start)
            return True
        if failure.bad and isinstance(route, Route):
            self._bad.add((route.source, route.manifest.name))
        if failure.stuck:
            self._stuck.add(target)
        self._report_failure(target, failure)
        return False

    def _carried(self, route: Route) -> TransferFailure | None:
        self.held = frozenset({route.manifest.name})
        try:
            return self._transfer.run(route)
        finally:
            self.held = frozenset()

    def _route(self, target: int, everything: bool) -> "Route | tuple[()]":
        """Rank 0's decision, an empty tuple for nothing to do; raises what keeps the target or the source away."""
        if not self._owner.fence():
            return ()
        choice = self._choice(target, everything)
        if choice.name is None:
            _log.debug("%s: %s", self._places[target].path, choice.reason)
            return ()
        manifest = self._manifest(choice.name, choice.source)
        if self._places[target].shared:
            self._bounded_io[target].run(lambda: self._make_room(target, manifest.name), self._patience.access)
        return Route(choice.source, target, manifest)

    def _make_room(self, target: int, name: str) -> None:
        place = self._places[target]
        if place.catalog.is_tombstoned(name):
            delete(place.storage, name, self._owner.fence)  # somebody began to, and did not finish
        warning = make_folder(place, name)
        if warning:
            _log.warning("%s", warning)

    def _choice(self, target: int, everything: bool) -> Choice:
        contents = []
        for tier in range(target + 1):
            content = tried(lambda tier=tier: self._contents_of(tier))
            if isinstance(content, TransferFailure):
                if tier == target:
                    raise OSError(errno.ETIMEDOUT if content.stuck else None, content.reason)
                content = TierContents(())  # some other tier may have what is needed
            if tier < target:
                doubted = self._doubted(tier)
                content = TierContents(tuple(name for name in content.committed if name not in doubted))
            contents.append(content)
        return choose_checkpoint(
            contents,
            target,
            every=self._places[target].every,
            latest=self._latest,
            last=self._last.get(target),
            everything=everything,
        )

    def _doubted(self, tier: int) -> set[str]:
        return {*self._refused(self._places[tier].path), *(name for at, name in self._bad if at == tier)}

    def _contents_of(self, tier: int) -> TierContents:
        catalog, owner = self._places[tier].catalog, self._owner
        entries = self._bounded_io[tier].run(
            lambda: catalog.accepted(owner.attempt, owner.nonce, owner.inherit), self._patience.access
        )
        return TierContents(tuple(entry.name for entry in entries))

    def _manifest(self, name: str, source: int) -> Manifest:
        storage = self._places[source].storage
        manifest, faults = self._bounded_io[source].run(lambda: read_sealed(storage, name), self._patience.access)
        if manifest is None:
            self._bad.add((source, name))
            raise Refused(name, f"the source is damaged: {'; '.join(map(str, faults))}")
        return manifest

    def _arrived(self, route: Route, seconds: float) -> None:
        manifest, place = route.manifest, self._places[route.target]
        self._last[route.target] = manifest.name
        if self._ranks.leads:
            facts = {"step": manifest.step, "name": manifest.name, "tier": place.path}
            self._emit("checkpoint.flushed", {**facts, "bytes": manifest.size, "seconds": seconds})
        if self._transfer.leads(route.target):
            failure = tried(
                lambda: self._bounded_io[route.target].run(lambda: self._apply_retention(route), self._patience.copy)
            )
            if isinstance(failure, TransferFailure):
                _log.warning("%s: old checkpoints could not be deleted yet: %s", place.path, failure.reason)

    def _apply_retention(self, route: Route) -> None:
        apply_retention(
            self._places[route.target],
            self._policies[route.target],
            self._owner,
            route.manifest.name,
            self._owner.fence,
            self._doubted(route.target),
            self._emit if self._ranks.leads else _emit_nothing,
            pins=self._pins,
            metrics=self._metrics[route.target],
        )

    def _report_failure(self, target: int, failure: TransferFailure) -> None:
        if not self._ranks.leads or self._closing:
            return
        path = self._places[target].path
        parts = parse_name(self._latest or "")
        kind = "checkpoint.stuck" if failure.stuck else "checkpoint.failed"
        reason = f"not copied to {path}: {failure.reason}"
        self._emit(kind, {"step": parts.step if parts else 0, "reason": reason, "tier": path})

    def _report_late(self, at: int) -> None:
        if not self._ranks.leads:
            return
        parts = parse_name(self._latest or "")
        for target, place in enumerate(self._places):
            there = self._latest is not None and self._last.get(target) == self._latest
            if target and self._reached[target] < at and not there:
                reason = (
                    f"the newest checkpoint is not known to be in {place.path}: there was no time left to copy it from "
                    f"{self._places[0].path}, where the next start finds it"
                )
                facts = {"step": parts.step if parts else 0, "reason": reason, "tier": place.path}
                self._emit("checkpoint.failed", facts)


def _until(at: float) -> Callable[[], float]:
    return lambda: at - time.monotonic()


def _emit_nothing(kind: str, data: dict[str, object]) -> None:
    """Other nodes do the same; rank 0 speaks for all."""
