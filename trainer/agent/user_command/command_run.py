"""The coordinator's knowledge of a user's program: failures in a row and checkpoints."""

import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

from checkpointing.storage.durable import dump_line, read_json, write_durably
from checkpointing.storage.storage_errors import write_probe
from trainer.agent.attempt_state.attempt_state import AttemptProgress
from trainer.agent.attempt_state.generation import Generation
from trainer.agent.fork_server.torchrun_command import working_directory
from trainer.agent.ladder.in_job_policy import Action, Decision
from trainer.agent.user_command.checkpoints import CommandCheckpoint, find_other_rank
from trainer.agent.user_command.earlier_checkpoints import Stamps, record_earlier
from trainer.agent.user_command.progress import CommandProgress, run_bounded
from trainer.agent.user_command.set_aside import (
    Pointer,
    find_target,
    move_siblings,
    pointers_to,
    put_back,
    retarget,
    set_aside,
)
from trainer.agent.user_command.step_pattern import StepWatch
from trainer.agent.watch.command_errors import START_SECONDS, CommandPast, NewestCheckpoint, same_without
from trainer.agent.watch.root_cause import CommandFailure
from trainer.contract.config import JobConfig
from trainer.contract.events import EventKind, EventLog
from trainer.contract.failures.outcome import FailureKind, legible
from trainer.contract.heartbeat import Heartbeat
from trainer.contract.run_dir import AttemptDir, RunDir
from trainer.contract.secrets.secret_redaction import in_use


@dataclass(frozen=True, kw_only=True)
class SetAsideCheckpoint:
    """A checkpoint that was set aside, and why it cannot be whole (empty: no sign of it)."""

    step: int
    identity: str
    original: str  # path
    path: str
    bytes: int
    damage: str = ""
    pointers: tuple[Pointer, ...] = ()  # files that named it
    siblings: tuple[str, ...] = ()  # names of the other entries of its folder that belong to it

    @property
    def name(self) -> str:
        return Path(self.original).name

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "SetAsideCheckpoint":
        pointers = tuple(Pointer(**each) for each in fields.get("pointers", ()))
        return cls(**{**fields, "pointers": pointers, "siblings": tuple(fields.get("siblings", ()))})


@dataclass(kw_only=True)
class CommandMemory:
    """Goes on over attempts until the program trains."""

    failures: list[CommandFailure] = field(default_factory=list)  # in a row, oldest first
    aside: list[SetAsideCheckpoint] = field(default_factory=list)
    earlier: Stamps | None = None  # what was there before the run's first start; None: not looked at
    saved: bool = False  # a whole checkpoint was there at some time; never forgotten

    def encoded(self) -> bytes:
        """As it stands in its file; names that are no UTF-8 read back as they were."""
        line = in_use().record(dump_line({"schema": "orch.command/1", **asdict(self)}))
        return line.encode(errors="backslashreplace")

    @classmethod
    def before(cls, run: RunDir, attempt: int) -> "CommandMemory":
        """What the newest earlier attempt that left anything left; nothing where it cannot be read. Raises OSError."""
        for earlier in reversed(run.all_attempts()):
            if earlier.number < attempt and (found := _read(earlier.command_memory)) is not None:
                return found
        return CommandMemory()


class MemoryFile:
    """Holds what was kept last, however late a slow file system lets an earlier write end."""

    def __init__(self, path: Path) -> None:
        self._path, self._newest, self._lock = path, b"", Lock()

    def keep(self, memory: CommandMemory) -> Callable[[], bool]:
        """What to do apart for it to be on the disk, which True says; it raises OSError."""
        self._newest = memory.encoded()

        def write() -> bool:
            with self._lock:
                write_durably(self._path, self._newest)
            return True

        return write


def _read(path: Path) -> CommandMemory | None:
    """None where there is no file; without those that are still, or again, in their places."""
    try:
        fields = read_json(path)
        failures = [CommandFailure(**each) for each in fields["failures"]]
        aside = [SetAsideCheckpoint.from_json(each) for each in fields["aside"]]
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError):
        return CommandMemory(saved=True, earlier={})
    # An older version has not written down whether there was one.
    saved = bool(fields.get("saved", True))
    aside = [one for one in aside if not _is_back(one)]
    return CommandMemory(failures=failures, aside=aside, saved=saved, earlier=_read_stamps(fields))


