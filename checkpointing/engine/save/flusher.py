"""Flushing: copies of committed checkpoints from fast tiers to slower ones, in parallel with training and saves."""

import errno
import logging
import threading
import time
from collections.abc import Callable
from functools import partial

from checkpointing.config import CheckpointConfig
from checkpointing.engine.collectives.group import (
    FAILURES,
    Failed,
    RankGroup,
    explain,
    result_or_failed,
    start_background_thread,
)
from checkpointing.engine.save.saver import Writer
from checkpointing.engine.save.transfer import (
    BoundedTier,
    FlushState,
    Route,
    TierTransfer,
    TransferTimeouts,
)
from checkpointing.errors import CheckpointRefused
from checkpointing.event_sink import EmitEvent, emit_nothing
from checkpointing.format.manifest import Manifest
from checkpointing.retention.garbage import delete
from checkpointing.retention.policy import Policy, TierRetention
from checkpointing.tiers.catalog import DistrustedCheckpoints, Owner
from checkpointing.tiers.copy_files import THERE, CopyChoice, TierContents, choose_checkpoint
from checkpointing.tiers.tier import ResolvedTier, RunTiers, make_striped_folder
from checkpointing.verification.verify import read_sealed

_log = logging.getLogger(__name__)

_POLL_SECONDS, _SLACK = 1.0, 30.0  # seconds
_RETRY_SECONDS = 10.0
"""Seconds between two tries of `drain`."""


