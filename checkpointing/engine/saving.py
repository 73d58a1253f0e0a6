"""One save, agreed between ranks: name, write, inspect, seal. Runs on the lane's thread, over a group of its own."""

import concurrent.futures
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from checkpointing.catalog import Catalog
from checkpointing.commit import Commit, fresh_name, seal
from checkpointing.engine.arena import Arena
from checkpointing.engine.failure import Failed, attempt
from checkpointing.engine.group import Ranks
from checkpointing.engine.planning import Plan
from checkpointing.engine.staging import Bucket, Staged
from checkpointing.engine.writing import WriteOrder, Wrote
from checkpointing.errors import FencedOff, SaveFailed, Unsound
from checkpointing.index import INDEX
from checkpointing.manifest import METADATA, FileEntry, Manifest
from checkpointing.retention import delete

T = TypeVar("T")
Tell = Callable[[str, dict[str, Any]], None]

STUCK_SECONDS = 30.0
"""A write that takes so much longer than a slow disk would is told as stuck."""

_SLOW_DISK = 32 << 20  # bytes per second
_GLANCE = 1.0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owner:
    """Whose checkpoints these are; `fence` says whether the owner may still commit and delete."""

    attempt: int
    nonce: str
    inherit: tuple[str, ...]
    fence: Callable[[], bool]