def _read_stamps(fields: dict[str, Any]) -> Stamps:
    stamps = fields.get("earlier")  # an older version has not written it down
    return {str(name): int(at) for name, at in stamps.items()} if isinstance(stamps, dict) else {}


def _is_back(one: SetAsideCheckpoint) -> bool:
    """It is written down before it is renamed, and put back before that is."""
    return os.path.lexists(one.original) and not os.path.lexists(one.path)


class CommandRun:
    """Kept from one generation to the next; does nothing for a workload of orch."""

    def __init__(
        self, run: RunDir, attempt: AttemptDir, config: JobConfig, events: EventLog, progress: AttemptProgress
    ) -> None:
        self._run, self._attempt, self._config, self._events = run, attempt, config, events
        self._on, self._trained = bool(config.command), False
        own = config.checkpoints
        self._command_progress = (
            CommandProgress(
                self._folder,
                own,
                events,
                progress,
                counts_steps=not config.progress.pattern,
            )
            if own.path
            else None
        )
        said = config.progress
        self._step_watch = (
            StepWatch(said, attempt.rank_log(0), lambda: working_directory(run, config), progress)
            if self._on and said.pattern
            else None
        )
        self._memory, self._file = CommandMemory(), MemoryFile(attempt.command_memory)
        self._recalled = self._progress_kept = False
        self._unmovable = ""  # why no checkpoint may be moved away
        self._unmatched = ""  # names in the folder of checkpoints, none of which the pattern matches
        self._disk: str | None = None  # why nothing can be written; None: not looked at in this generation

    def _folder(self) -> Path:
        return working_directory(self._run, self._config) / self._config.checkpoints.path

    def past(self) -> CommandPast | None:
        """What `in_job_policy.Situation` needs; None for a workload of orch."""
        if not self._on:
            return None
        newest = self._command_progress.began_from if self._command_progress else None
        torn = self._command_progress.torn if self._command_progress else None
        aside, older = self._memory.aside, self._command_progress.older() if self._command_progress else None
        return CommandPast(
            failures=tuple(self._memory.failures), newest=_describe(newest), saved=self._saved(), trained=self._trained,
            saved_after=self._command_progress.saved_after if self._command_progress else 0.0,
            older=older.path.name if older else "", torn=_describe(torn),
            cleared=newest is not None and any(one.step < newest.step for one in aside),
            first=not self._memory.saved and self._command_progress is not None and self._command_progress.is_alone(),
            aside=tuple(one.name for one in sorted(aside, key=lambda one: -one.step)),
            doubtful=any(not one.damage for one in aside),
            unmovable=self._unmovable, unmatched=self._unmatched, disk=self._disk or "",
        )  # fmt: skip

    async def start_generation(self, generation: int) -> None:
        """No rank runs: what is there now is what the program starts from."""
        self._progress_kept, self._disk = False, None
        if self._on and not self._recalled:
            self._trained = self._trained or bool(await run_bounded(self._earlier_trained))
            await self._recall()
        if self._step_watch is not None:
            self._step_watch.start_generation(generation)
        if self._on and self._command_progress is not None:
            await self._command_progress.start_generation()
            self._unmovable = await self._why_unmovable(self._command_progress)
            if self._command_progress.began_from is None:
                self._unmatched = await run_bounded(partial(_first_names, self._folder())) or ""
            self._memory.saved = self._memory.saved or self._has_whole()

    async def _why_unmovable(self, progress: CommandProgress) -> str:
        """Return why it is not known what the program would load without its newest checkpoint; empty if it is."""
        if other := await run_bounded(partial(find_other_rank, self._folder())):
            return f"because checkpoints.path names the folder of one rank: {other} is another"
        if later := progress.written_later():
            return f"because steps begin anew: {later} was written after it"
        return ""

    async def check(self, now: Generation) -> None:
        """While the program runs: now and then, and at once when a rank has failed."""
        if self._on and now.first_failure is not None and self._disk is None:
            if self._step_watch is not None:  # the last look was seconds ago
                await self._step_watch.check_settled()
            self._disk = await run_bounded(partial(write_probe, self._run.path)) or ""
        if self._step_watch is not None:
            self._step_watch.check()
        if self._on and self._command_progress is not None:
            await self._command_progress.check(now.first_failure)
        if self._on and not self._progress_kept and self._worked(now):
            # Whatever ends this attempt, the next one need not know of failures before it.
            self._progress_kept = True
            saved = self._memory.saved or self._has_whole()
            await self._keep(CommandMemory(saved=saved, earlier=self._memory.earlier))

    async def end_generation(self, decision: Decision, now: Generation, *, cleared: bool) -> None:
        """A generation is over; `cleared`: nothing of it is left that could write."""
        if not self._on:
            return
        if self._step_watch is not None:
            await self._step_watch.check_settled()
        if self._command_progress is not None and cleared:
            await self._command_progress.check_settled()
        self._remember(decision, now)
        self._memory.saved = self._memory.saved or self._has_whole()
        if decision.set_aside and cleared:
            await self._set_aside(decision.set_aside, now.number)
        # Somebody has to look at it: what was tried in vain is undone, and the next attempt starts without it.
        failure = decision.failure if decision.action is Action.END else None
        if failure is not None and failure.kind in (FailureKind.USER_ERROR, FailureKind.STORAGE):
            if self._is_in_vain():
                await self._put_back()
            self._memory.failures.clear()
        # However the attempt ends, and if its coordinator dies at once.
        await self._keep(self._memory)

    async def _recall(self) -> None:
        """What earlier attempts left; asked for again in the next generation where the file system is late."""
        if self._command_progress is not None:
            self._command_progress.step_before = await run_bounded(self._earlier_step) or 0
        found = await run_bounded(partial(CommandMemory.before, self._run, self._attempt.number))
        if found is not None:
            self._memory.failures[:0], self._memory.aside[:0] = found.failures, found.aside
            self._memory.saved = self._memory.saved or found.saved
            self._recalled = True
            await self._note_earlier(found.earlier)
            for one in found.aside:  # a coordinator may have died before it had done so
                await run_bounded(partial(move_siblings, Path(one.original), Path(one.path), one.siblings))
                await self._retarget(one)

    async def _note_earlier(self, recalled: Stamps | None) -> None:
        """Tell the run's own checkpoints from those that were there before its first start."""
        if self._command_progress is None:
            return
        if recalled is None:  # this is the first start
            look = partial(record_earlier, self._folder(), self._config.checkpoints)
            recalled = await run_bounded(look) or {}
        self._memory.earlier = self._command_progress.earlier = recalled
        if recalled:
            await self._keep(self._memory)

    async def _keep(self, memory: CommandMemory) -> bool:
        """Whether it is on the disk; nothing is written over what earlier attempts left before that was read."""
        return self._recalled and bool(await run_bounded(self._file.keep(memory)))

    def _worked(self, now: Generation) -> bool:
        return self._saved() or (now.first_failure or time.monotonic()) - now.started > START_SECONDS

    def _remember(self, decision: Decision, now: Generation) -> None:
        worked = self._worked(now)
        self._trained = self._trained or worked
        if worked:  # what was set aside before that is past
            self._memory.aside.clear()
        if decision.own is not None:
            saved, trained = self._saved(), decision.own.trained or worked
            self._memory.failures.append(replace(decision.own, saved=saved, trained=trained))
        elif worked or decision.action is Action.REPLACE:
            self._memory.failures.clear()

    def _is_in_vain(self) -> bool:
        """Whether what was set aside made no difference to the newest failure."""
        row, past = self._memory.failures, self.past()
        only = past is not None and past.cleared and len({one.mark for one in row}) == 1
        return only or same_without(row)

    def _saved(self) -> bool:
        return self._command_progress is not None and self._command_progress.saved()

    def _has_whole(self) -> bool:
        return self._command_progress is not None and self._command_progress.has_whole()

    def _earlier_step(self) -> int:
        """Return the highest step in the last heartbeats of the attempts before this one; 0 where none is known."""
        highest = 0
        for one in self._run.all_attempts():
            if one.number < self._attempt.number:
                with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
                    highest = max(highest, Heartbeat.read(one.heartbeat).step or 0)
        return highest

    def _earlier_trained(self) -> bool:
        """Whether an attempt before this one ran for longer than a start takes."""
        earlier = [one for one in self._run.all_attempts() if one.number < self._attempt.number]
        return any(_lasted(one) > START_SECONDS for one in earlier)

    async def _set_aside(self, reason: str, generation: int) -> None:
        assert self._command_progress is not None
        newest, older = self._command_progress.began_from, self._command_progress.older()
        if (torn := self._command_progress.torn) is not None:
            newest, older = torn, self._command_progress.older(torn) or newest
        assert newest is not None
        target = await run_bounded(partial(find_target, newest, self._run, self._attempt.number, generation))
        pointers = await run_bounded(partial(pointers_to, newest, older))
        if target is None or pointers is None:
            sys.stderr.write(f"orch-agent: {newest.path} cannot be moved out of its folder: it stays\n")
            return
        aside = SetAsideCheckpoint(
            step=newest.step, identity=newest.identity, original=str(newest.path), path=str(target), bytes=newest.bytes,
            damage=newest.damage, pointers=tuple(pointers), siblings=newest.siblings,
        )  # fmt: skip
        # Recorded first: whenever this coordinator dies, the next one knows what to put back.
        self._memory.aside.append(aside)
        kept, config = await self._keep(self._memory), self._config.checkpoints
        moved = await run_bounded(lambda: set_aside(newest, target, config)) if kept else False
        if not moved:  # it was written to since, or cannot be moved: the program gets it again
            if moved is False:  # else it is late, and may be moved yet
                self._memory.aside.remove(aside)
            return
        self._command_progress.forget(newest)
        done = await self._retarget(aside)
        self._events.write(
            EventKind.CHECKPOINT_SET_ASIDE, step=newest.step, name=newest.identity, path=str(target),
            reason="; ".join((reason, *(pointer.words for pointer in done))), damaged=bool(newest.damage),
            bytes=newest.bytes,
        )  # fmt: skip

    async def _retarget(self, one: SetAsideCheckpoint, *, back: bool = False) -> list[Pointer]:
        """Repair, or restore, what names this checkpoint as the newest; returns what was changed."""
        scratch = Path(one.path)
        return [
            pointer for pointer in one.pointers if await run_bounded(partial(retarget, pointer, scratch, back=back))
        ]

    async def _put_back(self) -> None:
        """An older one made no difference: none of them was the cause."""
        for one in list(self._memory.aside):
            done = await run_bounded(partial(put_back, Path(one.path), Path(one.original), one.siblings))
            if done is not None:  # else it is tried again at the next such end
                self._memory.aside.remove(one)
            if done:
                await self._retarget(one, back=True)
                self._events.write(
                    EventKind.CHECKPOINT_SEEN, step=one.step, name=f"{one.identity}.{Path(one.path).name}.back",
                    path=one.original, bytes=one.bytes, new=False, was=one.identity, damage=one.damage,
                )  # fmt: skip


def _describe(one: CommandCheckpoint | None) -> NewestCheckpoint | None:
    if one is None:
        return None
    return NewestCheckpoint(identity=one.identity, name=one.path.name, damage=one.damage, lacking=one.lacking)


def _first_names(folder: Path) -> str:
    """Return the first names in a folder; raises OSError."""
    names = sorted(name for name in os.listdir(folder) if not name.startswith("."))
    return legible(", ".join(names[:2]) + (", ..." if len(names) > 2 else ""))


def _lasted(attempt: AttemptDir) -> float:
    """Seconds from the coordinator's beginning to its last heartbeat; 0 where that is not known."""
    try:
        return attempt.heartbeat.stat().st_mtime - attempt.coordinator.stat().st_mtime
    except OSError:
        return 0.0
