"""The coordinator's view of a user's program: consecutive failures and checkpoints."""

import math
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from checkpointing.storage.durable import write_durably
from checkpointing.storage.storage_errors import write_probe
from trainer.agent.attempt_state.attempt_state import GenerationState
from trainer.agent.attempt_state.published_files import AttemptProgress
from trainer.agent.fork_server.launch_order import working_directory
from trainer.agent.ladder.command_failures import (
    START_SECONDS,
    CommandPast,
    MovedCheckpoint,
    NewestCheckpoint,
    same_without,
)
from trainer.agent.processes.background_tasks import RepeatedRead
from trainer.agent.user_command.checkpoints import (
    CommandCheckpoint,
    Stamps,
    find_other_rank,
    record_earlier,
    scan_identities,
)
from trainer.agent.user_command.command_memory import CommandMemory, SetAsideCheckpoint
from trainer.agent.user_command.engine_saves import EngineSaves
from trainer.agent.user_command.program_saves import ProgramSave, are_mixed, choose_adapter, locate, read_saves
from trainer.agent.user_command.progress import LOOK_SECONDS, WAIT_SECONDS, CommandProgress, StepWatch, run_bounded
from trainer.agent.user_command.restored_states import RestoreWatch
from trainer.agent.user_command.sealing import CheckpointSeals, Reading, Verdict, Verification, Wait
from trainer.agent.user_command.set_aside import (
    Pointer,
    find_target,
    move_siblings,
    pointers_to,
    put_back,
    retarget,
    set_aside,
    stale_pointers,
)
from trainer.agent.user_command.unsaved_work import UnsavedWork
from trainer.protocol.checkpoint_seal import CheckpointSeal
from trainer.protocol.command_progress import AUTO
from trainer.protocol.config import JobConfig
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.decision import Action, Decision
from trainer.protocol.failures.outcome import FailureKind, legible
from trainer.protocol.heartbeat import Heartbeat
from trainer.protocol.run_dir import AttemptDir, RunDir