class Writer(Protocol):
    """The part of a link to the writer that a save uses."""

    arena: Arena

    @property
    def alive(self) -> bool: ...

    def write(self, order: WriteOrder) -> "Future[Wrote]": ...

    def put(self, place: str, folder: str, name: str, blob: bytes) -> "Future[FileEntry]": ...

    def warm(self) -> "Future[None]": ...

    def replacement(self) -> "Writer": ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Job:
    """Everything that one save needs; the state is copied, or being copied."""

    step: int
    plan: Plan
    staged: Staged
    extra: dict[str, Any]
    world: dict[str, Any]


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint; `manifest` is known to rank 0 only."""

    name: str
    size: int
    seconds: float
    manifest: Manifest | None = None


class Saver:
    """Runs one save at a time; every rank of the group calls `run` for the same step."""

    def __init__(
        self,
        catalog: Catalog,
        place: str,
        ranks: Ranks,
        owner: Owner,
        writer: Writer,
        tell: Tell,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`place` names for the writer what `catalog` shows here."""
        self._catalog, self._storage, self._place = catalog, catalog.storage, place
        self._ranks, self._owner, self._tell, self._clock = ranks, owner, tell, clock
        self.writer = writer

    def run(self, job: Job) -> Saved:
        """Write, seal and name one checkpoint; raises SaveFailed on every rank when any of them failed."""
        start = self._clock()
        name = self._agreed_name(job)
        described = self._describe(job, name)
        written = attempt(lambda: self._written(job, name))
        everything = self._ranks.gather(written)
        sealed: Manifest | Failed | None = None
        if everything is not None:
            sealed = self._sealed(job, name, everything, described)
        told = self._ranks.broadcast(sealed if isinstance(sealed, Failed) else sealed.size if sealed else None)
        if isinstance(told, Failed):
            raise _error(told)(job.step, told.reason)
        saved = Saved(name, told, self._clock() - start, sealed if isinstance(sealed, Manifest) else None)
        if self._ranks.leads:
            facts = {"step": job.step, "name": name, "bytes": saved.size, "seconds": saved.seconds}
            self._tell("checkpoint.committed", facts)
        return saved

    def _agreed_name(self, job: Job) -> str:
        """A fresh name from rank 0; raises SaveFailed everywhere when there is none to be had."""
        name: str | Failed | None = None
        if self._ranks.leads:
            name = attempt(lambda: self._named(job.step))
        name = self._ranks.broadcast(name)
        if isinstance(name, Failed):
            raise SaveFailed(job.step, name.reason)
        return name

    def _named(self, step: int) -> str:
        owner = self._owner
        name = fresh_name(step, owner.attempt, owner.nonce, self._catalog.names())
        self._tell("checkpoint.saving", {"step": step, "name": name})
        return name

    def _describe(self, job: Job, name: str) -> "list[Future[FileEntry]]":
        """Have rank 0's writer put the two files that describe the layout beside the data, which takes longer."""
        blobs = ((METADATA, job.plan.metadata), (INDEX, job.plan.index))
        self._revive()
        return [self.writer.put(self._place, name, file, blob) for file, blob in blobs if blob is not None]

    def _revive(self) -> None:
        if not self.writer.alive:
            _log.warning("the checkpoint writer is gone; another one is started")
            self.writer = self.writer.replacement()

    def _written(self, job: Job, name: str) -> tuple[FileEntry, ...]:
        """Hand every part to the writer as soon as it is copied; raises OSError, or SaveFailed for a bad copy."""
        writes: list[Future[Wrote]] = []
        failure: OSError | None = None
        for bucket in job.staged.buckets():
            bucket.copy.wait()
            if bucket.copy.failure is not None:
                raise _error(bucket.copy.failure)(job.step, bucket.copy.failure.reason)
            writes.append(self.writer.write(self._order(job, name, bucket)))
            if not job.staged.kept:
                failure = failure or self._await(writes[-1], job, bucket)
                job.staged.empty(bucket)
            else:
                failure = self._await(writes[-1], job, bucket)
        if failure is not None:
            raise failure
        return tuple(entry for write in writes for entry in write.result().files)

    def _order(self, job: Job, name: str, bucket: Bucket) -> WriteOrder:
        return WriteOrder(
            place=self._place,
            folder=name,
            buffer=bucket.buffer,
            files=bucket.part.files,
            step=job.step,
            extra=job.extra,
            plan=job.plan.hash,
            publish=job.plan.whole,
        )

    def _await(self, write: "Future[Wrote]", job: Job, bucket: Bucket) -> OSError | None:
        """Wait as long as it takes; one that takes far too long is told of, once."""
        size = sum(size for _, _, size in bucket.part.files)
        late = self._clock() + STUCK_SECONDS + size / _SLOW_DISK
        told = False
        while not concurrent.futures.wait([write], _GLANCE).done:
            if not told and self._clock() >= late:
                told = True
                reason = f"rank {self._ranks.rank}: {size} bytes are still not written to {self._place}"
                self._tell("checkpoint.stuck", {"step": job.step, "reason": reason})
        error = write.exception()
        assert error is None or isinstance(error, OSError), "a writer reports what went wrong as OSError"
        return error

    def _sealed(
        self, job: Job, name: str, everything: "Sequence[Any]", described: "Sequence[Future[FileEntry]]"
    ) -> Manifest | Failed:
        """Rank 0's verdict: a checkpoint, or the reasons why there is none and its folder is gone."""
        concurrent.futures.wait(described)
        verdict = _failures(everything) or attempt(
            lambda: self._seal(
                job, name, [*(put.result() for put in described), *(e for part in everything for e in part)]
            )
        )
        if isinstance(verdict, Failed) and not verdict.fenced:
            self._remove(name)
        return verdict

    def _seal(self, job: Job, name: str, files: Sequence[FileEntry]) -> Manifest:
        now = time.time()
        manifest = Manifest(
            name=name,
            step=job.step,
            attempt=self._owner.attempt,
            nonce=self._owner.nonce,
            created_at=now,
            torch=torch.__version__,
            world={**job.world, "ranks": self._ranks.size},
            files=tuple(files),
            extra=job.extra,
        )
        seal(self._storage, manifest, self._owner.fence, now)
        return manifest

    def _remove(self, name: str) -> None:
        """Take a half-written folder away: all ranks have stopped writing to it, and nobody else ever will."""
        try:
            delete(self._storage, name, self._owner.fence)
        except OSError as error:
            _log.warning("half-written %s could not be removed yet: %s", name, error)


def _failures(everything: Sequence[Any]) -> Failed | None:
    failed = [(rank, part) for rank, part in enumerate(everything) if isinstance(part, Failed)]
    if not failed:
        return None
    return Failed(
        "; ".join(f"rank {rank}: {part.reason}" for rank, part in failed), final=any(part.final for _, part in failed)
    )


def _error(failed: Failed) -> type[SaveFailed]:
    if failed.fenced:
        return FencedOff
    return Unsound if failed.final else SaveFailed
