"""Copies a checkpoint's files to another tier. Every chunk is verified first."""

import contextlib
import errno
import itertools
import random
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypeVar

from checkpointing.errors import CheckpointRefused
from checkpointing.format.commit import parse_name
from checkpointing.format.manifest import FileEntry
from checkpointing.message_codec import peer_message
from checkpointing.storage.backends import Storage, make_durable, open_storage
from checkpointing.storage.digests import CHUNK, Sink, digest
from checkpointing.tiers.tier import ResolvedTier
from checkpointing.verification.verdicts import bad_copies, read_verdicts

_SHARD = re.compile(r"__(\d+)_\d+\.distcp")


TierContents = tuple[str, ...]
"""Names of the committed checkpoints in one tier that this attempt may load and trusts, newest first."""


@dataclass(frozen=True)
class CopyChoice:
    """The checkpoint to copy (or None), the tier to copy it from, and the reason."""

    name: str | None
    source: int
    reason: str


THERE = "the tier already has the newest one"
"""Reason given if the newest checkpoint needs no copy."""


def choose_checkpoint(
    contents: Sequence[TierContents],
    target: int,
    *,
    every: int = 0,
    latest: str | None = None,
    last: str | None = None,
    everything: bool = False,
) -> CopyChoice:
    """Choose the checkpoint that tier `target` should now receive from a faster tier.

    `latest` has just been committed (None: look for the newest); `last` is the one that this tier received most
    recently. With `everything`, `every` is ignored and the newest one is chosen, so that a finished run leaves its last
    checkpoint in every tier.
    """
    here = contents[target]
    last = last or (here[0] if here else None)
    name, source = _newest(contents[:target], latest)
    if name is None:
        return CopyChoice(None, 0, "no faster tier has a trusted checkpoint")
    if name in here:
        return CopyChoice(None, source, THERE)
    if last is None:
        return CopyChoice(name, source, "the tier has none yet")
    if everything:
        return CopyChoice(name, source, "the last one goes to every tier")
    newer = _step(name) - _step(last)
    # After a rollback, steps restart below the one last copied.
    if 0 <= newer < every:
        return CopyChoice(None, source, f"it must be {every} steps newer than the tier's newest, but is only {newer}")
    return CopyChoice(name, source, "a newer one is available")


def _newest(faster: Sequence[TierContents], latest: str | None) -> tuple[str | None, int]:
    """Return the newest checkpoint's name, and the fastest tier that has it."""
    found = {name: at for at in reversed(range(len(faster))) for name in faster[at]}
    if latest in found:
        assert latest is not None
        return latest, found[latest]
    best = max(found, key=lambda name: parse_name(name) or name, default=None)
    return best, found[best] if best is not None else 0


def _step(name: str) -> int:
    parts = parse_name(name)
    assert parts is not None
    return parts.step


def divide_files(files: Sequence[FileEntry], seen: Sequence[Collection[str] | None]) -> list[tuple[FileEntry, ...]]:
    """Divide files among ranks. `seen` lists the names that each rank finds at the source, or None if it finds all.

    A rank copies its own shards; the rest is divided evenly by bytes. Raises ValueError for a file that no rank finds.
    """
    shares: list[list[FileEntry]] = [[] for _ in seen]
    load = [0] * len(seen)
    for entry in sorted(files, key=lambda entry: (_owner(entry.name, seen) is None, -entry.size, entry.name)):
        owner = _owner(entry.name, seen)
        finders = [rank for rank, names in enumerate(seen) if names is None or entry.name in names]
        if not finders:
            raise ValueError(f"no participating node has {entry.name}")
        rank = owner if owner is not None else min(finders, key=lambda rank: (load[rank], rank))
        shares[rank].append(entry)
        load[rank] += entry.size
    return [tuple(part) for part in shares]


def _owner(name: str, seen: Sequence[Collection[str] | None]) -> int | None:
    match = _SHARD.fullmatch(name)
    rank = int(match[1]) if match else len(seen)
    if rank >= len(seen):
        return None
    names = seen[rank]
    return rank if names is None or name in names else None


CorruptCopy = tuple[str, int, str]
"""A checkpoint's name, the tier's number, and the fault."""


