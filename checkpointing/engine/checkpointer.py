"""The seam between training and checkpoints: save in the background, restore what verifies."""

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
from checkpointing.engine.ranks.group import Failed, World, explain, result_or_failed, start_background_thread
from checkpointing.engine.restore.memory_tier import Memory
from checkpointing.engine.restore.restorer import Restored, RestoreOptions, Restorer, agree_on_committed_step
from checkpointing.engine.restore.source import OptionalKeys, Targets, TensorsFor
from checkpointing.engine.save.flusher import Flusher
from checkpointing.engine.save.save_queue import RETRY_PAUSES, SaveAgreement, SaveQueue, SaveReadiness, agree_on_save
from checkpointing.engine.save.saver import Job, Saved, Saver, Writer
from checkpointing.engine.state.plausibility import PlausibilityJudge
from checkpointing.engine.state.save_plan import Plan, agree_on_plan, budgeted
from checkpointing.engine.state.staging import Stager, Structure
from checkpointing.errors import SaveFailed, Unsavable
from checkpointing.event_sink import EmitEvent, EventSink, emit_nothing
from checkpointing.owner import Owner
from checkpointing.retention.policy import Policy, TierRetention
from checkpointing.storage.digests import digest
from checkpointing.storage.durable import canonical
from checkpointing.tiers.tier import RunTiers
from checkpointing.writer.link import WriterLink

GIB = 1 << 30

_LONG = timedelta(days=7)
_WARM_SECONDS, _DEBRIS_SECONDS = 30.0, 10.0
_FACTS_ROOM = 1 << 18
"""Bytes in the arena's records for the caller's own facts."""