class Flusher:
    """One rank's flusher, created by all ranks together. With fewer than two tiers, it does nothing.

    All ranks call `record_commit`, `drain` and `close` in the same order. The next copy is always of the newest
    checkpoint; older ones committed during a copy are skipped. A tier that fails or hangs is reported
    (`checkpoint.failed`, `checkpoint.stuck`, with the tier) and retried after the next commit; `drain` retries it after
    pauses. The flusher never blocks saves or training.
    """

    def __init__(
        self,
        tiers: RunTiers,
        ranks: RankGroup,
        owner: Owner,
        link: Callable[[], Writer],
        emit: EmitEvent,
        *,
        config: CheckpointConfig | None = None,
        distrusted: DistrustedCheckpoints | None = None,
        timeouts: TransferTimeouts | None = None,
    ) -> None:
        """Start with the checkpoints that earlier generations or attempts did not copy.

        Takes ownership of `ranks`, a group for this thread only. `link` returns the current writer; checkpoints in
        `distrusted` are not copied and do not count towards those that retention keeps.
        """
        self._timeouts = timeouts or TransferTimeouts()
        emit = emit if ranks.leads else emit_nothing
        self._tiers = [BoundedTier(tier, self._timeouts.access) for tier in tiers.tiers]
        self._retention = [
            TierRetention(tier, Policy.from_config(tier.keep, config or CheckpointConfig()), owner, emit, tiers.pins)
            for tier in tiers.tiers
        ]
        self._ranks, self._owner, self._state = ranks, owner, FlushState(emit)
        self._transfer = TierTransfer(self._tiers, ranks, owner, link, self._timeouts, self._state)
        self._distrusted, self._damaged = distrusted or DistrustedCheckpoints(), DistrustedCheckpoints()
        self._last: dict[int, str] = {}
        self._changed = threading.Condition()
        self._signals = self._done = self._whole = self._everything = 0
        self._draining = False
        self._stuck: set[int] = set()
        self._reached = [0] * len(self._tiers)
        self._ended = False
        self.held: frozenset[str] = frozenset()
        """The checkpoints being copied now, which retention must not delete."""
        self._thread: threading.Thread | None = None
        if len(self._tiers) > 1:
            self._signals = self._everything = 1
            self._thread = start_background_thread(self._serve, "checkpoint-flush")

    def record_commit(self, name: str) -> None:
        """Record a commit in the first tier. Returns immediately."""
        with self._changed:
            self._state.latest = name
            self._signal()

    def drain(self, timeout: float | Callable[[], float]) -> bool:
        """Copy the newest checkpoint to every tier regardless of `every`. Return False on timeout.

        A tier that fails is retried until the timeout. `timeout` is a number of seconds, or a function that is called
        once a second and returns the seconds left. All ranks follow rank 0's timeout.
        """
        if self._thread is None:
            return True
        with self._changed:
            self._draining = True
            self._everything = at = self._signal()
        self._await(at, timeout if callable(timeout) else _until(time.monotonic() + timeout))
        with self._changed:
            self._draining = False
            self._changed.notify_all()
            arrived, late = self._whole >= at, self._done < at and not self._ended
        if late:
            self._report_late(at)
        return arrived

    def _await(self, at: int, left: Callable[[], float]) -> None:
        # Rank 0 announces when it stops waiting. A rank that left earlier would abort its own copies.
        slack = 0.0 if self._ranks.leads else _SLACK
        with self._changed:
            while self._done < at and not self._ended and (rest := left() + slack) > 0:
                self._changed.wait(min(rest, _POLL_SECONDS))

    def close(self, timeout: float = 10.0) -> None:
        """Stop without waiting for a copy in progress; the run's next start continues it."""
        if self._thread is not None:
            with self._changed:
                self._state.closing = True
                self._signal()
            self._thread.join(timeout)
            if self._thread.is_alive():
                _log.warning("a checkpoint tier does not respond; the next start copies the remaining checkpoints")
                return  # the group is still in use
            self._thread = None
        self._ranks.close()

    def _signal(self) -> int:
        """Count a signal. Its number is the same on all ranks, no matter when each rank receives it."""
        self._signals += 1
        self._changed.notify_all()
        return self._signals

    def _serve(self) -> None:
        try:
            while self._round():
                pass
        except FAILURES as error:
            # The group itself has failed, so the generation will end, and this thread ends too.
            _log.warning("checkpoints are no longer copied to further tiers: %s", explain(error))
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _round(self) -> bool:
        """Serve all signals that rank 0 has received so far. Return False if the flusher is closing."""
        with self._changed:
            self._changed.wait_for(lambda: self._signals > self._done)
            order = (self._signals, self._everything > self._done, self._state.closing)
        upto, everything, closing = self._ranks.broadcast(order if self._ranks.leads else None)
        if closing:
            return False
        arrived = []
        # All ranks use the same order: tiers that did not respond or were too slow come last.
        for target in sorted(range(1, len(self._tiers)), key=lambda target: target in self._stuck):
            arrived.append(self._serve_tier(target, everything))
            self._reached[target] = upto
        with self._changed:
            again = everything and not all(arrived) and self._draining and not self._state.closing
        if self._ranks.broadcast(again):
            with self._changed:
                self._changed.wait_for(lambda: self._state.closing or not self._draining, _RETRY_SECONDS)
            return True
        with self._changed:
            # If a rank receives some of these signals later, they have already been served.
            self._done = upto
            self._whole = upto if all(arrived) else self._whole
            self._changed.notify_all()
        return True

    def _serve_tier(self, target: int, everything: bool) -> bool:
        """Bring one tier up to date. Return False if it should have received a checkpoint but did not."""
        route = self._ranks.from_leader(lambda: self._route(target, everything))
        self._stuck.discard(target)
        if isinstance(route, tuple):
            return True
        start = time.monotonic()
        failure = route if isinstance(route, Failed) else self._run_transfer(route)
        if failure is None:
            assert isinstance(route, Route)
            self._record_arrival(route, time.monotonic() - start)
            return True
        if failure.damaged and isinstance(route, Route):
            self._damaged.refuse(self._tiers[route.source].tier.path, route.manifest.name)
        if failure.stuck:
            self._stuck.add(target)
        self._state.report_failure(self._tiers[target].tier, failure)
        return False

    def _run_transfer(self, route: Route) -> Failed | None:
        self.held = frozenset({route.manifest.name})
        try:
            return self._transfer.run(route)
        finally:
            self.held = frozenset()

    def _route(self, target: int, everything: bool) -> "Route | tuple[()]":
        """Return rank 0's route, or an empty tuple if there is nothing to copy.

        Raises errors from the target or source.
        """
        if not self._owner.fence():
            return ()
        choice = self._choice(target, everything)
        goal = self._tiers[target]
        if choice.name is None:
            _log.debug("%s: %s", goal.tier.path, choice.reason)
            if choice.reason == THERE:
                self._state.report_presence(goal.tier)
            return ()
        manifest = self._manifest(choice.name, self._tiers[choice.source])
        if goal.tier.shared:
            goal.run(self._make_folder, goal.tier, manifest.name)
        return Route(choice.source, target, manifest)

    def _make_folder(self, tier: ResolvedTier, name: str) -> None:
        if tier.catalog.is_tombstoned(name):
            delete(tier.storage, name, self._owner.fence)  # another process began this deletion and did not finish it
        warning = make_striped_folder(tier, name)
        if warning:
            _log.warning("%s", warning)

    def _choice(self, target: int, everything: bool) -> CopyChoice:
        contents = []
        for number, each in enumerate(self._tiers[: target + 1]):
            content = result_or_failed(partial(self._contents, each))
            if isinstance(content, Failed):
                if number == target:
                    raise OSError(errno.ETIMEDOUT, content.reason) if content.stuck else OSError(content.reason)
                content = ()  # another tier may have the checkpoint
            if number < target:
                doubted = self._doubtful_names(each.tier)
                content = tuple(name for name in content if name not in doubted)
            contents.append(content)
        return choose_checkpoint(
            contents,
            target,
            every=self._tiers[target].tier.every,
            latest=self._state.latest,
            last=self._last.get(target),
            everything=everything,
        )

    def _doubtful_names(self, tier: ResolvedTier) -> frozenset[str]:
        return self._distrusted.in_tier(tier.path) | self._damaged.in_tier(tier.path)

    def _contents(self, bounded: BoundedTier) -> TierContents:
        return tuple(entry.name for entry in bounded.run(bounded.tier.catalog.entries_for_owner, self._owner))

    def _manifest(self, name: str, source: BoundedTier) -> Manifest:
        manifest, faults = source.run(read_sealed, source.tier.storage, name)
        if manifest is None:
            self._damaged.refuse(source.tier.path, name)
            raise CheckpointRefused(name, f"the source is damaged: {'; '.join(map(str, faults))}")
        return manifest

    def _record_arrival(self, route: Route, seconds: float) -> None:
        name, target = route.manifest.name, self._tiers[route.target]
        self._last[route.target] = name
        self._state.report_arrival(target.tier, route.manifest, seconds)
        if self._ranks.looks_after(shared=target.tier.shared):
            retention, doubted = self._retention[route.target], self._doubtful_names(target.tier)
            failure = result_or_failed(
                lambda: target.run_within(self._timeouts.copy, lambda: retention.apply(name, doubted))
            )
            if isinstance(failure, Failed):
                _log.warning("%s: old checkpoints could not be deleted yet: %s", target.tier.path, failure.reason)

    def _report_late(self, at: int) -> None:
        for target, each in enumerate(self._tiers):
            there = self._state.latest is not None and self._last.get(target) == self._state.latest
            if target and self._reached[target] < at and not there:
                self._state.report_late(each.tier, self._tiers[0].tier)


def _until(at: float) -> Callable[[], float]:
    return lambda: at - time.monotonic()