def corrupt_copies(verdicts: Storage | None, places: Sequence[ResolvedTier]) -> tuple[CorruptCopy, ...]:
    """List every copy with a bad verdict that still applies. `verdicts` is the storage of the run's own folder.

    Unreadable tiers are skipped, because a restore verifies every byte anyway.
    """
    if verdicts is None:
        return ()
    try:
        known = read_verdicts(verdicts)
    except OSError:
        return ()
    found: list[CorruptCopy] = []
    for number, place in enumerate(places):
        try:
            bad = bad_copies(known, place.path, place.storage)
        except OSError:
            continue
        found += [(name, number, reason) for name, reason in sorted(bad.items())]
    return tuple(found)


def why_corrupt(copies: Iterable[CorruptCopy], name: str, place: int) -> str:
    """Return why this copy must not be loaded, or an empty string. A fault in the first tier applies to all copies."""
    return next((reason or "found bad" for other, at, reason in copies if other == name and at in (0, place)), "")


T = TypeVar("T")

MIB = float(1 << 20)

_PERMANENT = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ECANCELED)
"""Errors that retrying for a minute would not fix."""


class Throttle:
    """Token bucket: `take` sleeps until the bytes may be written. Not thread-safe."""

    def __init__(
        self,
        rate: float,
        *,
        burst: int = CHUNK,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Any] = time.sleep,
    ) -> None:
        """Create a full bucket.

        `rate` is in bytes per second (0: no limit); `burst` is the number of bytes allowed after a pause.
        """
        self._rate, self._burst, self._clock, self._sleep = rate, float(burst), clock, sleep
        self._tokens, self._at = float(burst), clock()

    def take(self, size: int) -> None:
        """Pay for `size` bytes.

        If that exceeds what the bucket holds, the next call waits until the debt is paid off.
        """
        if not self._rate:
            return
        self._refill()
        if self._tokens < 0:
            self._sleep(-self._tokens / self._rate)
            self._refill()
        self._tokens -= size

    def _refill(self) -> None:
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now


@dataclass(frozen=True, kw_only=True)
class Retry:
    """Retry policy for transient errors: exponential backoff with full jitter, in seconds."""

    attempts: int = 5
    first: float = 0.5
    most: float = 30.0
    sleep: Callable[[float], Any] = field(default=time.sleep)
    draw: Callable[[], float] = field(default=random.random)

    def run(self, act: Callable[[], T]) -> T:
        """Call `act` until it succeeds.

        Raises the last OSError, or immediately if it is permanent (such as a full disk).
        """
        for attempt in range(self.attempts):
            try:
                return act()
            except OSError as error:
                if error.errno in _PERMANENT or attempt + 1 >= self.attempts:
                    raise
            self.sleep(self.draw() * min(self.most, self.first * 2**attempt))
        raise AssertionError("attempts must be 1 or more")


@peer_message
@dataclass(frozen=True, kw_only=True)
class CopyOrder:
    """A rank's share of copying a checkpoint. `source` and `target` are root paths or URLs, `bandwidth` is in MiB/s."""

    source: str
    target: str
    folder: str
    files: tuple[FileEntry, ...]
    bandwidth: float = 0.0


@peer_message
@dataclass(frozen=True, kw_only=True)
class Copied:
    """Result of a copy.

    `bytes` is the number of bytes written (files that already existed count as 0); `bad` is the fault found at the
    source.
    """

    bytes: int
    seconds: float
    bad: str = ""


