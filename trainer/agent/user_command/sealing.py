"""Seals complete checkpoints of a user's program in the background, and compares checkpoints with their seals.

The coordinator reads the files, in one thread at a time. Sealing has the lowest priority, because the program trains
meanwhile. A draft keeps the digests of finished files, so that a new coordinator reads only the others.
"""

import os
import sys
import threading
import time
import zipfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Generic, TypeVar

from trainer.agent.user_command.checkpoints import ARCHIVES, GARBLED, CommandCheckpoint
from trainer.protocol.checkpoint_seal import (
    ChangedMeanwhile,
    CheckpointSeal,
    SealedFile,
    Tick,
    digest_files,
    find_mismatch,
    is_rewritten,
    list_files,
    seal_file,
)

T = TypeVar("T")

MOST = 4
"""Number of the newest checkpoints that are sealed."""
STALL_SECONDS = 60.0
"""Seconds without progress after which a file system counts as hung."""
DRAFT_SECONDS = 30.0
"""Seconds of reading after which a draft of a seal is written."""
FRESH_SECONDS = 3600.0
"""Seconds for which a checkpoint that this coordinator has read, and that looks untouched, is not read again."""
_LOWEST = 19


class Reading(Generic[T]):
    """A read of a checkpoint in its own thread, which a hung file system may block for ever."""

    def __init__(self, work: Callable[[Tick], T], *, nice: int = 0) -> None:
        self._work, self._nice = work, nice
        self.result: T | None = None
        self.error: Exception | None = None
        self.done = self._cancelled = False
        self._moved = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="orch-seal", daemon=True)
        self._thread.start()

    def is_over(self) -> bool:
        """Return whether the read has ended or made no progress for a long time."""
        return self.done or time.monotonic() - self._moved > STALL_SECONDS

    def join(self, seconds: float) -> None:
        """Wait for the end of the read, for at most `seconds`."""
        self._thread.join(seconds)

    def cancel(self) -> None:
        self._cancelled = True

    def _run(self) -> None:
        if self._nice:
            with suppress(OSError):  # a container may forbid it
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        try:
            self.result = self._work(self._tick)
        except Exception as error:  # noqa: BLE001  # outermost edge of this thread
            self.error = error
        self.done = True

    def _tick(self) -> None:
        self._moved = time.monotonic()
        if self._cancelled:
            raise ChangedMeanwhile


Wait = Callable[[Reading[Any]], Awaitable[object]]
"""Wait until a read is over, for as long as the caller can."""


class Verdict(StrEnum):
    VERIFIED = "verified"
    DAMAGED = "damaged"
    UNSEALED = "unsealed"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """Result of a comparison with the seal; `reason` describes the damage or the error."""

    verdict: Verdict
    reason: str = ""
    proven: bool = True  # a torn file proves less than a seal or the framework's rules
    bytes: int = 0
    seconds: float = 0.0


class CheckpointSeals:
    """Seals of one run's checkpoints."""

    def __init__(self, folder: Path, on_sealed: Callable[[CommandCheckpoint, CheckpointSeal, float], None]) -> None:
        self._folder, self._on_sealed = folder, on_sealed
        self._reading: tuple[CommandCheckpoint, Reading[CheckpointSeal | None], float] | None = None
        self._settled: dict[str, object] = {}  # identity -> files that are sealed, or whose sealing failed
        self._fresh: dict[str, tuple[float, object]] = {}  # identity -> time and files when all bytes were read

    def poll(self, checkpoints: Sequence[CommandCheckpoint]) -> None:
        """Take a finished seal, and start the next one. `checkpoints` are complete and listed newest first."""
        self._take()
        if self._reading is not None:
            return
        for one in checkpoints[:MOST]:
            if self._settled.get(one.identity) != one.files:
                work = SealWork(folder=self._folder, checkpoint=one)
                self._reading = one, Reading(work.run, nice=_LOWEST), time.monotonic()
                return

    def join(self, seconds: float) -> None:
        """Wait for the running seal, for at most `seconds`."""
        if self._reading is not None:
            self._reading[1].join(seconds)

    def _take(self) -> None:
        if self._reading is None or not self._reading[1].done:
            return
        (one, reading, began), self._reading = self._reading, None
        seal, error = reading.result, reading.error
        self._settled[one.identity] = one.files
        if seal is not None:
            self._fresh[one.identity] = time.monotonic(), one.files
            self._on_sealed(one, seal, time.monotonic() - began)
        elif error is not None and not isinstance(error, (ChangedMeanwhile, FileNotFoundError)):
            sys.stderr.write(f"orch-agent: cannot seal {one.path}: {error}\n")

    async def verify(self, one: CommandCheckpoint, wait: Wait, program_until: int = 0) -> Verification:
        """Compare a checkpoint with its seal. No rank may be running since `program_until` (ns since the epoch)."""
        began = time.monotonic()
        at, files = self._fresh.get(one.identity, (float("-inf"), None))
        if files == one.files and began - at < FRESH_SECONDS:
            return Verification(verdict=Verdict.VERIFIED)
        reading = Reading(lambda tick: verify_seal(self._folder, one.path, tick, program_until))
        await wait(reading)
        if not reading.done:
            reading.cancel()
            return Verification(verdict=Verdict.UNREADABLE, reason="not read in time")
        if reading.error is not None or reading.result is None:
            return Verification(verdict=Verdict.UNREADABLE, reason=str(reading.error))
        if reading.result.verdict is Verdict.VERIFIED:
            self._fresh[one.identity] = began, one.files
        return replace(reading.result, seconds=time.monotonic() - began)

    def is_sealed(self, one: CommandCheckpoint) -> bool:
        """Return whether a checkpoint has a seal. Raises OSError."""
        return CheckpointSeal.read(seal_file(self._folder, one.path.name)) is not None


