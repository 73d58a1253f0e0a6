"""The training process's entry point to checkpointing: background saves, and restores from verified checkpoints."""

import collections
import concurrent.futures
import json
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from torch import Tensor

from checkpointing.config import BY_NODE, CheckpointConfig
from checkpointing.engine.collectives.group import Failed, World, explain, result_or_failed, start_background_thread
from checkpointing.engine.restore.own_layout import Memory
from checkpointing.engine.restore.restorer import Restored, RestoreOptions, Restorer, agree_on_committed_step
from checkpointing.engine.restore.source import ONLY_RNG, OptionalKeys, Targets, TensorsFor
from checkpointing.engine.save.flusher import Flusher
from checkpointing.engine.save.save_queue import RETRY_PAUSES, SaveAgreement, SaveQueue, agree_on_save
from checkpointing.engine.save.saver import CheckpointSaver, SavedCheckpoint, SaveJob, Writer
from checkpointing.engine.state.plausibility import OFF, Inspection
from checkpointing.engine.state.save_plan import AgreedPlan, agree_on_plan, layout_for_budget
from checkpointing.engine.state.staging import Stager, Structure
from checkpointing.errors import SaveFailed, UnsavableState
from checkpointing.event_sink import EmitEvent, EventSink, emit_nothing
from checkpointing.retention.policy import Policy, TierRetention
from checkpointing.storage.digests import digest
from checkpointing.storage.durable import canonical
from checkpointing.tiers.catalog import Owner
from checkpointing.tiers.tier import RunTiers
from checkpointing.writer.link import WriterLink

GIB = 1 << 30

_LONG = timedelta(days=7)
_WARM_SECONDS, _DEBRIS_SECONDS = 30.0, 10.0
_FACTS_ROOM = 1 << 18
"""Bytes reserved in the arena's records for the caller's own facts."""


