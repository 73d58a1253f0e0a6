"""One save, agreed between ranks: plan, write, seal. Runs on the saver's thread, on its own process group."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from checkpointing.catalog import Catalog
from checkpointing.commit import Commit, fresh_name, seal
from checkpointing.engine.failure import FAILURES, explain
from checkpointing.engine.group import Ranks
from checkpointing.engine.staging import Staged
from checkpointing.engine.writer import Written, agree, write_metadata, write_shard
from checkpointing.errors import FencedOff, SaveFailed
from checkpointing.manifest import Manifest
from checkpointing.retention import delete

T = TypeVar("T")
Tell = Callable[[str, dict[str, Any]], None]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Owner:
    """Whose checkpoints these are; `fence` says whether the owner may still commit and delete."""

    attempt: int
    nonce: str
    inherit: tuple[str, ...]
    fence: Callable[[], bool]


@dataclass(frozen=True)
class Failed:
    """What a rank sends instead of its result."""

    reason: str
    fenced: bool = False


@dataclass(frozen=True)
class Job:
    """Everything that one save needs; the state is already copied."""

    step: int
    staged: Staged
    extra: dict[str, Any]
    world: dict[str, Any]


class Saver:
    """Runs one save at a time; every rank of the group calls `run` for the same step."""

    def __init__(self, catalog: Catalog, ranks: Ranks, owner: Owner, tell: Tell) -> None:
        self._catalog, self._storage = catalog, catalog.storage
        self._ranks, self._owner, self._tell = ranks, owner, tell

    def run(self, job: Job) -> str:
        """Write, seal and name one checkpoint; raises SaveFailed on every rank when any of them failed."""
        start = time.monotonic()
        name, plan, metadata = self._planned(job)
        written = _attempt(lambda: write_shard(self._storage, name, self._ranks.rank, plan, job.staged))
        everything = self._ranks.gather(written)
        verdict: Commit | Failed | None = None
        if everything is not None:
            verdict = self._sealed(job, name, metadata, everything)
            if isinstance(verdict, Failed) and not verdict.fenced:
                self._remove(name)
        verdict = self._ranks.broadcast(verdict)
        if isinstance(verdict, Failed):
            raise (FencedOff if verdict.fenced else SaveFailed)(job.step, verdict.reason)
        if self._ranks.leads:
            seconds = time.monotonic() - start
            self._tell(
                "checkpoint.committed", {"step": job.step, "name": name, "bytes": verdict.size, "seconds": seconds}
            )
        return name

    def _planned(self, job: Job) -> tuple[str, Any, Any]:
        """Agree on a name and on who writes what; raises SaveFailed everywhere when planning failed."""
        plans = self._ranks.gather(job.staged.plan)
        shares: list[Any] | None = None
        metadata = None
        if plans is not None:
            planned = _attempt(lambda: (self._named(job.step), agree(plans)))
            if isinstance(planned, Failed):
                shares = [planned] * self._ranks.size
            else:
                name, (final, metadata) = planned
                shares = [(name, plan) for plan in final]
        share = self._ranks.scatter(shares)
        if isinstance(share, Failed):
            raise SaveFailed(job.step, share.reason)
        name, plan = share
        return name, plan, metadata

    def _named(self, step: int) -> str:
        owner = self._owner
        name = fresh_name(step, owner.attempt, owner.nonce, self._catalog.names())
        self._tell("checkpoint.saving", {"step": step, "name": name})
        return name

    def _sealed(self, job: Job, name: str, metadata: Any, everything: list[Written | Failed]) -> Commit | Failed:
        failures = [f"rank {rank}: {part.reason}" for rank, part in enumerate(everything) if isinstance(part, Failed)]
        if failures:
            return Failed("; ".join(failures))
        return _attempt(lambda: self._seal(job, name, metadata, [part for part in everything]))

    def _seal(self, job: Job, name: str, metadata: Any, written: list[Written]) -> Commit:
        results = [result for part in written for result in part.results]
        described = write_metadata(self._storage, name, name, metadata, results)
        now = time.time()
        manifest = Manifest(
            name=name,
            step=job.step,
            attempt=self._owner.attempt,
            nonce=self._owner.nonce,
            created_at=now,
            torch=torch.__version__,
            world={**job.world, "ranks": self._ranks.size},
            files=(described, *(entry for part in written for entry in part.files)),
            extra=job.extra,
        )
        return seal(self._storage, manifest, self._owner.fence, now)

    def _remove(self, name: str) -> None:
        """Take a half-written folder away: all ranks have stopped writing to it, and nobody else ever will."""
        try:
            delete(self._storage, name, self._owner.fence)
        except OSError as error:
            _log.warning("half-written %s could not be removed yet: %s", name, error)


def _attempt(act: Callable[[], T]) -> T | Failed:
    """Do one rank's part; a failure becomes a message, so that the peers are not left waiting."""
    try:
        return act()
    except FAILURES as error:
        return Failed(explain(error), fenced=isinstance(error, FencedOff))
