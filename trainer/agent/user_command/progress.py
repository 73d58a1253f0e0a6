"""Progress of a user's own program from its checkpoints: events, the heartbeat and saved steps."""

import asyncio
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from trainer.agent.adapters import registry
from trainer.agent.attempt_state.published_files import AttemptProgress
from trainer.agent.processes.background_tasks import RepeatedRead, run_detached
from trainer.agent.user_command import match_step
from trainer.agent.user_command.checkpoints import (
    CommandCheckpoint,
    Files,
    Stamps,
    assess_damage,
    find,
    find_written_later,
)
from trainer.agent.user_command.program_saves import PLAIN
from trainer.protocol.command_progress import CommandCheckpointsConfig, CommandProgressConfig
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.failures.outcome import legible
from trainer.protocol.logs.log_rotation import read_tail
from trainer.protocol.messages.ranks import generation_mark

LOOK_SECONDS = 5.0
"""Seconds between checks while the program runs."""
WAIT_SECONDS = 10.0
"""Maximum seconds for which a slow file system may delay a decision or the next generation."""


def apply_rules(adapter: str, found: list[CommandCheckpoint], most: int = 4) -> list[CommandCheckpoint]:
    """Return the checkpoints, with the newest `most` of them judged by the rules of the program's framework."""
    if adapter in ("", PLAIN):
        return found
    return [_apply_rules(adapter, one) for one in found[:most]] + found[most:]


def _apply_rules(adapter: str, one: CommandCheckpoint) -> CommandCheckpoint:
    if one.damage and not one.lacking:
        return one
    try:
        reason = registry.find_damage(adapter, str(one.path))
    except OSError:  # it proves nothing about the bytes
        return one
    damage = legible(f"is incomplete: {reason}") if reason else ""
    return replace(one, damage=damage, lacking=False, proven=bool(damage))


T = TypeVar("T")
Found = tuple[list[CommandCheckpoint], set[str]]
"""The newest checkpoints, and the identities of all entries."""


async def run_bounded(work: Callable[[], T]) -> T | None:
    """Return the value of `work`, or log a message and return None if the file system is too slow or fails.
    Programs' files may contain anything, so no error from reading them may end the coordinator.
    """
    try:
        return await run_detached(work, WAIT_SECONDS)
    except Exception as error:  # noqa: BLE001  # outermost edge of the thread that ran `work`
        _log_error(error)
        return None


def _log_error(error: BaseException) -> None:
    sys.stderr.write(f"orch-agent: cannot check the program's checkpoints: {ascii(error)}\n")