class CommandRun:
    """View of a user's program that is kept between generations; inactive for orch's own workloads."""

    def __init__(
        self, run: RunDir, attempt: AttemptDir, config: JobConfig, events: EventLog, progress: AttemptProgress
    ) -> None:
        self._run, self._attempt, self._config, self._events = run, attempt, config, events
        self._on, self._trained = bool(config.command), False
        self._checkpoints = CommandProgress(
            self._folder, config.checkpoints, events, progress, counts_steps=not config.progress.pattern
        )
        self._steps = StepWatch(config.progress, attempt.rank_log(0), lambda: working_directory(run, config), progress)
        adapter = config.checkpoints.adapter
        self._fixed_adapter = self._checkpoints.adapter = "" if adapter == AUTO else adapter
        self._engine = EngineSaves(run.checkpoints)
        self._unsaved = UnsavedWork(attempt, config, events, progress)
        self._seals = CheckpointSeals(run.seals, self._report_seal)
        self.restores = RestoreWatch(run, attempt, config, events)
        self.resume = ""
        """Path of the newest complete checkpoint, from which the next generation should resume; "": unknown."""
        self.resumes_earlier = False
        """Whether that checkpoint existed before the run's first start."""
        self.unusable = ""
        """Why the program must not start: its newest checkpoint is damaged and cannot be replaced."""
        self._saves = RepeatedRead(lambda: read_saves([attempt]), attempt.outcomes)
        self._began = time.time_ns()
        self._program_until = 0  # the last time (ns) at which the program may have run before this generation
        self._memory = CommandMemory()
        self._newest_memory, self._writing = b"", Lock()
        self._recalled = self._progress_kept = False
        self._unmovable = ""  # reason why no checkpoint may be moved away
        self._unmatched = ""  # names in the checkpoint folder if the pattern matches none of them
        self._disk: str | None = None  # why nothing can be written; None: not checked yet in this generation

    def _folder(self) -> Path:
        return working_directory(self._run, self._config) / self._checkpoints.config.path

    def past(self) -> CommandPast | None:
        """Return the input of `in_job_policy.Situation`, or None for orch's own workloads."""
        if not self._on:
            return None
        # A proven fault is certain, so it does not count among the attempts to find the cause of a failure.
        found, aside = self._checkpoints, [one for one in self._memory.aside if not one.proven]
        newest, older = found.began_from, found.older()
        return CommandPast(
            failures=tuple(self._memory.failures), newest=_describe(newest), saved=self._has_saved(),
            trained=self._trained, saved_after=found.saved_after,
            older=older.path.name if older else "", torn=_describe(found.torn),
            cleared=newest is not None and any(one.step < newest.step for one in aside),
            first=not self._memory.saved and found.is_alone(),
            aside=tuple(one.name for one in sorted(aside, key=lambda one: -one.step)),
            doubtful=any(not one.damage for one in aside), moved=tuple(map(_describe_moved, self._memory.aside)),
            unmovable=self._unmovable, unmatched=self._unmatched, disk=self._disk or "",
        )  # fmt: skip

    async def start_generation(self, generation: int, wait: Wait | None = None) -> None:
        """Record the checkpoints that the program starts from, after refusing damaged ones.
        To be called while no rank is running. `wait` waits for a read while the coordinator does other work.
        """
        if not self._on:
            return
        self._progress_kept, self._disk = False, None
        if not self._recalled:
            # Known before it is recalled which checkpoints existed before the run.
            self._learn(await run_bounded(partial(read_saves, self._run.all_attempts())) or [])
            self._trained = self._trained or bool(await run_bounded(self._earlier_trained))
            self._program_until = max(self._program_until, await run_bounded(self._earlier_until) or 0)
            await self._recall()
        self._steps.start_generation(generation)
        await self._checkpoints.start_generation()
        await self._engine.start_generation()
        if self._checkpoints.config.path:
            mixed = await run_bounded(partial(are_mixed, self._run.all_attempts()))
            self._memory.mixed = self._memory.mixed or bool(mixed)
            self._unmovable = await self._why_unmovable()
            await self._drop_unusable(generation)
            await self._choose(generation, wait or _join)
            if self._checkpoints.began_from is None:
                self._unmatched = await run_bounded(partial(_first_names, self._folder())) or ""
        self._memory.saved = self._memory.saved or self._checkpoints.has_whole()
        await self.restores.start_generation(generation, self.resume)

    async def _drop_unusable(self, generation: int) -> None:
        """Move away checkpoints that the program has saved since its loss was last finite, if an older one remains.
        If its loss was never finite (0), the one that it started from may be the cause.
        """
        until, self._memory.finite_until = self._memory.finite_until, None
        while until is not None and not self._unmovable and (newest := self._checkpoints.began_from) is not None:
            older = self._checkpoints.older()
            written = max((time for _, time in newest.files.values()), default=0) * 1e-9
            if older is None or newest.earlier or written <= until:
                return
            damage = "was saved after the last finite loss, so its weights may be unusable"
            if not await self._move(replace(newest, damage=damage, lacking=False), older, f"it {damage}", generation):
                return
            self._checkpoints.begin_from_newest()
            until = until or math.inf

    async def _choose(self, generation: int, wait: Wait) -> None:
        """Choose the newest complete checkpoint, and move newer damaged ones away."""
        self.resume, self.unusable, self.resumes_earlier = "", "", False
        while (newest := self._checkpoints.began_from) is not None:
            older = self._checkpoints.older()
            found = await self._examine(newest, older, wait)
            if found.verdict is not Verdict.DAMAGED:
                usable = newest if not newest.damage else older
                # Which of the program's models it belongs to is unknown if their checkpoints are mixed.
                if usable is not None and not self._memory.mixed:
                    self.resume, self.resumes_earlier = str(usable.path), usable.earlier
                if usable is newest:
                    await self._repair_pointers(newest, generation)
                return
            damaged, replaceable = (
                replace(newest, damage=found.reason, lacking=False),
                self._is_replaceable(newest, older),
            )
            why = self._unmovable or ("" if replaceable else "because orch finds no complete older one")
            if why or not await self._move(damaged, older, f"it {found.reason}", generation, proven=found.proven):
                self.unusable = f"{newest.path} {found.reason}. It is not moved away{', ' if why else ''}{why}"
                return
            self._checkpoints.begin_from_newest()

    async def _repair_pointers(self, newest: CommandCheckpoint, generation: int) -> None:
        """Make files that name a checkpoint that does not exist name the newest one."""
        stale = await run_bounded(partial(stale_pointers, newest, self._checkpoints.config)) or []
        if not stale:
            return
        scratch = await run_bounded(partial(find_target, newest, self._run, self._attempt.number, generation))
        for pointer in stale if scratch is not None else ():
            assert scratch is not None
            if await run_bounded(partial(retarget, pointer, scratch)):
                reason = f"{pointer.path} named {pointer.before.strip()}, which does not exist: {pointer.words}"
                self._events.write(EventKind.DECISION, action="repair", reason=reason)

    async def _examine(self, one: CommandCheckpoint, older: CommandCheckpoint | None, wait: Wait) -> Verification:
        """Compare a checkpoint with its seal. Without a seal, it is damaged if the framework's rules show it, or if a
        file is torn and an older checkpoint is sealed.
        """
        found = await self._seals.verify(one, wait, self._program_until)
        if found.verdict is Verdict.VERIFIED and found.bytes:
            self._events.write(
                EventKind.CHECKPOINT_VERIFIED, step=one.step, name=one.identity, path=str(one.path), bytes=found.bytes,
                seconds=round(found.seconds, 3),
            )  # fmt: skip
        is_torn = bool(one.damage) and not one.lacking
        if found.verdict is not Verdict.UNSEALED or not is_torn or not self._is_replaceable(one, older):
            return found
        proven = one.proven or (older and await run_bounded(partial(self._seals.is_sealed, older)))
        return Verification(verdict=Verdict.DAMAGED, reason=one.damage, proven=one.proven) if proven else found

    def _is_replaceable(self, one: CommandCheckpoint, older: CommandCheckpoint | None) -> bool:
        """Return whether the program can start without this checkpoint: from an older one, or as at its first start."""
        return older is not None or (one.proven and not self._memory.saved and self._checkpoints.is_alone())

    def _report_seal(self, one: CommandCheckpoint, seal: CheckpointSeal, seconds: float) -> None:
        self._events.write(
            EventKind.CHECKPOINT_SEALED, step=one.step, name=one.identity, path=str(one.path), bytes=seal.bytes,
            files=len(seal.files), seconds=round(seconds, 3),
        )  # fmt: skip

    async def _why_unmovable(self) -> str:
        """Return why it is unclear what the program would load without its newest checkpoint, or "" if it is clear."""
        if other := await run_bounded(partial(find_other_rank, self._folder())):
            return f"because checkpoints.path is the folder of one rank: {other} is another"
        if later := self._checkpoints.written_later():
            return f"because steps start again: {later} was written after it"
        return ""

    async def check(self, now: GenerationState) -> None:
        """Check the running program: periodically, and immediately after a rank has failed."""
        if not self._on:
            return
        if now.first_failure is not None and self._disk is None:
            await self._steps.check_settled()  # the last check may have been seconds ago
            self._disk = await run_bounded(partial(write_probe, self._run.path)) or ""
        self._steps.check()
        self.restores.check()
        await self._learn_place()
        await self._checkpoints.check(now.first_failure)
        await self._engine.check(now.first_failure)
        if now.first_failure is None:
            await self._warn_unsaved(now)
        self._seals.poll(self._checkpoints.complete())
        if not self._progress_kept and self._has_worked(now):
            # However this attempt ends, the next one does not need the earlier failures.
            self._progress_kept = True
            saved = self._memory.saved or self._checkpoints.has_whole()
            await self._keep(replace(self._memory, failures=[], aside=[], saved=saved))

    async def _warn_unsaved(self, now: GenerationState) -> None:
        """Warn once about a program without a checkpoint. One that has restored a step has saved, if not visibly."""
        found = self._checkpoints
        known = self._memory.saved or found.exists() or self._engine.newest > 0 or now.restored > 0
        folder = str(self._folder()) if found.config.path else ""
        self._memory.warned = await self._unsaved.check(now.started, folder, saved=known, warned=self._memory.warned)

    def _has_saved(self) -> bool:
        """Return whether the program has saved in this generation, in its folder or with `orch.checkpointer`."""
        return self._checkpoints.has_saved() or self._engine.has_saved()

    def _learn(self, saves: Sequence[ProgramSave]) -> None:
        """Learn from reported saves which framework saves, and where if the configuration has no folder."""
        found, fixed = self._checkpoints, self._fixed_adapter
        found.adapter = fixed or choose_adapter(saves) or found.adapter
        if not found.config.path and (place := locate(saves, fixed)) is not None:
            found.config = place.config

    async def _learn_place(self) -> None:
        found = self._checkpoints
        if found.adapter and found.config.path or (read := self._saves.poll(LOOK_SECONDS)) is None:
            return
        if read.exception() is None:
            unknown = not found.config.path
            self._learn(read.result())
            if unknown and found.config.path:
                await self._note_earlier(self._memory.earlier)

    def _first_start(self) -> int:
        """Return when the run's first attempt started (ns)."""
        started = [self._began]
        for one in self._attempt.earlier_attempts():
            with suppress(OSError):
                started.append(one.coordinator.stat().st_mtime_ns)
        return min(started)

    async def end_generation(self, decision: Decision, now: GenerationState, *, cleared: bool) -> None:
        """Record the end of a generation. `cleared` means that none of its processes is left that could write."""
        if not self._on:
            return
        self._program_until = time.time_ns()
        await self._steps.check_settled()
        if cleared:
            await self._checkpoints.check_settled()
            await self._engine.check_settled()
        self._remember(decision, now)
        if now.finite_until is not None:
            self._memory.finite_until = now.finite_until
        self._memory.saved = self._memory.saved or self._checkpoints.has_whole()
        if decision.set_aside and cleared:
            await self._set_aside(decision.set_aside, now.number)
        if cleared:
            await self._seal_last(decision)
        # An operator must act, so undo moves that did not help; the next attempt starts without them.
        failure = decision.failure if decision.action is Action.END else None
        if failure is not None and failure.kind in (FailureKind.USER_ERROR, FailureKind.STORAGE):
            if self._is_in_vain():
                await self._put_back()
            self._memory.failures.clear()
        # Kept however the attempt ends, even if its coordinator dies now.
        if await self._keep(self._memory):
            self._program_until = await run_bounded(self._read_clock) or self._program_until

    async def _seal_last(self, decision: Decision) -> None:
        """Seal the newest checkpoint if an attempt ends here, within the time that a decision may take."""
        self._seals.poll(self._checkpoints.complete())
        if decision.action in (Action.END, Action.STOP, Action.FINISH):
            await run_bounded(partial(self._seals.join, WAIT_SECONDS))
            self._seals.poll(self._checkpoints.complete()[:1])  # the running seal may have been an older one's
            await run_bounded(partial(self._seals.join, WAIT_SECONDS))
            self._seals.poll([])

    async def _recall(self) -> None:
        """Load the state of earlier attempts. If the file system is too slow, the next generation tries again."""
        self._checkpoints.step_before = await run_bounded(self._earlier_step) or 0
        found = await run_bounded(partial(CommandMemory.before, self._attempt))
        if found is not None:
            self._memory.failures[:0], self._memory.aside[:0] = found.failures, found.aside
            self._memory.saved, self._memory.warned = self._memory.saved or found.saved, found.warned
            self._memory.mixed = self._memory.mixed or found.mixed
            self._memory.finite_until = found.finite_until
            self._recalled = True
            await self._note_earlier(found.earlier)
            for one in found.aside:  # the earlier coordinator may have died before finishing this
                await run_bounded(partial(move_siblings, Path(one.original), Path(one.path), one.siblings))
                await self._retarget(one)

    async def _note_earlier(self, recalled: Stamps | None) -> None:
        """Distinguish the run's own checkpoints from those that existed before its first start."""
        if not self._checkpoints.config.path:
            return
        if recalled is None:  # this is the first start
            look = partial(record_earlier, self._folder(), self._checkpoints.config)
            recalled = await run_bounded(look) or {}
            if not self._config.checkpoints.path or self._attempt.earlier_attempts():  # the folder became known later
                recalled = {name: changed for name, changed in recalled.items() if changed < self._first_start()}
        self._memory.earlier = self._checkpoints.earlier = recalled
        if recalled:
            await self._keep(self._memory)

    async def _keep(self, memory: CommandMemory) -> bool:
        """Write the state and return whether that worked. Earlier attempts' state is never overwritten before it is
        read. The last state is what remains in the file, even if an earlier write is late on a slow file system.
        """
        if not self._recalled:
            return False
        self._newest_memory = memory.encode()

        def write() -> bool:
            with self._writing:
                write_durably(self._attempt.command_memory, self._newest_memory)
            return True

        return bool(await run_bounded(write))

    def _has_worked(self, now: GenerationState) -> bool:
        return self._has_saved() or (now.first_failure or time.monotonic()) - now.started > START_SECONDS

    def _remember(self, decision: Decision, now: GenerationState) -> None:
        worked = self._has_worked(now)
        self._trained = self._trained or worked
        if worked:  # checkpoints set aside earlier no longer matter
            self._memory.aside.clear()
        if decision.own is not None:
            saved, trained = self._has_saved(), decision.own.trained or worked
            self._memory.failures.append(replace(decision.own, saved=saved, trained=trained))
        elif worked or decision.action is Action.REPLACE:
            self._memory.failures.clear()

    def _is_in_vain(self) -> bool:
        """Return whether setting checkpoints aside made no difference: the newest failure is the same."""
        row, past = self._memory.failures, self.past()
        only = past is not None and past.cleared and len({one.mark for one in row}) == 1
        return only or same_without(row)

    def _earlier_step(self) -> int:
        """Return the highest step in the last heartbeats of earlier attempts, or 0 if unknown."""
        highest = 0
        for one in self._attempt.earlier_attempts():
            with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
                highest = max(highest, Heartbeat.read(one.heartbeat).step or 0)
        return highest

    def _read_clock(self) -> int:
        """Return when the state was written (ns), in the clock of the file server. This node's may differ."""
        return self._attempt.command_memory.stat().st_mtime_ns

    def _earlier_until(self) -> int:
        """Return when the coordinators of earlier attempts last reported (ns), or 0 if unknown."""
        found = [0]
        for one in self._attempt.earlier_attempts():
            with suppress(OSError):
                found.append(one.heartbeat.stat().st_mtime_ns)
        return max(found)

    def _earlier_trained(self) -> bool:
        """Return whether an earlier attempt ran for longer than startup takes."""
        return any(_attempt_seconds(one) > START_SECONDS for one in self._attempt.earlier_attempts())

    async def _set_aside(self, reason: str, generation: int) -> None:
        newest, older = self._checkpoints.began_from, self._checkpoints.older()
        if (torn := self._checkpoints.torn) is not None:
            newest, older = torn, self._checkpoints.older(torn) or newest
        assert newest is not None
        await self._move(newest, older, reason, generation)

    async def _move(
        self, newest: CommandCheckpoint, older: CommandCheckpoint | None, reason: str, generation: int, *,
        proven: bool = False,
    ) -> bool:  # fmt: skip
        """Move a checkpoint out of the folder that the program scans, and return whether it was moved."""
        target = await run_bounded(partial(find_target, newest, self._run, self._attempt.number, generation))
        pointers = await run_bounded(partial(pointers_to, newest, older))
        if target is None or pointers is None:
            sys.stderr.write(f"orch-agent: {newest.path} cannot be moved out of its folder and stays there\n")
            return False
        aside = SetAsideCheckpoint(
            step=newest.step, identity=newest.identity, original=str(newest.path), path=str(target), bytes=newest.bytes,
            damage=newest.damage, pointers=tuple(pointers), siblings=newest.siblings,
            proven=proven,
        )  # fmt: skip
        # Recorded first: if this coordinator dies, the next one knows what to put back.
        self._memory.aside.append(aside)
        kept, config = await self._keep(self._memory), self._checkpoints.config
        moved = await run_bounded(lambda: set_aside(newest, target, config)) if kept else False
        if not moved:  # it has changed or cannot be moved, so the program will load it again
            if moved is False:  # otherwise the move is late and may still happen
                self._memory.aside.remove(aside)
            return False
        self._checkpoints.forget(newest)
        done = await self._retarget(aside)
        self._events.write(
            EventKind.CHECKPOINT_SET_ASIDE, step=newest.step, name=newest.identity, path=str(target),
            reason="; ".join((reason, *(pointer.words for pointer in done))), bytes=newest.bytes,
            damaged=bool(newest.damage) and not newest.lacking,
        )  # fmt: skip
        return True

    async def _retarget(self, one: SetAsideCheckpoint, *, back: bool = False) -> list[Pointer]:
        """Repair (or restore) the pointers that name this checkpoint as the newest, and return those that changed."""
        scratch = Path(one.path)
        return [
            pointer for pointer in one.pointers if await run_bounded(partial(retarget, pointer, scratch, back=back))
        ]

    async def _put_back(self) -> None:
        """Put back the checkpoints set aside. An older one made no difference, so none of these was the cause."""
        for one in [one for one in self._memory.aside if not one.proven]:
            done = await run_bounded(partial(put_back, Path(one.path), Path(one.original), one.siblings))
            if done is not None:  # otherwise retried at the next such end
                self._memory.aside.remove(one)
            if done:
                await self._retarget(one, back=True)
                self._events.write(
                    EventKind.CHECKPOINT_SEEN, step=one.step, name=f"{one.identity}.{Path(one.path).name}.back",
                    path=one.original, bytes=one.bytes, new=False, was=one.identity, damage=one.damage,
                )  # fmt: skip


async def _join(reading: Reading[Any]) -> None:
    await run_bounded(partial(reading.join, WAIT_SECONDS))


def _describe(one: CommandCheckpoint | None) -> NewestCheckpoint | None:
    if one is None:
        return None
    return NewestCheckpoint(identity=one.identity, name=one.path.name, damage=one.damage, lacking=one.lacking)


def _describe_moved(one: SetAsideCheckpoint) -> MovedCheckpoint:
    return MovedCheckpoint(names=(one.name, *one.siblings), path=one.path, damage=one.damage)


def _first_names(folder: Path) -> str:
    """Return the first names in a folder, or "" if it is missing. Raises OSError."""
    names = sorted(name for name in scan_identities(folder) if not name.startswith("."))
    return legible(", ".join(names[:2]) + (", ..." if len(names) > 2 else ""))


def _attempt_seconds(attempt: AttemptDir) -> float:
    """Return the seconds from the coordinator's start to its last heartbeat, or 0 if unknown."""
    try:
        return attempt.heartbeat.stat().st_mtime - attempt.coordinator.stat().st_mtime
    except OSError:
        return 0.0
