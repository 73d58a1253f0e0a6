"""One checkpoint on its way to another tier: every rank copies its share, the leaders of the target seal it."""

import concurrent.futures
import errno
import math
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol, TypeVar

from checkpointing.engine.ranks.failure import FAILURES, explain
from checkpointing.engine.ranks.group import RankGroup
from checkpointing.engine.ranks.peer_codec import peer_message
from checkpointing.engine.save.saver import Owner
from checkpointing.engine.tiers.bounded_io import BoundedIO
from checkpointing.format.commit import Commit, seal
from checkpointing.format.manifest import FileEntry, Manifest
from checkpointing.storage.backends import Storage
from checkpointing.tiers.copy_files import MIB, Copied, CopyOrder
from checkpointing.tiers.copy_plan import divide_files
from checkpointing.tiers.tier import ResolvedTier

T = TypeVar("T")

_SLOW_DISK, _DISK = 8.0, 64.0  # MiB/s
_POLL_SECONDS = 0.2


class Copier(Protocol):
    """The part of a link to the writer that a flush uses."""

    def copy(self, order: CopyOrder) -> "Future[Copied]": ...


@dataclass(frozen=True, kw_only=True)
class TransferTimeouts:
    """Seconds: for one access to names and markers, for a rank's copies on top of what a slow disk takes for them, and
    between two looks at how far the other ranks are, and until what other ranks have written must be in sight."""

    access: float = 120.0
    copy: float = 300.0
    look: float = 1.0
    late: float = 30.0


@peer_message
@dataclass(frozen=True)
class TransferFailure:
    """Why a checkpoint did not arrive; `stuck` when something gave no answer, `bad` when the source is damaged."""

    reason: str
    stuck: bool = False
    bad: bool = False


@peer_message
@dataclass(frozen=True)
class Route:
    """What goes where; `source` and `target` count the tiers."""

    source: int
    target: int
    manifest: Manifest