class CommandProgress:
    """Monitors the checkpoint folder. A failed check leaves the known state unchanged."""

    def __init__(
        self, folder: Callable[[], Path], config: CommandCheckpointsConfig, events: EventLog, progress: AttemptProgress,
        *, counts_steps: bool = True,
    ) -> None:  # fmt: skip
        """`counts_steps` means that the newest checkpoint is the only source for the program's step."""
        self._counts_steps = counts_steps
        self._folder, self.config, self._events, self._progress = folder, config, events, progress
        self.adapter = ""
        """Adapter of the program's framework, once it has saved; empty: unknown."""
        self.began_from: CommandCheckpoint | None = None
        self.torn: CommandCheckpoint | None = None
        self.earlier: Stamps = {}
        self.saved_after = 0.0
        """Seconds from this generation's start to its newest complete checkpoint of any step, or 0."""
        self.step_before = 0
        """Highest step shown by the program before this generation."""
        self._latest: list[CommandCheckpoint] = []
        self._started = 0.0  # monotonic
        self._states: dict[str, Files] = {}  # identity -> files at this generation's start, or at the last event since
        self._there: set[str] = set()  # identities at the last check
        self._gone: set[str] = set()  # deleted identities; a new file may reuse one
        self._reported: dict[str, int] = {}  # identity -> step of checkpoints reported in events
        self._reported_earlier: set[str] = set()  # identities of reported checkpoints that predate the run
        self._highest = -1  # highest step of any checkpoint present when a generation of this attempt began or ended
        self._first = True
        self._reads = RepeatedRead(self._find, Path(config.path))

    async def start_generation(self) -> None:
        """Record the checkpoints that the program starts from."""
        left = self._latest
        self.step_before = max(self.step_before, self._progress.step)
        await self.check_settled()
        self._states = {identity: {} for identity in self._there} | {one.identity: one.files for one in self._latest}
        self._started, self.saved_after = time.monotonic(), 0.0
        self.began_from = self._latest[0] if self._latest else None
        self.torn = self._find_torn()
        self._highest = max([self._highest, *(one.step for one in (*left, *self._latest) if not one.earlier)])
        self._first = False

    def begin_from_newest(self) -> None:
        """Take the newest checkpoint as this generation's start, after a newer one was moved away."""
        self.began_from = self._latest[0] if self._latest else None
        self.torn = self._find_torn()

    def complete(self) -> list[CommandCheckpoint]:
        """Return the checkpoints without a known sign of damage that are no longer being written, newest first."""
        return [one for one in self._latest if not one.damage and one.identity in self._reported]

    async def check(self, failed_at: float | None) -> None:
        """Check periodically without waiting, and once after a rank has failed (`failed_at`, monotonic)."""
        if failed_at is not None and self._reads.began_at < failed_at:
            await self._check_now(settled=False)
        elif (looked := self._reads.poll(LOOK_SECONDS)) is not None:
            if (error := looked.exception()) is not None:
                _log_error(error)
            else:
                self._take(*looked.result(), settled=False)

    async def check_settled(self) -> None:
        """Check after all writers have exited, so that the state is final."""
        self._reads.discard()
        await self._check_now(settled=True)

    def has_saved(self) -> bool:
        """Return whether a checkpoint is newer than this generation's starting point.
        A sign of damage may be wrong, but a step that is torn repeatedly does not count as progress. If steps do not
        increase, they prove nothing, so the program's own step must have increased instead.
        """
        if self.saved_after and not self._counts_steps and self._progress.step > self.step_before:
            return True
        step = -1 if self.began_from is None or self.began_from.earlier else self.began_from.step
        own = [one for one in self._latest if not one.earlier]
        return any(one.step > (self._highest if one.damage else step) for one in own)

    def _find_torn(self) -> CommandCheckpoint | None:
        """Return the newest incomplete checkpoint older than the starting one, unless the latter is damaged itself."""
        began = self.began_from
        if began is None or began.damage:
            return None
        older = (one for one in self._latest if one.step < began.step)
        return next((one for one in older if one.damage and not one.lacking), None)

    def older(self, than: CommandCheckpoint | None = None) -> CommandCheckpoint | None:
        """Return the newest undamaged checkpoint older than `than`, by default this generation's starting point."""
        began = than or self.began_from
        if began is None:
            return None
        older = [one for one in self._latest if one.step < began.step]
        # A rank without a file for that step would continue from a different step.
        if older and older[0].parts < began.parts:
            return None
        return next((one for one in older if not one.damage), None)

    def written_later(self) -> str:
        """Return the name of a checkpoint that is newer than the highest step's, or "" if none is."""
        return find_written_later(self._latest, self.config)

    def has_whole(self) -> bool:
        """Return whether any existing checkpoint is without a known sign of damage."""
        return any(not one.damage for one in self._latest)

    def exists(self) -> bool:
        """Return whether any checkpoint exists, complete or not."""
        return bool(self._latest)

    def is_alone(self) -> bool:
        """Return whether the checkpoint that the program started from is the only one."""
        began = self.began_from
        return began is not None and all(one.identity == began.identity for one in self._latest)

    def forget(self, one: CommandCheckpoint) -> None:
        """Forget a checkpoint that was set aside, so that no event reports it as deleted."""
        self._reported.pop(one.identity, None)
        self._states.pop(one.identity, None)
        self._latest = [other for other in self._latest if other.identity != one.identity]
        self._note_saved()

    def _find(self) -> Found:
        if not self.config.path:
            return [], set()
        found, there = find(self._folder(), self.config, self.earlier)
        return apply_rules(self.adapter, assess_damage(found)), there

    async def _check_now(self, *, settled: bool) -> None:
        self._reads.began_at = time.monotonic()
        found = await run_bounded(self._find)
        if found is not None:
            self._take(*found, settled=settled)

    def _take(self, found: list[CommandCheckpoint], there: set[str], *, settled: bool) -> None:
        before = {one.identity: one.files for one in self._latest}
        if any(map(self._is_new, found)):
            self.saved_after = time.monotonic() - self._started
        for at, one in reversed(list(enumerate(found))):
            # The newest checkpoint may still be being written, so it counts once two checks see it unchanged. A
            # damaged one may still be being written too, so it counts once all writers have exited.
            unchanged = settled or before.get(one.identity) == one.files
            written = settled or (not one.damage and (at > 0 or unchanged))
            is_reported = one.identity in self._reported and (one.earlier or one.identity not in self._reported_earlier)
            if written and not is_reported:
                self._write_event(one, anew=one.identity in self._gone)
            elif is_reported and unchanged and self._is_new(one):
                self._write_event(one, anew=True)
        # A folder that is suddenly empty is more likely to be unreachable than emptied.
        for identity in [name for name in self._reported if found and name not in there]:
            self._events.write(EventKind.CHECKPOINT_DELETED, step=self._reported.pop(identity), name=identity)
            self._states.pop(identity, None)
            self._gone.add(identity)
        self._latest, self._there = found, there
        if found:
            self._note_saved()

    def _is_new(self, one: CommandCheckpoint) -> bool:
        """Return whether the checkpoint was written since this generation began: all its files have changed.
        A program may change a marker file at every start without training a step.
        """
        state = self._states.get(one.identity)
        if self._first or one.earlier or one.damage or not one.files:
            return False
        return state is None or bool(state) and all(state.get(name) != now for name, now in one.files.items())

    def _note_saved(self) -> None:
        """Set the run's saved step to that of the newest existing checkpoint."""
        reported = [one for one in self._latest if one.identity in self._reported]
        self._progress.saved = max((one.step for one in reported if not one.earlier), default=0)
        if self._counts_steps and not self._progress.from_ranks:
            self._progress.step = max((one.step for one in reported), default=0)

    def _write_event(self, one: CommandCheckpoint, *, anew: bool) -> None:
        """Report a checkpoint. `anew` means that it was rewritten under a known identity and gets a new event name."""
        self._reported[one.identity] = one.step
        self._states[one.identity] = one.files
        changed = max((time for _, time in one.files.values()), default=0)
        (self._reported_earlier.add if one.earlier else self._reported_earlier.discard)(one.identity)
        self._events.write(
            EventKind.CHECKPOINT_SEEN, step=one.step, path=str(one.path), bytes=one.bytes, new=not self._first,
            **({"name": f"{one.identity}.{changed:x}.anew", "anew": one.identity} if anew else {"name": one.identity}),
            **({"damage": one.damage} if one.damage else {}),
            **({"before_run": True} if one.earlier else {}),
        )  # fmt: skip


