"""What `orch rm` would remove of one run, or why it removes nothing of it."""

from dataclasses import dataclass
from pathlib import Path

from checkpointing.format.commit import parse_name
from checkpointing.retention.garbage import pinned_names
from checkpointing.storage.backends import LocalStorage
from orchestrator.cli.checkpoints.tiers import tiers_of
from orchestrator.cli.removal.copies import TierCopies, find_copies
from orchestrator.cli.removal.run_folder import bytes_below, foreign_folder, own_folder
from orchestrator.controller.reconciler.ownership import never_submitted
from orchestrator.controller.run_dirs.other_registry import find_other_registry
from orchestrator.errors import Precondition
from orchestrator.registry.operations.removal_writes import require_removable
from orchestrator.registry.records import Attempt, Run
from orchestrator.registry.store import Store
from orchestrator.states import Trust
from trainer.contract.run_dir import RunDir

SHOWN = 3
"""Pinned checkpoints that a refusal names."""


@dataclass(frozen=True)
class Choice:
    """What a person wants to keep: copies in further tiers, or, with `forget`, every file."""

    keep_copies: bool = False
    forget: bool = False


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run that may be removed; `folder` is where its files are now, None where there are none to delete."""

    run: Run
    first: Attempt
    folder: Path | None
    bytes: int = 0
    copies: tuple[TierCopies, ...] = ()
    left: tuple[str, ...] = ()  # what stays, each with its reason
    tests: tuple["Plan", ...] = ()  # restore tests of it, which go with it

    @property
    def all_bytes(self) -> int:
        """What is freed in all."""
        return self.bytes + sum(item.bytes for item in self.copies) + sum(test.all_bytes for test in self.tests)


def plan_removal(store: Store, run: Run, choice: Choice) -> Plan:
    """Look, and change nothing; raises Precondition for a run that lives, is not ours, or has pins."""
    tests = [store.run(test.test) for test in store.restore_tests(run.name) if test.ended_at is not None]
    under_way = [test.test for test in store.restore_tests(run.name, going_on=True)]
    attempts = store.attempts(run.name)
    require_removable(run, attempts, under_way)
    if choice.forget:
        return Plan(
            run=run, first=attempts[0], folder=None, left=(f"{run.run_dir}: no file was touched (--forget)",),
            tests=tuple(plan_removal(store, test, choice) for test in tests),
        )  # fmt: skip
    folder = own_folder(run, attempts[0], submitted=not never_submitted(attempts))
    copies: tuple[TierCopies, ...] = ()
    if folder is not None and folder == Path(run.run_dir):
        if (other := find_other_registry(run, attempts, store.path)) is not None:
            raise foreign_folder(run, other.what, other.hint)
        _refuse_pins(run, RunDir(folder))
        mine = {(attempt.number, attempt.nonce) for attempt in attempts}
        copies = tuple(find_copies(RunDir(folder), mine, keep=choice.keep_copies))
    left = [f"{item.place}: {item.left}" for item in copies if item.left]
    return Plan(
        run=run,
        first=attempts[0],
        folder=folder,
        bytes=bytes_below(folder) if folder is not None else 0,
        copies=tuple(item for item in copies if item.names),
        left=(*left, *_own_programs(store, run)),
        tests=tuple(plan_removal(store, test, choice) for test in tests),
    )


def _refuse_pins(run: Run, folder: RunDir) -> None:
    """Raise Precondition where a checkpoint is there that somebody wants to keep, whatever else goes."""
    pinned = pinned_names(LocalStorage(folder.checkpoints))
    if run.removal or not pinned:
        return  # what is being removed was looked at when that began
    there = {name for tier in tiers_of(folder) for name in pinned if tier.catalog.is_committed(name)}
    steps = sorted({parts.step for name in there if (parts := parse_name(name))})
    if not steps:
        return
    words = ", ".join(map(str, steps[:SHOWN])) + (", ..." if len(steps) > SHOWN else "")
    unpin = "; ".join(f"orch ckpt unpin {run.name}@{step}" for step in steps[:SHOWN])
    raise Precondition(
        f"{run.name} has pinned checkpoints: step{'' if len(steps) == 1 else 's'} {words}",
        where=str(folder.checkpoints),
        hint=f"{unpin}; then the same again",
    )


def _own_programs(store: Store, run: Run) -> list[str]:
    """Checkpoints that a program of the user's has written: orch knows them, and never deletes them."""
    rows = [row for row in store.checkpoints(run.name) if row.trust is not Trust.DELETED]
    places = dict.fromkeys(str(Path(row.path).parent) for row in rows if parse_name(row.name) is None)
    inside = f"{Path(run.run_dir)}/"
    return [f"{place}: the program's own checkpoints" for place in places if not f"{place}/".startswith(inside)]