class Checkpointer:
    """One rank's interface for saving and restoring in one generation.

    All ranks call the same methods in the same order. `on_event` is called on rank 0, except for events that only one
    rank can observe, which are emitted on that rank. Save events are emitted from the saving thread. `extra` is taken
    from rank 0. The owner's `fence` is checked before every COMMIT and every delete.
    """

    def __init__(
        self,
        owner: Owner,
        world: World,
        tiers: RunTiers,
        on_event: EmitEvent,
        *,
        config: CheckpointConfig | None = None,
        link: Writer | None = None,
        restore: RestoreOptions | None = None,
        pauses: Sequence[float] = RETRY_PAUSES,
    ) -> None:
        """Create the process groups for saves.

        Collective; must be called on the caller's thread before any training step. `link` connects to the agent's
        writer; without it, a writer process is started when needed. `pauses` are the seconds before each retry of a
        failed save.
        """
        self._owner, self._tiers, self._facts = owner, tiers, _plain(world.facts, "world")
        self._config, self._link, self._pauses = config or CheckpointConfig(), link, pauses
        self._events = EventSink(on_event)
        # Separate groups for the caller's thread, for saves, and for copies to further tiers. A slow disk may block a
        # rank in its save for a long time, but a dead peer is still detected immediately.
        self._ranks, self._save_ranks = world.group(), world.group(_LONG)
        self._flush_ranks = world.group(_LONG) if len(tiers.tiers) > 1 else None
        options = replace(restore or RestoreOptions(), verdicts=tiers.pins)
        self._restorer = Restorer(tiers.tiers, self._ranks, owner, self._events.emit, options=options)
        self._plausibility = self._config.plausibility
        self._flusher: Flusher | None = None
        self._first = tiers.tiers[0]
        policy = Policy.from_config(self._first.keep, self._config)
        emit = self._events.emit if self._ranks.leads else emit_nothing
        self._retention = TierRetention(self._first, policy, owner, emit, tiers.pins)
        self._debris_thread: threading.Thread | None = None
        self._stager: Stager | None = None
        self._saver: CheckpointSaver | None = None
        self._queue: SaveQueue | None = None
        self.committed_step: int | None = None
        """Step of the newest checkpoint that this object has committed or restored. Final after `wait`."""
        self._newest: int | None = None  # step of the most recently started save
        self.failure: str | None = None
        """Reason why the newest save failed, known on every rank; None if it succeeded. Final after `wait`."""
        self.lasting: SaveFailed | None = None
        """A failure that would recur at every save, known on every rank; further training would only lose more work."""
        self.stall_seconds = 0.0
        """How long the last `save` call blocked its caller, in seconds."""
        self.save_seconds: collections.deque[float] = collections.deque(maxlen=64)
        """Durations of the most recent saves in seconds, from naming to COMMIT."""

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Do all one-time work: plan, memory, record templates, writer. Collective; keeps no reference to the tensors.

        Raises ValueError on every rank for state that cannot be saved, OSError if there is not enough memory for it.
        """
        if not self._agree(0, self._match(tensors)).same:
            self._plan(tensors)
        assert self._saver is not None
        assert self._stager is not None
        Inspection().inspect(*self._stager.sample())  # builds its lookup tables, once
        self._stager.forget()
        # If the writer fails now, the first save reports it.
        concurrent.futures.wait([self._saver.writer.warm()], _WARM_SECONDS)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        extra: dict[str, Any],
        rank_state: dict[str, Any] | None = None,
        trained: Collection[str] = (),
    ) -> bool:
        """Copy the state, then write it in the background; return False on every rank if the save was skipped.

        `rank_state` holds JSON facts that may differ between ranks. They are stored in `extra` as the list
        `rank_state`, which has one entry if all ranks agree, otherwise one entry per rank.

        `trained` are the keys of trainable weights, which must not be NaN.

        DTensors are saved as shards. Plain tensors are saved once, and replicas that differ between ranks are refused.
        Raises ValueError or TypeError for state that cannot be saved. Later failures emit the event `checkpoint.failed`
        and leave `committed_step` unchanged; `lasting` is set if the failure would recur at every save. With lazy
        staging, the tensors must not change until `before_optimizer_step` has returned.
        """
        start = time.perf_counter()
        facts, own = _plain(extra, "extra"), _plain(rank_state or {}, "rank_state")
        self.before_optimizer_step()
        try:
            parts = self._admit(step, tensors, facts, own)
        except OSError as error:  # no memory for a new plan; all ranks agree on this
            parts, self._newest, self.failure = None, step, explain(error)
            self._emit_on_leader("checkpoint.failed", step=step, reason=self.failure)
        except NotImplementedError:  # torch raises this for unsupported kinds of tensors
            raise
        except RuntimeError as error:  # a broken group; training detects lost peers on its own
            parts, self._newest, self.failure = None, step, f"rank {self._ranks.rank}: {explain(error)}"
            self._events.emit("checkpoint.failed", {"step": step, "reason": self.failure})
        if parts is not None:
            self._begin(step, parts, facts, frozenset(trained))
        self.stall_seconds = time.perf_counter() - start
        return parts is not None

    def all_gather(self, value: Any) -> list[Any]:
        """Return every rank's plain value in rank order. Collective; must be called on the caller's thread."""
        return self._ranks.all_gather(value)

    def _admit(
        self, step: int, tensors: Mapping[str, Tensor], facts: dict[str, Any], own: dict[str, Any]
    ) -> list[Tensor] | None:
        """Return this rank's parts of the tensors once there is memory for them, or None if this save must be skipped.

        Adds the `rank_state` of all ranks to `facts`.
        """
        parts = self._match(tensors)
        agreed = self._agree(step, parts, own)
        reason = self._reason_to_skip(agreed)
        if reason is not None:
            self._emit_on_leader("checkpoint.skipped", step=step, reason=reason)
            return None
        states = [own] if agreed.alike else self._ranks.all_gather(own)
        if any(states):
            facts["rank_state"] = states
        return parts if agreed.same else self._plan(tensors)

    def _match(self, tensors: Mapping[str, Tensor]) -> list[Tensor] | None:
        return self._stager.match(tensors) if self._stager is not None else None

    def _agree(self, step: int, parts: list[Tensor] | None, own: dict[str, Any] | None = None) -> SaveAgreement:
        stager = self._stager
        return agree_on_save(
            self._ranks,
            plan=stager.plan.number if stager is not None and parts is not None else 0,
            step=step,
            has_room=(stager is None or stager.has_room) and (self._queue is None or self._queue.alive),
            idle=stager is None or stager.is_idle,
            rank_state=int(digest(canonical(own or {}))[:15], 16),
        )

    def _reason_to_skip(self, agreed: SaveAgreement) -> str | None:
        """Return why this save must be skipped, or None.

        Training never waits for a disk: a save needs a free buffer on every rank.
        """
        if not agreed.same and not agreed.idle:
            return "the structure of the state has changed, and an earlier save is still being written"
        if not agreed.has_room:
            return "earlier saves are still being written, and no buffer is free"
        return None

    def _begin(self, step: int, parts: Sequence[Tensor], facts: dict[str, Any], trained: frozenset[str]) -> None:
        assert self._stager is not None
        assert self._queue is not None
        # The result of an earlier save does not apply to this one.
        self._newest, self.failure = step, None
        staged = self._stager.stage(parts, compare=self._plausibility != OFF)
        job = SaveJob(step, self._stager.plan, staged, facts, self._facts, trained)
        self._queue.submit(job)
        self._stager.stage_buckets(staged, parts)

    def _plan(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Agree on a plan and allocate memory for it while no save is running. Returns this rank's parts."""
        staging = self._config.staging
        lay = layout_for_budget(staging.files, staging.host_memory)
        by_node = self._config.files == BY_NODE
        plan = agree_on_plan(self._ranks, tensors, lay, int(staging.host_memory * GIB), by_node=by_node)
        structure = Structure(tensors)
        if self._stager is not None:
            self._stager.close()
            self._stager = None
        stager = result_or_failed(lambda: self._make_stager(plan, structure))
        results = self._ranks.all_gather(stager if isinstance(stager, Failed) else None)
        failed = [(f"rank {rank}: {result.reason}", result.lasting) for rank, result in enumerate(results) if result]
        if failed:
            raise (ValueError if any(lasting for _, lasting in failed) else OSError)(failed[0][0])
        assert isinstance(stager, Stager)
        self._stager = stager
        arena = self._open_writer().arena
        self._restorer.memory = Memory(arena, plan, stager.write_templates) if plan.whole else None
        self._open_flusher()
        parts = stager.match(tensors)
        assert parts is not None, "a state does not match its own structure"
        return parts

    def _make_stager(self, plan: AgreedPlan, structure: Structure) -> Stager:
        writer = self._open_writer()
        arena = writer.arena
        arena.reload()
        if (arena.plan, arena.buffers) == (plan.hash, plan.buffers) and arena.buffer_bytes >= plan.layout.buffer_bytes:
            arena.populate()  # left by an earlier generation; its contents may be worth loading
        else:
            arena.shape(plan.layout.buffer_bytes, plan.buffers, plan.hash, _FACTS_ROOM)
        return Stager(arena, plan, structure, self._config.staging.mode)

    def _open_writer(self) -> Writer:
        if self._saver is None:
            self._link = self._link or WriterLink.start()
            emit = self._events.emit
            self._saver = CheckpointSaver(
                self._first, self._save_ranks, self._owner, self._link, self._plausibility, emit
            )
            self._queue = SaveQueue(self._saver, self._save_ranks, emit, self._on_save_end, self._pauses)
        return self._saver.writer

    def _open_flusher(self) -> None:
        """Start copying to further tiers, which may still be behind from an earlier generation."""
        if self._flush_ranks is None or self._flusher is not None:
            return
        self._flusher = Flusher(
            self._tiers,
            self._flush_ranks,
            self._owner,
            self._open_writer,
            self._events.emit,
            config=self._config,
            distrusted=self._restorer.distrusted,
        )

    def _on_save_end(self, job: SaveJob, saved: SavedCheckpoint | SaveFailed) -> None:
        """Record the result of a save. Runs on the save queue's thread."""
        if isinstance(saved, SaveFailed):
            if isinstance(saved, UnsavableState):
                self.lasting = saved
            if job.step == self._newest:
                self.failure = saved.reason
            return
        self.committed_step = job.step
        self.save_seconds.append(saved.seconds)
        if self._manages_first_tier:  # the flusher handles deletion in the other tiers
            if self._debris_thread is not None:
                self._debris_thread.join()  # at most one at a time
            held = self._flusher.held if self._flusher is not None else ()
            self._retention.apply(saved.name, self._restorer.distrusted.in_tier(self._first.path), held)
        if self._flusher is not None:
            self._flusher.record_commit(saved.name)

    @property
    def _manages_first_tier(self) -> bool:
        return self._ranks.looks_after(shared=self._first.shared)

    def _start_debris_collection(self) -> None:
        """Collect unfinished checkpoints in the first tier, in parallel with training.

        No save is running at this point, so every unfinished checkpoint has been abandoned, and no later save reuses
        its name.
        """
        if self._debris_thread is not None:
            self._debris_thread.join()
        there = result_or_failed(self._first.catalog.names)
        if there and not isinstance(there, Failed):
            collect = partial(self._retention.collect_debris, there)
            self._debris_thread = start_background_thread(collect, "checkpoint-tidying")

    def before_optimizer_step(self) -> None:
        """Return once the tensors from the last save may be changed. Returns immediately without lazy staging."""
        if self._stager is not None:
            self._stager.before_optimizer_step()

    def restore(
        self, tensors: Mapping[str, Tensor] | TensorsFor, optional_keys: OptionalKeys = ONLY_RNG
    ) -> Restored | None:
        """Fill `tensors` in place from the newest checkpoint that verifies; return None if no checkpoint exists.

        If `tensors` is a function, it is called on every rank with the `extra` of each checkpoint that is tried. Raises
        NothingVerifies if checkpoints should exist but none can be loaded; whether to start from scratch is then up to
        the user.
        """
        self.wait()
        restored = self._restorer.run(Targets(tensors), optional_keys)
        if self._manages_first_tier:
            self._start_debris_collection()
        if restored is None:
            self.committed_step = None
            return None
        self.committed_step = agree_on_committed_step(self._ranks, self._tiers.tiers, self._owner, restored)
        return restored

    def wait(self) -> None:
        """Return once no save is running and a write of every pending event has been attempted."""
        self.before_optimizer_step()
        if self._queue is not None:
            self._queue.wait()
        self._events.flush()

    def close(self, flush_for: Callable[[], float] | None = None) -> None:
        """Wait, then release memory, writer and process groups. Raises the error that kept an event from being written.

        With `flush_for`, which returns the remaining seconds, the newest checkpoint is first copied to every tier.
        """
        self.wait()
        if self._queue is not None:
            self._queue.close()
        if self._debris_thread is not None:
            self._debris_thread.join(_DEBRIS_SECONDS)  # a daemon thread, so it can be abandoned if it hangs
        if self._flusher is not None:
            if flush_for is not None:
                self._flusher.drain(flush_for)
            self._flusher.close()
        elif self._flush_ranks is not None:
            self._flush_ranks.close()
        if self._stager is not None:
            self._stager.close()
            self._stager = None
        if self._saver is not None:
            self._saver.writer.close()
        elif self._link is not None:
            self._link.close()
        self._saver = self._queue = self._link = None
        self._ranks.close()
        self._save_ranks.close()
        self._events.close()

    def _emit_on_leader(self, kind: str, **data: Any) -> None:
        if self._ranks.leads:
            self._events.emit(kind, data)


def _plain(value: dict[str, Any], what: str) -> dict[str, Any]:
    """Return a copy made through JSON, so that later changes cannot affect it. Raises TypeError or ValueError."""
    try:
        copy: dict[str, Any] = json.loads(canonical(value))
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError  # subclasses may not accept a message
        raise kind(f"`{what}` must be plain JSON: {error}") from error
    return copy