STEP_LOOK_SECONDS = 2.0
"""Seconds between checks of the log or file while the program runs."""
MATCH_SECONDS, SLOW_LOOK_SECONDS = 2.0, 60.0
"""Time limit for checking the newest lines, and the pause after a check that exceeds it."""
_TAIL = 64 * 1024


class SlowPattern(Exception):  # noqa: N818  # it names the pattern
    """Raised if the pattern takes too long on the program's output."""


@dataclass(frozen=True, kw_only=True)
class CommandStep:
    step: int
    total: int = 0  # 0: unknown
    loss: float | None = None


def newest_step(text: str, pattern: str, seconds: float = MATCH_SECONDS) -> CommandStep | None:
    """Return the step in the newest matching line, progress bars included, or None. Raises SlowPattern."""
    command = [sys.executable, "-I", "-S", match_step.__file__, pattern]
    try:
        done = subprocess.run(command, input=text.encode(), stdout=subprocess.PIPE, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as late:
        raise SlowPattern(
            f"progress.pattern={pattern} found no step in the newest lines within {seconds:g} s"
        ) from late
    groups = json.loads(done.stdout) if done.stdout else None  # empty: it was killed
    if groups is None:
        return None
    return CommandStep(step=_whole(groups, "step"), total=_whole(groups, "total"), loss=_loss(groups))


def _whole(groups: dict[str, str], name: str) -> int:
    text = groups.get(name, "")
    return int(text.replace(",", "")) if match_step.is_whole(text) else 0


def _loss(groups: dict[str, str]) -> float | None:
    try:
        loss = float(groups.get("loss", "").replace(",", ""))
    except ValueError:
        return None
    return loss if math.isfinite(loss) else None


class StepWatch:
    """Checks the program's output periodically, without blocking; unreadable or unmatched output changes nothing."""

    def __init__(
        self, config: CommandProgressConfig, log: Path, folder: Callable[[], Path], progress: AttemptProgress,
        clock: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
        """`log` is rank 0's; `folder` is the program's working directory."""
        self._config, self._log, self._folder, self._progress = config, log, folder, progress
        self._generation, self._slow = 0, False
        self._reads = RepeatedRead(self._read, log, clock)

    def start_generation(self, generation: int) -> None:
        """Ignore the output of earlier generations from now on."""
        self._generation = generation
        self._reads.discard()

    def check(self) -> None:
        """Take the last check's result, and start another check when due."""
        pause = SLOW_LOOK_SECONDS if self._slow else STEP_LOOK_SECONDS
        if self._config.pattern and (looked := self._reads.poll(pause)) is not None:
            self._take(looked)

    async def check_settled(self) -> None:
        """Check the final output, after all writers have exited."""
        self._reads.discard()
        if self._config.pattern and not self._slow:
            self._show(await run_bounded(self._read))

    def _take(self, looked: "asyncio.Future[CommandStep | None]") -> None:
        error = looked.exception()
        if error is None:
            self._show(looked.result())
        elif not (isinstance(error, SlowPattern) and self._slow):
            why = f"{error}: the step is not shown" if isinstance(error, SlowPattern) else ascii(error)
            sys.stderr.write(f"orch-agent: cannot read the program's progress: {why}\n")
        self._slow = isinstance(error, SlowPattern)

    def _show(self, found: CommandStep | None) -> None:
        if found is not None:
            self._progress.step, self._progress.total = found.step, found.total
            self._progress.loss = self._progress.loss if found.loss is None else found.loss

    def _read(self) -> CommandStep | None:
        try:
            return newest_step(self._text(), self._config.pattern)
        except FileNotFoundError:
            return None

    def _text(self) -> str:
        if not self._config.path:
            tail = read_tail(self._log, _TAIL).decode(errors="replace")
            return tail.rpartition(f"{generation_mark(self._generation)}\n")[2]
        with (self._folder() / self._config.path).open("rb") as stream:
            stream.seek(0, 2)
            stream.seek(max(0, stream.tell() - _TAIL))
            return stream.read(_TAIL).decode(errors="replace")