def copy_files(
    order: CopyOrder,
    *,
    source: Storage | None = None,
    target: Storage | None = None,
    stopped: Callable[[], bool] = lambda: False,
    sleep: Callable[[float], Any] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> Copied:
    """Carry out an order in this thread. Stop at the first fault in the source, which is returned, not raised.

    Raises OSError as `copy_file` does. An interruptible `sleep` lets a throttled copy stop sooner.
    """
    start, done = clock(), 0
    origin, goal = source or open_storage(order.source), target or open_storage(order.target)
    throttle = Throttle(order.bandwidth * MIB, clock=clock, sleep=sleep)
    retry = Retry(sleep=sleep)
    try:
        for entry in order.files:
            done += copy_file(origin, goal, order.folder, entry, throttle=throttle, retry=retry, stopped=stopped)
    except CheckpointRefused as refusal:
        return Copied(bytes=done, seconds=clock() - start, bad=refusal.reason)
    return Copied(bytes=done, seconds=clock() - start)


def copy_file(
    source: Storage,
    target: Storage,
    folder: str,
    entry: FileEntry,
    *,
    throttle: Throttle | None = None,
    retry: Retry | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> int:
    """Durably copy `folder/entry.name`. Return the number of bytes written, 0 if the target already has the same file.

    Raises CheckpointRefused (naming the chunk) if the source does not match `entry`; no mismatching byte is passed on,
    and the copy is not retried. Raises OSError if retries do not help, with errno ECANCELED once `stopped` returns
    True; this is checked before every chunk. A half-written file is deleted or replaced by the next try. After a stop,
    it is left in place, because another process may have taken it over.
    """
    job = _Copy(source, target, folder, entry, throttle or Throttle(0.0), stopped)
    tries = itertools.count()
    # Leftovers from our own earlier try are never adopted: after a failed fsync, they may only look complete.
    return (retry or Retry()).run(lambda: job.run(adopt=next(tries) == 0))


@dataclass(frozen=True)
class _Copy:
    source: Storage
    target: Storage
    folder: str
    entry: FileEntry
    throttle: Throttle
    stopped: Callable[[], bool]

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.entry.name}"

    def run(self, *, adopt: bool) -> int:
        with _doing("reading", self.path):
            stream = self.source.open(self.path)
        with stream:
            try:
                sink = self.target.create(self.path)
            except FileExistsError:
                if adopt and self._is_complete():
                    return 0
                self._check_stopped()
                self.target.delete(self.path)
                sink = self.target.create(self.path)
            self._fill(sink, stream)
        try:
            sink.close()
        except OSError:
            self._delete_target()
            raise
        return self.entry.size

    def _fill(self, sink: Sink, stream: BinaryIO) -> None:
        try:
            for piece in self._chunks(stream):
                self.throttle.take(len(piece))
                sink.write(piece)
        except (OSError, CheckpointRefused):
            with contextlib.suppress(OSError):
                sink.abort()
            self._delete_target()
            raise

    def _delete_target(self) -> None:
        if self.stopped():  # a later process may have created a new file under the same name
            return
        with contextlib.suppress(OSError):
            self.target.delete(self.path)

    def _check_stopped(self) -> None:
        if self.stopped():
            raise OSError(errno.ECANCELED, f"copying {self.path} was cancelled")

    def _is_complete(self) -> bool:
        """Return whether an earlier process finished this file. The file is made durable first, in case it was not."""
        make_durable(self.target, self.path)
        with self.target.open(self.path) as stream:
            try:
                for _ in self._chunks(stream):
                    pass
            except CheckpointRefused:
                return False
        return True

    def _chunks(self, stream: BinaryIO) -> Iterator[memoryview]:
        """Yield verified chunks. Each is valid until the next one is requested."""
        entry = self.entry
        room = memoryview(bytearray(min(entry.chunk_size, entry.size)))
        for index, expected in enumerate(entry.chunks):
            self._check_stopped()
            piece = room[: min(entry.chunk_size, entry.size - index * entry.chunk_size)]
            with _doing("reading", self.path):
                filled = _read_full(stream, piece)
            if filled < len(piece):
                raise CheckpointRefused(self.folder, f"{entry.name} chunk {index}: the file is too short")
            if digest(piece) != expected:
                raise CheckpointRefused(self.folder, f"{entry.name} chunk {index}: digest differs")
            yield piece
        if stream.read(1):
            raise CheckpointRefused(self.folder, f"{entry.name}: the file is longer than {entry.size} bytes")


def _read_full(stream: Any, room: memoryview) -> int:
    filled = 0
    while filled < len(room) and (got := stream.readinto(room[filled:])):
        filled += got
    return filled


@contextlib.contextmanager
def _doing(what: str, path: str) -> Iterator[None]:
    """Add the failed operation and the path to an OSError, keeping its errno."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, f"{what} {path}: {error.strerror or error}") from error
