"""Transfer of one checkpoint to another tier, with a time limit on every access."""

import concurrent.futures
import errno
import math
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

from checkpointing.engine.collectives.group import Failed, RankGroup, result_or_failed
from checkpointing.engine.save.saver import Writer
from checkpointing.event_sink import EmitEvent
from checkpointing.format.commit import Commit, parse_name, seal
from checkpointing.format.manifest import FileEntry, Manifest
from checkpointing.message_codec import peer_message
from checkpointing.storage.backends import Storage
from checkpointing.tiers.catalog import Owner
from checkpointing.tiers.copy_files import MIB, Copied, CopyOrder, divide_files
from checkpointing.tiers.tier import ResolvedTier
from checkpointing.writer.write_orders import OrderThreads

P = ParamSpec("P")
T = TypeVar("T")


class BoundedTier:
    """A rank's access to a tier. A hung call is abandoned, and no other call starts until it has returned."""

    def __init__(self, tier: ResolvedTier, seconds: float) -> None:
        """Create a tier with a limit of `seconds` on each access to names and markers."""
        self.tier, self._seconds, self._threads = tier, seconds, OrderThreads()
        self._abandoned: Future[Any] | None = None

    @property
    def stuck(self) -> bool:
        """Whether an abandoned access is still running."""
        return self._abandoned is not None and not self._abandoned.done()

    def run(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `act` in its own thread. Raises the error of `act`, or OSError (ETIMEDOUT)."""
        return self.run_within(self._seconds, lambda: act(*args, **kwargs))

    def run_within(self, seconds: float, act: Callable[[], T]) -> T:
        """Call `act` as `run` does, but with a different limit."""
        self.check()
        future = self._threads.start(lambda _: act())
        try:
            return future.result(seconds)
        except TimeoutError:
            if future.done():  # raised by `act`
                raise
        self.abandon(future)
        raise OSError(errno.ETIMEDOUT, f"{self.tier.path} has not responded for {seconds:.0f} s")

    def abandon(self, future: "Future[Any]") -> None:
        """Stop waiting for an access. No other access to this tier starts until it has returned."""
        self._abandoned = future

    def check(self) -> None:
        """Raise OSError (ETIMEDOUT) while an abandoned access is still running."""
        if self.stuck:
            raise OSError(errno.ETIMEDOUT, f"{self.tier.path} has still not responded to an earlier access")


class FlushState:
    """The flusher's state and events. `emit` does nothing on ranks other than 0."""

    def __init__(self, emit: EmitEvent) -> None:
        self._emit = emit
        self.latest: str | None = None
        """Name of the newest checkpoint committed in the first tier."""
        self.closing = False
        """Whether the run is ending. If so, copies in progress are abandoned, and failures are no longer reported."""
        self._failing: dict[str, tuple[str | None, str]] = {}  # the last failure reported for each tier

    def report_arrival(self, tier: ResolvedTier, manifest: Manifest, seconds: float) -> None:
        self._failing.pop(tier.path, None)
        facts = {"step": manifest.step, "name": manifest.name, "tier": tier.path}
        self._emit("checkpoint.flushed", {**facts, "bytes": manifest.size, "seconds": seconds})

    def report_presence(self, tier: ResolvedTier) -> None:
        """Report that the tier has the newest checkpoint, if the last report about the tier was a failure."""
        if self._failing.pop(tier.path, None) is not None and (parts := parse_name(self.latest or "")) is not None:
            facts = {"step": parts.step, "name": self.latest, "tier": tier.path}
            self._emit("checkpoint.flushed", {**facts, "bytes": 0, "seconds": 0.0})

    def report_failure(self, tier: ResolvedTier, failure: Failed) -> None:
        """Report a failure, but only once for the same checkpoint and reason."""
        known, self._failing[tier.path] = self._failing.get(tier.path), (self.latest, failure.reason)
        if not self.closing and known != self._failing[tier.path]:
            kind = "checkpoint.stuck" if failure.stuck else "checkpoint.failed"
            self._emit_of_latest(kind, tier, f"not copied to {tier.path}: {failure.reason}")

    def report_late(self, tier: ResolvedTier, first: ResolvedTier) -> None:
        """Report that time ran out before the newest checkpoint was copied from the `first` tier."""
        reason = (
            f"the newest checkpoint may be missing from {tier.path}: there was no time left to copy it from "
            f"{first.path}, where the next start will find it"
        )
        self._emit_of_latest("checkpoint.failed", tier, reason)

    def _emit_of_latest(self, kind: str, tier: ResolvedTier, reason: str) -> None:
        parts = parse_name(self.latest or "")
        self._emit(kind, {"step": parts.step if parts else 0, "reason": reason, "tier": tier.path})


_SLOW_DISK, _DISK = 8.0, 64.0  # MiB/s
_POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class TransferTimeouts:
    """Time limits of a transfer, in seconds.

    `access` limits one access to names and markers. `copy` is added to the time that a slow disk would need for a
    rank's files. `look` is the interval between checks of the other ranks' progress. `late` is how long to wait for
    other ranks' files to become visible.
    """

    access: float = 120.0
    copy: float = 300.0
    look: float = 1.0
    late: float = 30.0


@peer_message
@dataclass(frozen=True)
class Route:
    """The route that a checkpoint takes. `source` and `target` are tier numbers."""

    source: int
    target: int
    manifest: Manifest


class TierTransfer:
    """Transfer by all ranks, which call `run` with the same route.

    They agree on the outcome of every step that may fail or hang.
    """

    def __init__(
        self,
        tiers: Sequence[BoundedTier],
        ranks: RankGroup,
        owner: Owner,
        link: Callable[[], Writer],
        timeouts: TransferTimeouts,
        state: FlushState,
    ) -> None:
        self._tiers, self._ranks, self._owner = tiers, ranks, owner
        self._link, self._timeouts, self._state = link, timeouts, state

    def run(self, route: Route) -> Failed | None:
        """Copy and seal.

        Return None once the checkpoint is committed in the target tier, else the same failure on every rank.
        """
        seen = self._ranks.all_gather(result_or_failed(lambda: self._seen(route)))
        if failure := Failed.combine(seen):
            return failure
        names = [None if isinstance(found, Failed) else found for found in seen]
        shares = result_or_failed(lambda: divide_files(route.manifest.files, names))
        if isinstance(shares, Failed):
            return shares  # the same on every rank, because it is computed from the same lists
        mine = shares[self._ranks.rank]
        failure = Failed.combine(self._await_copies(route, mine, max(map(_size, shares))))
        return failure or Failed.combine(self._ranks.all_gather(result_or_failed(lambda: self._seal(route, mine))))

    def _seen(self, route: Route) -> Collection[str] | None:
        source = self._tiers[route.source]
        if source.tier.shared:
            return None
        return frozenset(source.run(source.tier.storage.list, route.manifest.name))

    def _await_copies(self, route: Route, files: tuple[FileEntry, ...], most: int) -> list[Copied | Failed | None]:
        """Return the outcomes of all ranks' copies. A rank that is done waits here for the others."""
        begun = result_or_failed(lambda: self._begin(route, files))
        late = time.monotonic() + self._copy_timeout(route, files)
        report_at = time.monotonic() + self._timeouts.access + self._usual(route, most)
        while True:
            mine = begun if isinstance(begun, Failed) else self._outcome(route, begun, late)
            reports = self._ranks.all_gather((mine, self._ranks.leads and self._state.closing))
            outcomes = [outcome for outcome, _ in reports]
            if all(outcome is not None for outcome in outcomes):
                return outcomes
            if any(closing for _, closing in reports):
                return [Failed("abandoned for now: the run is ending")]
            if time.monotonic() >= report_at:
                report_at = math.inf
                waiting = ", ".join(str(rank) for rank, outcome in enumerate(outcomes) if outcome is None)
                slow = Failed(f"still under way (rank {waiting})", stuck=True)
                self._state.report_failure(self._tiers[route.target].tier, slow)

    def _begin(self, route: Route, files: tuple[FileEntry, ...]) -> "Future[Copied]":
        source, target = self._tiers[route.source], self._tiers[route.target]
        source.check()
        target.check()
        if not files:
            nothing: Future[Copied] = Future()
            nothing.set_result(Copied(bytes=0, seconds=0.0))
            return nothing
        return self._link().copy(
            CopyOrder(
                source=source.tier.catalog.place,
                target=target.tier.catalog.place,
                folder=route.manifest.name,
                files=files,
                bandwidth=target.tier.bandwidth,
            )
        )

    def _copy_timeout(self, route: Route, files: tuple[FileEntry, ...]) -> float:
        rate = min(self._tiers[route.target].tier.bandwidth or _SLOW_DISK, _SLOW_DISK) / 2
        return self._timeouts.copy + _size(files) / MIB / rate

    def _usual(self, route: Route, size: int) -> float:
        return 2 * size / MIB / min(self._tiers[route.target].tier.bandwidth or _DISK, _DISK)

    def _outcome(self, route: Route, begun: "Future[Copied]", late: float) -> Copied | Failed | None:
        """Return the outcome of this rank's copy, or None while it is still running."""
        if not concurrent.futures.wait([begun], self._timeouts.look).done:
            if time.monotonic() < late:
                return None
            self._tiers[route.target].abandon(begun)
            return Failed("the copy did not finish in time", stuck=True)
        copied = result_or_failed(begun.result)
        if isinstance(copied, Copied) and copied.bad:
            return Failed(f"the source is damaged: {copied.bad}", damaged=True)
        return copied

    def _seal(self, route: Route, mine: tuple[FileEntry, ...]) -> Commit | None:
        target = self._tiers[route.target]
        if not self._ranks.looks_after(shared=target.tier.shared):
            return None
        # Other nodes' files are not expected on a node's own disk.
        expected = route.manifest.files if target.tier.shared else mine
        return target.run(self._sealed_whole, target.tier.storage, route.manifest, expected)

    def _sealed_whole(self, storage: Storage, manifest: Manifest, expected: Sequence[FileEntry]) -> Commit:
        """Seal once every file is visible. Another process may have deleted one since it was written."""
        late = time.monotonic() + self._timeouts.late
        while missing := _missing(storage, manifest.name, expected):
            # Shared file systems may be slow to show new names and sizes.
            if time.monotonic() >= late or self._state.closing:
                raise OSError(errno.ENOENT, f"{manifest.name}/{missing[0]} is missing although it was copied")
            time.sleep(_POLL_SECONDS)
        return seal(storage, manifest, self._owner.fence, time.time())


def _size(files: Sequence[FileEntry]) -> int:
    return sum(entry.size for entry in files)


def _missing(storage: Storage, folder: str, expected: Sequence[FileEntry]) -> list[str]:
    there = storage.list(folder)
    return [entry.name for entry in expected if there.get(entry.name) != entry.size]
