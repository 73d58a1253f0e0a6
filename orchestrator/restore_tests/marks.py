"""What the controller writes beside the checkpoints of a run that is tested: pins while a test lasts, then the verdict.

The test itself writes nothing there.
"""

import errno
import time
from collections.abc import Collection
from pathlib import Path

from checkpointing.format.commit import parse_name
from checkpointing.retention.garbage import pin, read_pins, unpin
from checkpointing.storage.backends import LocalStorage, storage_at
from checkpointing.tiers.catalog import Catalog
from checkpointing.verification.verdicts import RESTORE_TESTED, Verdict, forget, manifest_of, record, withdraw
from orchestrator.registry.records import RestoreTest, Run
from trainer.contract.restore_test import UNDECIDED, Outcome
from trainer.contract.run_dir import RunDir

_NOTE = "restore test"


def hold(run: Run, test: RestoreTest) -> None:
    """Keep retention away from the checkpoint until the test has ended; raises OSError."""
    if not _is_ours(test):
        return
    storage = _own(run)
    if test.checkpoint not in read_pins(storage):
        pin(storage, test.checkpoint, f"{_NOTE} {test.test}", time.time())


def release(run: Run, checkpoint: str, tests: Collection[str]) -> None:
    """Take the pin of one of these tests away again; a person's stays, whatever its note says. Raises OSError."""
    storage = _own(run)
    held = read_pins(storage).get(checkpoint)
    if held is not None and held.note in {f"{_NOTE} {test}" for test in tests}:
        unpin(storage, checkpoint)


def write_verdict(run: Run, test: RestoreTest, place: str, outcome: Outcome, reason: str, now: float) -> None:
    """Beside the checkpoints, where retention reads it, in place of those on copies that are gone; raises OSError."""
    if outcome in UNDECIDED or not _is_ours(test):
        return
    if outcome is Outcome.SUSPECT:  # its bytes are good: it only is no proven one any more
        withdraw(_own(run), test.checkpoint, place)
        return
    good = outcome is Outcome.RESTORED
    found = Verdict(
        name=test.checkpoint, place=place, manifest=manifest_of(storage_at(place), test.checkpoint),
        ok=good, level=RESTORE_TESTED, at=now, reason="" if good else reason,
    )  # fmt: skip
    record(_own(run), found)
    forget(_own(run), place, Catalog(place).names())


def _is_ours(test: RestoreTest) -> bool:
    """Whether orch wrote the checkpoint, and may delete it: those of a user's own program it leaves alone."""
    return parse_name(test.checkpoint) is not None


def _own(run: Run) -> LocalStorage:
    """Raises FileNotFoundError where the run's folder is away: it must not be made anew."""
    folder = RunDir(Path(run.run_dir)).checkpoints
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the run's folder is not there", str(folder))
    return LocalStorage(folder)