class Checkpointer:
    """One per rank and generation; all ranks call the same methods in the same order.

    `on_event` is called on rank 0 (for what only one rank can know: on that one), for saves from the saving thread.
    `extra` is rank 0's; the owner's `fence` is asked before every COMMIT and every delete.
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
        """Create the process groups of the saves: collective, on the caller's thread, before any training step.

        `link` goes to the writer that the agent owns; without one, a writer process is started when needed. `pauses`
        are the seconds before a failed save is tried again.
        """
        self._owner, self._tiers, self._facts = owner, tiers, _plain(world.facts, "world")
        self._config, self._link, self._pauses = config or CheckpointConfig(), link, pauses
        self._events = EventSink(on_event)
        # One group each for the caller's thread, for saves, and for copies to further tiers. A disk may keep a rank in
        # its save for long; a dead peer is noticed at once all the same.
        self._ranks, self._save_ranks = world.group(), world.group(_LONG)
        self._flush_ranks = world.group(_LONG) if len(tiers.tiers) > 1 else None
        options = replace(restore or RestoreOptions(), verdicts=tiers.pins)
        self._restorer = Restorer(tiers.tiers, self._ranks, owner, self._events.emit, options=options)
        self._judge = PlausibilityJudge(self._config.plausibility)
        self._flusher: Flusher | None = None
        self._first = tiers.tiers[0]
        policy = Policy.of(self._first.keep, self._config)
        emit = self._events.emit if self._ranks.leads else emit_nothing
        self._retention = TierRetention(self._first, policy, owner, emit, tiers.pins)
        self._debris_thread: threading.Thread | None = None
        self._stager: Stager | None = None
        self._saver: Saver | None = None
        self._queue: SaveQueue | None = None
        self.committed_step: int | None = None
        """Step of the newest checkpoint that this object has committed or restored; settled after `wait`."""
        self.agreed_committed_step: int | None = None
        """The same on all ranks: what was committed on every one of them when `save` was last called."""
        self._newest: int | None = None  # the step of the save that was begun last
        self.failure: str | None = None
        """Why the newest save did not happen, known on every rank; None when it did. Settled after `wait`."""
        self.lasting: SaveFailed | None = None
        """A failure that comes back at every save, known on every rank: training on would only lose more."""
        self.stall_seconds = 0.0
        """How long the last `save` kept its caller."""
        self.save_seconds: collections.deque[float] = collections.deque(maxlen=64)
        """How long the last saves took, from the naming to COMMIT."""

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Do all that is to be done once: plan, memory, record templates, writer; collective. Keeps no tensor.

        Raises ValueError on every rank for state that cannot be saved, OSError when there is no memory for it.
        """
        if not self._agree(0, self._match(tensors)).same:
            self._plan(tensors)
        assert self._saver is not None
        assert self._stager is not None
        self._judge.inspection().inspect(*self._stager.sample())  # its tables are made once
        self._stager.forget()
        # A writer that fails now reports it at the first save.
        concurrent.futures.wait([self._saver.writer.warm()], _WARM_SECONDS)

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        extra: dict[str, Any],
        rank_state: dict[str, Any] | None = None,
        trained: Collection[str] = (),
    ) -> bool:
        """Copy the state, then write it in the background; False when it was skipped, on all ranks alike.

        `rank_state` are facts in JSON that may differ between ranks. They are kept in `extra` as the list
        `rank_state`, which has one entry for all ranks where they agree, else one for each.

        `trained` are the keys of weights that train, of which none may be NaN.

        DTensors are saved in shards, plain tensors once: replicas that differ between ranks are refused. Raises
        ValueError or TypeError for state that cannot be saved. Whatever goes wrong later is the event
        `checkpoint.failed`, and `committed_step` stays behind; `lasting` is set if it comes back at every save. With
        lazy staging the tensors must not change before `before_optimizer_step` was called.
        """
        start = time.perf_counter()
        facts, own = _plain(extra, "extra"), _plain(rank_state or {}, "rank_state")
        self.before_optimizer_step()
        try:
            parts = self._admitted(step, tensors, facts, own)
        except OSError as error:  # no memory for a new plan, by agreement
            parts, self._newest, self.failure = None, step, explain(error)
            self._emit_on_leader("checkpoint.failed", step=step, reason=self.failure)
        except NotImplementedError:  # what torch raises for tensors of a kind that it cannot work with
            raise
        except RuntimeError as error:  # a broken group: training finds out about its peers by itself
            parts, self._newest, self.failure = None, step, f"rank {self._ranks.rank}: {explain(error)}"
            self._events.emit("checkpoint.failed", {"step": step, "reason": self.failure})
        if parts is not None:
            self._begin(step, parts, facts, frozenset(trained))
        self.stall_seconds = time.perf_counter() - start
        return parts is not None

    def all_gather(self, value: Any) -> list[Any]:
        """Collective, on the caller's thread: return every rank's plain value, in rank order, on every rank."""
        return self._ranks.all_gather(value)

    def _admitted(
        self, step: int, tensors: Mapping[str, Tensor], facts: dict[str, Any], own: dict[str, Any]
    ) -> list[Tensor] | None:
        """This rank's parts of the tensors, for which there is memory; None when this save has to be skipped.

        Adds the state of the ranks to `facts`.
        """
        parts = self._match(tensors)
        agreed = self._agree(step, parts, own)
        self.agreed_committed_step = agreed.committed
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
            SaveReadiness(
                plan=stager.plan.number if stager is not None and parts is not None else 0,
                step=step,
                has_room=(stager is None or stager.has_room) and (self._queue is None or self._queue.alive),
                idle=stager is None or stager.buffers.idle,
                committed=self.committed_step,
                rank_state=int(digest(canonical(own or {}))[:15], 16),
            ),
        )

    def _reason_to_skip(self, agreed: SaveAgreement) -> str | None:
        """Training never waits for a disk: without a free copy on every rank there is no save."""
        if not agreed.same and not agreed.idle:
            return "the state has another structure than before, and an earlier save is still being written"
        if not agreed.has_room:
            return "earlier saves are still being written, and there is no free copy"
        return None

    def _begin(self, step: int, parts: Sequence[Tensor], facts: dict[str, Any], trained: frozenset[str]) -> None:
        assert self._stager is not None
        assert self._queue is not None
        # The result of an earlier save says nothing about this one.
        self._newest, self.failure = step, None
        staged = self._stager.stage(parts, compare=not self._judge.is_off)
        job = Job(step, self._stager.plan, staged, facts, self._facts, trained)
        self._queue.submit(job)
        self._stager.stage_buckets(staged, parts)

    def _plan(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Agree on a plan and allocate memory for it; no save is under way. Returns this rank's parts."""
        staging = self._config.staging
        lay = budgeted(staging.files, staging.host_memory)
        by_node = self._config.files == BY_NODE
        plan = agree_on_plan(self._ranks, tensors, lay, int(staging.host_memory * GIB), by_node=by_node)
        structure = Structure(tensors)
        if self._stager is not None:
            self._stager.close()
            self._stager = None
        stager = result_or_failed(lambda: self._stager_for(plan, structure))
        told = self._ranks.all_gather(stager if isinstance(stager, Failed) else None)
        failed = [(f"rank {rank}: {result.reason}", result.lasting) for rank, result in enumerate(told) if result]
        if failed:
            raise (ValueError if any(lasting for _, lasting in failed) else OSError)(failed[0][0])
        assert isinstance(stager, Stager)
        self._stager = stager
        arena = self._open_writer().arena
        self._restorer.memory = Memory(arena, plan, stager.write_templates, plan.on_disk()) if plan.whole else None
        self._open_flusher()
        parts = stager.match(tensors)
        assert parts is not None, "a state does not match its own structure"
        return parts

    def _stager_for(self, plan: Plan, structure: Structure) -> Stager:
        writer = self._open_writer()
        arena = writer.arena
        arena.reload()
        if (arena.plan, arena.buffers) == (plan.hash, plan.buffers) and arena.buffer_bytes >= plan.buffer_bytes:
            arena.populate()  # an earlier generation's: what it holds may be worth loading
        else:
            arena.shape(plan.buffer_bytes, plan.buffers, plan.hash, _FACTS_ROOM)
        return Stager(arena, plan, structure, self._config.staging.mode)

    def _open_writer(self) -> Writer:
        if self._saver is None:
            self._link = self._link or WriterLink.start()
            emit = self._events.emit
            self._saver = Saver(self._first, self._save_ranks, self._owner, self._link, self._judge, emit)
            self._queue = SaveQueue(self._saver, self._save_ranks, emit, self._ended, self._pauses)
        return self._saver.writer

    def _open_flusher(self) -> None:
        """Begin to copy to further tiers, which may be behind from an earlier generation."""
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

    def _ended(self, job: Job, saved: Saved | SaveFailed) -> None:
        """On the save queue's thread, after every save."""
        if isinstance(saved, SaveFailed):
            if isinstance(saved, Unsavable):
                self.lasting = saved
            if job.step == self._newest:
                self.failure = saved.reason
            return
        self.committed_step = job.step
        self.save_seconds.append(saved.seconds)
        if self._looks_after_first_tier:  # the flusher deletes in the others
            if self._debris_thread is not None:
                self._debris_thread.join()  # one at a time
            held = self._flusher.held if self._flusher is not None else ()
            self._retention.apply(saved.name, self._restorer.distrusted.of(self._first.path), held)
        if self._flusher is not None:
            self._flusher.committed(saved.name)

    @property
    def _looks_after_first_tier(self) -> bool:
        return self._ranks.looks_after(shared=self._first.shared)

    def _start_debris_collection(self) -> None:
        """Collect what died half-written in the first tier, beside training.

        No save is under way at this moment, so what is unfinished now is nobody's; no later save takes its name.
        """
        if self._debris_thread is not None:
            self._debris_thread.join()
        there = result_or_failed(self._first.catalog.names)
        if there and not isinstance(there, Failed):
            collect = partial(self._retention.collect_debris, there)
            self._debris_thread = start_background_thread(collect, "checkpoint-tidying")

    def before_optimizer_step(self) -> None:
        """Return when the tensors of the last save may change; without lazy staging that is always so."""
        if self._stager is not None:
            self._stager.before_optimizer_step()

    def restore(
        self,
        tensors: Mapping[str, Tensor] | TensorsFor,
        *,
        optional_prefixes: tuple[str, ...] = ("rng/",),
        optional_folders: tuple[str, ...] = (),
        complete: tuple[str, ...] = (),
    ) -> Restored | None:
        """Fill `tensors` in place from the newest checkpoint that verifies; None when there is none at all.

        `tensors` may be a function, which is called on every rank with the `extra` of each checkpoint that is tried.
        Keys that begin with an optional prefix may be missing from the checkpoint; below a prefix of
        `optional_folders`, the keys of one folder (up to their last slash) may be missing together. Below a prefix of
        `complete` the checkpoint must hold nothing that no rank takes up. Raises
        NothingVerifies when there should be checkpoints and none can be loaded: starting from nothing is then
        somebody's decision, not ours.
        """
        self.wait()
        restored = self._restorer.run(
            Targets(tensors), OptionalKeys(alone=optional_prefixes, together=optional_folders, complete=complete)
        )
        if self._looks_after_first_tier:
            self._start_debris_collection()
        if restored is None:
            self.committed_step = self.agreed_committed_step = None
            return None
        committed = agree_on_committed_step(self._ranks, self._tiers.tiers, self._owner, restored)
        self.committed_step = self.agreed_committed_step = committed
        return restored

    def wait(self) -> None:
        """Return when no save is under way and every event has been written, or tried."""
        self.before_optimizer_step()
        if self._queue is not None:
            self._queue.wait()
        self._events.flush()

    def close(self, flush_for: Callable[[], float] | None = None) -> None:
        """Wait, then give memory, writer and process groups back; raises what kept an event from being written.

        With `flush_for`, which says how many seconds are left, the newest checkpoint is first brought to every tier.
        """
        self.wait()
        if self._queue is not None:
            self._queue.close()
        if self._debris_thread is not None:
            self._debris_thread.join(_DEBRIS_SECONDS)  # one that hangs is a daemon
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
    """A copy by way of JSON, so that later changes of the caller cannot reach it; raises TypeError or ValueError."""
    try:
        copy: dict[str, Any] = json.loads(canonical(value))
    except (TypeError, ValueError) as error:
        kind = TypeError if isinstance(error, TypeError) else ValueError  # classes below may take no message
        raise kind(f"`{what}` must be plain JSON: {error}") from error
    return copy