class Transfer:
    """All ranks call `run` with the same route; every step that can fail or hang is agreed on before the next one."""

    def __init__(
        self,
        places: Sequence[ResolvedTier],
        bounded_io: Sequence[BoundedIO],
        ranks: RankGroup,
        owner: Owner,
        link: Callable[[], Copier],
        patience: TransferTimeouts,
        leads_node: bool,
        given_up: Callable[[], bool],
        slow: "Callable[[int, TransferFailure], None]" = lambda target, failure: None,
    ) -> None:
        """`given_up` is asked on rank 0 while copies are under way, which then are no longer waited for.

        `slow` is told there, once, of copies that take far longer than they should, long before they are given up.
        """
        self._places, self._bounded_io, self._ranks, self._owner = places, bounded_io, ranks, owner
        self._link, self._patience, self._leads_node, self._given_up = link, patience, leads_node, given_up
        self._slow = slow

    def run(self, route: Route) -> TransferFailure | None:
        """Copy and seal; None when the checkpoint is committed at the target, else the same reason on every rank."""
        seen = self._ranks.all_gather(tried(lambda: self._seen(route)))
        failure = _first(seen)
        if failure is not None:
            return failure
        names = [None if isinstance(found, TransferFailure) else found for found in seen]
        shares = tried(lambda: divide_files(route.manifest.files, names))
        if isinstance(shares, TransferFailure):
            return shares  # the same on every rank: all have computed it from the same lists
        mine = shares[self._ranks.rank]
        failure = _first(self._copied(route, mine, max(map(_size, shares))))
        return failure or _first(self._ranks.all_gather(tried(lambda: self._sealed(route, mine))))

    def leads(self, target: int) -> bool:
        """Whether this rank looks after the folder of tier `target` that it sees."""
        return self._leads_node if not self._places[target].shared else self._ranks.leads

    def _seen(self, route: Route) -> Collection[str] | None:
        place = self._places[route.source]
        if place.shared:
            return None
        listed = self._bounded_io[route.source].run(
            lambda: place.storage.list(route.manifest.name), self._patience.access
        )
        return frozenset(listed)

    def _copied(self, route: Route, files: tuple[FileEntry, ...], most: int) -> list[Copied | TransferFailure | None]:
        """What became of every rank's copies; a rank that is done waits here for the others, and hears of them."""
        begun = tried(lambda: self._begin(route, files))
        late = time.monotonic() + self._allowed(route, files)
        word = time.monotonic() + self._patience.access + self._usual(route, most)
        while True:
            mine = begun if isinstance(begun, TransferFailure) else self._outcome(route, begun, late)
            told = self._ranks.all_gather((mine, self._ranks.leads and self._given_up()))
            outcomes = [outcome for outcome, _ in told]
            if all(outcome is not None for outcome in outcomes):
                return outcomes
            if any(given_up for _, given_up in told):
                return [TransferFailure("given up for now: the run ends")]
            if time.monotonic() >= word:
                word = math.inf
                waiting = ", ".join(str(rank) for rank, outcome in enumerate(outcomes) if outcome is None)
                self._slow(route.target, TransferFailure(f"still under way (rank {waiting})", stuck=True))

    def _begin(self, route: Route, files: tuple[FileEntry, ...]) -> "Future[Copied]":
        source, target = self._places[route.source], self._places[route.target]
        for tier in (route.source, route.target):
            self._bounded_io[tier].check()
        if not files:
            nothing: Future[Copied] = Future()
            nothing.set_result(Copied(bytes=0, seconds=0.0))
            return nothing
        return self._link().copy(
            CopyOrder(
                source=source.path,
                target=target.path,
                folder=route.manifest.name,
                files=files,
                bandwidth=target.bandwidth,
            )
        )

    def _allowed(self, route: Route, files: tuple[FileEntry, ...]) -> float:
        rate = min(self._places[route.target].bandwidth or _SLOW_DISK, _SLOW_DISK) / 2
        return self._patience.copy + _size(files) / MIB / rate

    def _usual(self, route: Route, size: int) -> float:
        return 2 * size / MIB / min(self._places[route.target].bandwidth or _DISK, _DISK)

    def _outcome(self, route: Route, begun: "Future[Copied]", late: float) -> Copied | TransferFailure | None:
        """None while it is under way."""
        if not concurrent.futures.wait([begun], self._patience.look).done:
            if time.monotonic() < late:
                return None
            self._bounded_io[route.target].give_up(begun)
            return TransferFailure(f"rank {self._ranks.rank}: the copy does not come to an end", stuck=True)
        copied = tried(begun.result)
        if isinstance(copied, TransferFailure):
            return TransferFailure(f"rank {self._ranks.rank}: {copied.reason}", copied.stuck, copied.bad)
        if copied.bad:
            return TransferFailure(f"rank {self._ranks.rank}: the source is damaged: {copied.bad}", bad=True)
        return copied

    def _sealed(self, route: Route, mine: tuple[FileEntry, ...]) -> Commit | None:
        if not self.leads(route.target):
            return None
        place = self._places[route.target]
        # On a node's own disk the files of the other nodes are not to be expected.
        expected = route.manifest.files if place.shared else mine
        return self._bounded_io[route.target].run(
            lambda: self._sealed_whole(place.storage, route.manifest, expected), self._patience.access
        )

    def _sealed_whole(self, storage: Storage, manifest: Manifest, expected: Sequence[FileEntry]) -> Commit:
        """Seal what is all there: somebody else may have taken a file away since it was written."""
        late = time.monotonic() + self._patience.late
        while lacking := _lacking(storage, manifest.name, expected):
            # Shared file systems show names and sizes late.
            if time.monotonic() >= late or self._given_up():
                raise OSError(errno.ENOENT, f"{manifest.name}/{lacking[0]} is not there although it was copied")
            time.sleep(_POLL_SECONDS)
        return seal(storage, manifest, self._owner.fence, time.time())


def _size(files: Sequence[FileEntry]) -> int:
    return sum(entry.size for entry in files)


def _lacking(storage: Storage, folder: str, expected: Sequence[FileEntry]) -> list[str]:
    there = storage.list(folder)
    return [entry.name for entry in expected if there.get(entry.name) != entry.size]


def tried(act: Callable[[], T]) -> T | TransferFailure:
    """Do this rank's part; a failure becomes a message, so that the peers are not left waiting."""
    try:
        return act()
    except FAILURES as error:
        return TransferFailure(explain(error), stuck=isinstance(error, OSError) and error.errno == errno.ETIMEDOUT)


def _first(outcomes: Sequence[object]) -> TransferFailure | None:
    """What went wrong, told once for all ranks."""
    failures = [outcome for outcome in outcomes if isinstance(outcome, TransferFailure)]
    if not failures:
        return None
    reasons = list(dict.fromkeys(failure.reason for failure in failures))
    return TransferFailure(
        "; ".join(reasons[:4]), any(failure.stuck for failure in failures), any(failure.bad for failure in failures)
    )
