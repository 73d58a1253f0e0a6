"""A save that all ranks carry out together: name, write, inspect, seal.

Runs on the queue's thread, over its own group.
"""

import concurrent.futures
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from checkpointing.engine.collectives.group import Failed, RankGroup, result_or_failed
from checkpointing.engine.state.plausibility import OFF, Inspection, InspectionReport, StateJudgement, judge_state
from checkpointing.engine.state.save_plan import AgreedPlan
from checkpointing.engine.state.staging import Bucket, Staged
from checkpointing.errors import SaveFailed, UnsavableState
from checkpointing.event_sink import EmitEvent
from checkpointing.format.commit import Commit, Region, fresh_name, join_regions, seal
from checkpointing.format.manifest import FINGERPRINTS, INDEX, METADATA, FileEntry, Manifest, encode_fingerprints
from checkpointing.retention.garbage import delete
from checkpointing.tiers.catalog import Owner
from checkpointing.tiers.copy_files import Copied, CopyOrder
from checkpointing.tiers.tier import ResolvedTier, make_striped_folder
from checkpointing.writer.arena import Arena
from checkpointing.writer.write_orders import WriteOrder, WriteResult

STUCK_SECONDS = 30.0
"""Seconds beyond what a slow disk would need, after which a write is reported as stuck."""

_SLOW_DISK = 32 << 20  # bytes per second
_HEAD_START = 0.001

_log = logging.getLogger(__name__)


class Writer(Protocol):
    """The subset of a writer link used by saves and by copies to further tiers."""

    arena: Arena

    @property
    def alive(self) -> bool: ...

    def write(self, order: WriteOrder) -> "Future[WriteResult]": ...

    def put(self, place: str, folder: str, name: str, blob: bytes) -> "Future[FileEntry]": ...

    def copy(self, order: CopyOrder) -> "Future[Copied]": ...

    def warm(self) -> "Future[None]": ...

    def replacement(self) -> "Writer": ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class SaveJob:
    """Inputs for one save. The state has been copied or is being copied."""

    step: int
    plan: AgreedPlan
    staged: Staged
    extra: dict[str, Any]
    world: dict[str, Any]
    trained: frozenset[str] = frozenset()  # keys of this rank's trained weights


@dataclass
class _Submitted:
    """Orders given to the writer for one save, and this rank's inspection report."""

    writes: "list[tuple[Bucket, Future[WriteResult]]]" = field(default_factory=list)
    described: "list[Future[FileEntry]]" = field(default_factory=list)
    report: InspectionReport | Failed = field(default_factory=lambda: Failed("nothing was submitted"))


@dataclass(frozen=True)
class SavedCheckpoint:
    """A committed checkpoint; `manifest` is the digest in its COMMIT."""

    name: str
    size: int
    seconds: float
    manifest: str