def verify_seal(seals: Path, path: Path, tick: Tick = lambda: None, program_until: int = 0) -> Verification:
    """Compare a checkpoint with its seal. Raises OSError.

    It counts as unsealed if the program, which ran until `program_until` (ns since the epoch), has written it again: a
    program that is killed soon after leaves no time for another seal.
    """
    seal = CheckpointSeal.read(seal_file(seals, path.name))
    if seal is None:
        return Verification(verdict=Verdict.UNSEALED)
    reason = find_mismatch(seal, path, tick)
    if reason and is_rewritten(seal, path, program_until) and not _is_bad(list_files(path, seal.siblings)):
        return Verification(verdict=Verdict.UNSEALED)
    return Verification(verdict=Verdict.DAMAGED if reason else Verdict.VERIFIED, reason=reason, bytes=seal.bytes)


def _is_bad(files: Mapping[str, Path]) -> bool:
    return any(map(_has_bad_record, files.values()))


def _has_bad_record(path: Path) -> bool:
    """Return whether a record of a torch.save archive does not match its own checksum."""
    if path.suffix not in ARCHIVES or not zipfile.is_zipfile(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is not None
    except (zipfile.BadZipFile, *GARBLED):
        return True


@dataclass(frozen=True, kw_only=True)
class SealWork:
    """Work of the thread that seals one checkpoint."""

    folder: Path
    checkpoint: CommandCheckpoint

    def run(self, tick: Tick) -> CheckpointSeal | None:
        """Return the new seal, or None if the checkpoint has one. Raises OSError, ChangedMeanwhile."""
        one = self.checkpoint
        path, draft = seal_file(self.folder, one.path.name), seal_file(self.folder, f".{one.path.name}.draft")
        old, files = CheckpointSeal.read(path), list_files(one.path, one.siblings)
        if old is not None and old.step == one.step:
            if self._is_unchanged(old, files):
                return None
            if not is_rewritten(old, one.path) or _is_bad(files):
                return None  # the next start refuses it
        begun = CheckpointSeal.read(draft)
        seal = self._digest(files, {} if begun is None else begun.files, draft, tick)
        # A file that appeared meanwhile belongs to it; the next check sees the checkpoint as changed.
        if not self._is_unchanged(seal, list_files(one.path, one.siblings)):
            raise ChangedMeanwhile(one.path)
        seal.write(path)
        draft.unlink(missing_ok=True)
        self._forget_deleted()
        return seal

    def _forget_deleted(self) -> None:
        """Delete the seals of checkpoints that the program has deleted."""
        kept = {seal_file(self.folder, name).name for name in os.listdir(self.checkpoint.path.parent)}
        for file in self.folder.glob("[!.]*.json"):
            if file.name not in kept:
                file.unlink(missing_ok=True)

    def _digest(
        self, files: Mapping[str, Path], known: Mapping[str, SealedFile], draft: Path, tick: Tick
    ) -> CheckpointSeal:  # fmt: skip
        found, due = {name: file for name, file in known.items() if name in files}, time.monotonic() + DRAFT_SECONDS
        for name, path in files.items():
            found |= digest_files({name: path}, {name: found[name]} if name in found else {}, tick)
            if time.monotonic() >= due:
                self._seal(found).write(draft)
                due = time.monotonic() + DRAFT_SECONDS
        return self._seal(found)

    def _seal(self, files: Mapping[str, SealedFile]) -> CheckpointSeal:
        one = self.checkpoint
        return CheckpointSeal(
            name=one.path.name, step=one.step, path=str(one.path), sealed_at=time.time(), files=files,
            siblings=one.siblings,
        )  # fmt: skip

    @staticmethod
    def _is_unchanged(seal: CheckpointSeal, files: Mapping[str, Path]) -> bool:
        return seal.files.keys() == files.keys() and all(
            seal.files[name].is_untouched(path.stat()) for name, path in files.items()
        )