class CheckpointSaver:
    """Runs one save at a time; every rank of the group calls `run` for the same step."""

    def __init__(
        self,
        place: ResolvedTier,
        ranks: RankGroup,
        owner: Owner,
        writer: Writer,
        plausibility: str,
        emit: EmitEvent,
    ) -> None:
        """Create a saver for the first tier, `place`; `plausibility` is `refuse`, `warn` or `off`."""
        self._place, self._storage, self._ranks, self._owner = place, place.storage, ranks, owner
        self._plausibility, self._emit = plausibility, emit
        self._seals = ranks.looks_after(shared=place.shared)
        self.writer = writer

    def run(self, job: SaveJob) -> SavedCheckpoint:
        """Name, write and seal one checkpoint. Raises SaveFailed on every rank if any rank failed."""
        start = time.monotonic()
        name = self._agreed_name(job)
        submitted = _Submitted()
        submitted.report = result_or_failed(lambda: self._submit_parts(job, name, submitted))
        described = submitted.described
        reports = self._ranks.gather(submitted.report)
        judgement = (
            None if reports is None else result_or_failed(lambda: self._judge_state(job, name, reports, described))
        )
        if self._ranks.broadcast(_refusal(judgement) is not None):
            self._forget(job)  # now, because a restart during a slow write would prefer the copy in memory
        everything = self._ranks.gather(result_or_failed(lambda: self._written(job, submitted)))
        manifest: Manifest | Failed | None = None
        if everything is not None:
            concurrent.futures.wait(described)
            manifest = (
                _refusal(judgement)
                or Failed.combine(everything)
                or (judgement if isinstance(judgement, Failed) else None)
                or result_or_failed(lambda: self._manifest(job, name, described, everything))
            )
        sealed = self._seal(manifest)
        if isinstance(sealed, Failed):
            self._undo(job, name, sealed)
            raise sealed.error(job.step)
        saved = SavedCheckpoint(name, sealed.size, time.monotonic() - start, sealed.manifest)
        if isinstance(judgement, StateJudgement):
            accepted = judgement
            # The checkpoint is committed; a failed event must not make one rank believe otherwise.
            not_emitted = result_or_failed(lambda: self._emit_saved(job, saved, accepted))
            if isinstance(not_emitted, Failed):
                _log.error("%s is committed, but its event could not be written: %s", name, not_emitted.reason)
        return saved

    # ---- naming

    def _agreed_name(self, job: SaveJob) -> str:
        """Agree on a fresh name from rank 0. Raises SaveFailed on every rank if that fails."""
        there = None if self._place.shared else self._ranks.gather(result_or_failed(self._place.catalog.names))
        agreed = self._ranks.from_leader(lambda: self._name_checkpoint(job, there))
        if isinstance(agreed, Failed):
            raise SaveFailed(job.step, agreed.reason)
        return agreed

    def _name_checkpoint(self, job: SaveJob, there: Sequence[Any] | None) -> str:
        if failed := Failed.combine(there or ()):
            raise SaveFailed(job.step, failed.reason)
        owner, step = self._owner, job.step
        taken = self._place.catalog.names() if there is None else [each for names in there for each in names]
        # Steps only increase within a generation, so no name is reused, even after retention has deleted the first
        # folder.
        name = fresh_name(step, owner.attempt, owner.nonce, taken, first=int(job.world.get("generation") or 1))
        self._emit("checkpoint.saving", {"step": step, "name": name})
        warning = make_striped_folder(self._place, name)
        if warning:
            _log.warning("%s", warning)
        return name

    # ---- writing

    def _submit_parts(self, job: SaveJob, name: str, submitted: _Submitted) -> InspectionReport:
        """Hand each part to the writer once it has been copied, and inspect it while it is being written."""
        if not self.writer.alive:
            _log.warning("the checkpoint writer is gone; starting another")
            self.writer = self.writer.replacement()
        inspection = Inspection(() if self._plausibility == OFF else job.trained)
        for bucket in job.staged.buckets():
            bucket.copy.wait()
            if bucket.copy.failure is not None:
                raise bucket.copy.failure.error(job.step)
            submitted.writes.append((bucket, self.writer.write(self._order(job, name, bucket))))
            if not submitted.described:
                submitted.described += self._describe(job, name)
            # The writer woke up on this core, where its low priority would keep it from running during the inspection.
            time.sleep(_HEAD_START)
            inspection.inspect(bucket.memory, bucket.part.items)
            if not job.staged.kept:
                self._await_write(submitted.writes[-1][1], job, bucket)
                job.staged.empty(bucket)
        return inspection.report(job.staged.replicas())

    def _describe(self, job: SaveJob, name: str) -> "list[Future[FileEntry]]":
        """Have rank 0's writer write the two files that describe the layout, in parallel with the data."""
        blobs = ((METADATA, job.plan.metadata), (INDEX, job.plan.index))
        return [
            self.writer.put(self._place.catalog.place, name, file, blob) for file, blob in blobs if blob is not None
        ]

    def _order(self, job: SaveJob, name: str, bucket: Bucket) -> WriteOrder:
        return WriteOrder(
            place=self._place.catalog.place,
            folder=name,
            buffer=bucket.buffer,
            files=bucket.part.files,
            step=job.step,
            extra=job.extra,
            plan=job.plan.hash,
            publish=job.plan.whole,
            places=tuple(job.plan.places[name] for name, *_ in bucket.part.files) if job.plan.places else (),
        )

    def _written(self, job: SaveJob, submitted: _Submitted) -> tuple[FileEntry | Region, ...]:
        """Wait until the writer no longer reads the buffers. Return the written files or raise the first failure."""
        for bucket, write in submitted.writes:
            self._await_write(write, job, bucket)
            bucket.copy.certify()
            if bucket.copy.failure is not None:
                raise bucket.copy.failure.error(job.step)
        results = [write.result() for _, write in submitted.writes]
        if isinstance(submitted.report, Failed):
            raise submitted.report.error(job.step)
        if not job.plan.places:
            return tuple(entry for result in results for entry in result.files)
        written = [pair for result in results for pair in zip(result.files, result.filled, strict=True)]
        return tuple(Region.from_entry(entry, filled, job.plan.places) for entry, filled in written)

    def _await_write(self, write: "Future[WriteResult]", job: SaveJob, bucket: Bucket) -> None:
        """Wait for as long as the write takes. Report it once if it takes far too long."""
        size = sum(size for _, _, size in bucket.part.files)
        if not concurrent.futures.wait([write], STUCK_SECONDS + size / _SLOW_DISK).done:
            reason = f"rank {self._ranks.rank}: {size} bytes are still not written to {self._place.path}"
            self._emit("checkpoint.stuck", {"step": job.step, "reason": reason})
            concurrent.futures.wait([write])

    # ---- verdict and seal

    def _judge_state(
        self, job: SaveJob, name: str, reports: Sequence[Any], described: "list[Future[FileEntry]]"
    ) -> StateJudgement:
        """Judge the state on rank 0 and write the fingerprints in parallel with the data. Raises SaveFailed."""
        failed = Failed.combine(reports)
        if failed is not None:
            raise failed.error(job.step)
        judgement = judge_state(self._plausibility, job.plan.everything, reports, job.plan.replicas)
        if judgement.refused:
            raise UnsavableState(job.step, "; ".join(judgement.reasons))
        blob = encode_fingerprints(judgement.fingerprints)
        described.append(self.writer.put(self._place.catalog.place, name, FINGERPRINTS, blob))
        return judgement

    def _manifest(
        self, job: SaveJob, name: str, described: "Sequence[Future[FileEntry]]", everything: Sequence[Any]
    ) -> Manifest:
        written = [entry for part in everything for entry in part]
        regions = [entry for entry in written if isinstance(entry, Region)]
        return Manifest(
            name=name,
            step=job.step,
            attempt=self._owner.attempt,
            nonce=self._owner.nonce,
            created_at=time.time(),
            torch=torch.__version__,
            world={**job.world, "ranks": self._ranks.size},
            files=(*(put.result() for put in described), *(join_regions(regions) if regions else written)),
            extra=job.extra,
        )

    def _seal(self, manifest: Manifest | Failed | None) -> Commit | Failed:
        """Seal on rank 0, or once per node in a node-local tier. Return the same COMMIT or failure on every rank."""
        if not self._place.shared:
            manifest = self._ranks.broadcast(manifest)
        done: Commit | Failed | None = manifest if isinstance(manifest, Failed) else None
        if isinstance(manifest, Manifest) and self._seals:
            sealing = manifest
            done = result_or_failed(lambda: seal(self._storage, sealing, self._owner.fence, sealing.created_at))
        if not self._place.shared:
            ends = self._ranks.gather(done)
            done = (Failed.combine(ends) or next(end for end in ends if end is not None)) if ends else None
        agreed: Commit | Failed = self._ranks.broadcast(done)
        return agreed

    def _undo(self, job: SaveJob, name: str, failed: Failed) -> None:
        """Delete an unfinished folder that no process is writing to any more."""
        if failed.final:
            self._forget(job)
        if failed.fenced or not self._seals:
            return
        try:
            delete(self._storage, name, self._owner.fence)
        except OSError as error:
            _log.warning("half-written %s could not be removed yet: %s", name, error)

    def _forget(self, job: SaveJob) -> None:
        """Invalidate the copy in memory, whose record the writer publishes once the buffer is fully digested."""
        for bucket in job.staged.buckets() if job.staged.kept else ():
            self.writer.arena.clear(bucket.buffer)

    def _emit_saved(self, job: SaveJob, saved: SavedCheckpoint, judgement: StateJudgement) -> None:
        facts = {"step": job.step, "name": saved.name, "bytes": saved.size, "seconds": saved.seconds}
        self._emit("checkpoint.committed", {**facts, "manifest": saved.manifest})
        if judgement.reasons:
            self._emit("checkpoint.doubted", {"step": job.step, "reason": "; ".join(judgement.reasons)})


def _refusal(result: Any) -> Failed | None:
    """Return the result if it is a failure that no retry can fix, else None. It takes precedence over disk failures."""
    return result if isinstance(result, Failed) and result.final else None
