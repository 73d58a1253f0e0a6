"""`orch ckpt gc` and `orch ckpt du`: debris left by ended attempts, and disk usage.

The registry decides whether a folder is debris. An ended attempt never comes back, nothing reads its uncommitted files,
and deleting them twice is harmless. Deleting debris therefore needs no lease and does not disturb a controller. A tier
to which jobs copy checkpoints is skipped while any attempt may be alive, because a live attempt copies earlier
checkpoints under their original names. This is checked before each file is deleted, because an attempt may begin at any
time. A refused committed checkpoint is evidence. It is deleted only on request, only while no attempt of its run can be
using it, and only under the lease, because the registry records the deletion.
"""

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from checkpointing.format.commit import parse_name
from checkpointing.retention.garbage import decide_debris, delete, find_debris, pinned_names
from checkpointing.storage.storage_errors import error_words
from checkpointing.verification.verdicts import known_bad
from checkpointing.verification.verify import verify_checkpoint
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.access.run_folder import START, warn_of_missing
from orchestrator.cli.checkpoints.tiers import Tier, missing_files, own_checkpoints, visible_tiers
from orchestrator.cli.terminal.command_classes import Verb
from orchestrator.cli.terminal.render import Column, Screen, count, size
from orchestrator.errors import ConfigError, Precondition
from orchestrator.run_dirs.other_registry import find_other_registry
from orchestrator.run_dirs.reader_pins import remove_dead_readers
from orchestrator.states import ENDED_RUNS, LIVE_ATTEMPTS, AttemptState, Trust
from trainer.protocol.run_dir import RunDir

if TYPE_CHECKING:
    from orchestrator.registry.records import Attempt, Lease, Run
    from orchestrator.registry.store import Store

DEBRIS, REFUSED = "debris", "refused"


@dataclass(frozen=True, kw_only=True)
class GcCandidate:
    """A folder that is not a valid checkpoint, with its kind, the reason for that kind, and any reason to keep it."""

    run: str
    tier: Tier
    name: str
    bytes: int
    what: str
    reason: str
    keep: str = ""

    @property
    def path(self) -> str:
        return f"{self.tier.catalog.place}/{self.name}"

    def row(self, done: str) -> dict[str, Any]:
        return {
            "run": self.run, "tier": self.tier.label, "path": self.path, "name": self.name, "bytes": self.bytes,
            "what": self.what, "done": done, "reason": self.keep or self.reason,
        }  # fmt: skip


GC_COLUMNS = [
    Column("RUN", "run"),
    Column("TIER", "tier"),
    Column("NAME", "name"),
    Column("SIZE", "bytes", size, right=True),
    Column("WHAT", "what"),
    Column("DONE", "done"),
    Column("WHY", "reason"),
]

GC_JSON = "list of {run, tier, path, name, bytes, what, done, reason}; done is `deleted`, `would be deleted` or `left`"


@click.command("gc", cls=Verb, json_data=GC_JSON)
@click.argument("runs", metavar="[RUN...]", nargs=-1)
@click.option("-a", "--all", "everything", is_flag=True, help="Clean up every run.")
@click.option("--dry-run", is_flag=True, help="Print what would be deleted; delete nothing.")
@click.option(
    "--refused", is_flag=True,
    help="Also delete unpinned corrupt checkpoints of runs that are not live; the controller must be stopped.",
)  # fmt: skip
@click.pass_obj
def gc(screen: Screen, runs: tuple[str, ...], everything: bool, dry_run: bool, refused: bool) -> int:
    """Delete half-written checkpoints of attempts that have ended.

    It works on every tier that this machine can see. It never touches what a live attempt is writing; for a run with a
    live attempt it deletes nothing on the tiers that jobs copy to. It lists corrupt checkpoints and keeps them as
    evidence, unless --refused is given. A run's next attempt also deletes what earlier jobs left behind. The exit code
    is 4 if something could not be deleted.
    """
    if bool(runs) == everything:
        what = "RUN and --all are mutually exclusive" if runs else "no run is given"
        hint = f"`orch ckpt gc {shlex.join(runs) or 'RUN'}`, or `orch ckpt gc --all`"
        raise ConfigError(what, where="command line: orch ckpt gc", hint=hint)
    screen.if_interrupted = lambda: "interrupted: deleted folders stay deleted; run the same command again for the rest"
    if runs:
        with open_store(readonly=True) as store:  # check the names first, whether or not a controller is alive
            runs = tuple(store.run(name).name for name in runs)
    with _open_registry(locked=refused and not dry_run) as (store, lease):
        chosen = store.runs() if everything else [store.run(name) for name in runs]
        found = [item for run in chosen for item in gc_candidates(store, run, screen, refused=refused)]
        deletable = [item for item in found if not item.keep]
        failed = [] if dry_run else [item for item in deletable if not _delete(screen, store, lease, item)]
    freed = sum(item.bytes for item in deletable if item not in failed)
    done = "would be deleted" if dry_run else "deleted"
    rows = [item.row("left" if item.keep or item in failed else done) for item in found]
    screen.listing("ckpt.gc", GC_COLUMNS, rows)
    if not screen.json:
        screen.note(f"{size(freed)} {'would be freed' if dry_run else 'freed'}" if found else "nothing to clean up")
    return Precondition.exit_code if failed else 0


@contextmanager
def _open_registry(*, locked: bool) -> "Iterator[tuple[Store, Lease | None]]":
    """Open the registry, with the lease if `locked` (to delete committed checkpoints)."""
    from orchestrator.observed_since import Clock, ObservedSince
    from orchestrator.registry.lease import acquire

    with open_store(readonly=not locked) as store:
        if not locked:
            yield store, None
            return
        lease = acquire(store, ObservedSince(Clock().mono), time.time(), once=True)
        if lease is None:
            what = "a controller is running, and only one process may delete committed checkpoints"
            hint = f"`orch controller stop`, then run this again; jobs continue meanwhile; afterwards {START}"
            raise Precondition(what, where="`orch controller status` shows it", hint=hint)
        try:
            yield store, lease
        finally:
            store.drop_lease(lease)


def gc_candidates(store: "Store", run: "Run", screen: Screen, *, refused: bool = False) -> list[GcCandidate]:
    """Classify every folder of a run that is not a valid checkpoint. Warns about unreadable tiers and skips them."""
    found: list[GcCandidate] = []
    warn_of_missing(screen, run.name, run.run_dir)
    for tier in visible_tiers(RunDir(Path(run.run_dir))):
        try:
            found += find_tier_candidates(store, run, tier, refused=refused)
        except OSError as error:
            _warn_unreadable(screen, run, tier, error)
    return found


def _warn_unreadable(screen: Screen, run: "Run", tier: Tier, error: OSError) -> None:
    screen.warn("TierUnreadable", f"{run.name}: tier {tier.label} cannot be read: {error_words(error)}")


def find_tier_candidates(store: "Store", run: "Run", tier: Tier, *, refused: bool = False) -> list[GcCandidate]:
    """Classify every folder in one tier of a run that is not a valid checkpoint. Raises OSError."""
    return [*_half_written(store, run, tier), *_corrupt(store, run, tier, refused)]


def _half_written(store: "Store", run: "Run", tier: Tier) -> Iterator[GcCandidate]:
    # List the folders before the live attempts, so that an attempt that begins in between is noticed.
    folders = find_debris(tier.catalog)
    attempts = store.attempts(run.name)
    ended = {(attempt.number, attempt.nonce) for attempt in attempts if attempt.state not in LIVE_ATTEMPTS}
    for verdict in decide_debris(folders, ended=ended):
        folder = verdict.folder
        busy = _blocking_attempt(store, run, tier, *folder.attempt_id)
        yield GcCandidate(
            run=run.name, tier=tier, name=folder.name, bytes=folder.bytes, what=folder.state.value,
            reason=verdict.reason, keep=busy or ("" if verdict.collect else verdict.reason),
        )  # fmt: skip


def _blocking_attempt(store: "Store", run: "Run", tier: Tier, number: int, nonce: str) -> str:
    """Return why an attempt may still use the folder that attempt `number` left in a tier; empty if none can.

    A LOST attempt counts as ended: its GO is revoked, so nothing it writes is ever committed.
    """
    attempts = store.attempts(run.name)
    for attempt in attempts:
        if attempt.state not in LIVE_ATTEMPTS:
            continue
        # A live attempt finishes its own writes and deletions.
        if (attempt.number, attempt.nonce) == (number, nonce):
            return f"attempt {number} has not ended"
        if tier.is_copy_target:
            return f"attempt {attempt.number} has not ended, and may be copying it"
    return _other_registry(store, run, attempts) if tier.is_copy_target else ""


def _other_registry(store: "Store", run: "Run", attempts: "Sequence[Attempt]") -> str:
    other = find_other_registry(run, attempts, store.path)
    return other.what if other is not None else ""


def _corrupt(store: "Store", run: "Run", tier: Tier, refused: bool) -> Iterator[GcCandidate]:
    place = RunDir(Path(run.run_dir))
    own = visible_tiers(place)[0].storage
    bad = known_bad(own, tier.catalog.place, tier.storage)
    bad.update({row.name: row.reason for row in store.checkpoints(run.name) if row.trust is Trust.CORRUPT})
    if not bad:
        return
    attempts = store.attempts(run.name)
    busy = "an attempt of the run has not ended" if _may_live(run, attempts) else _other_registry(store, run, attempts)
    remove_dead_readers(own)
    pinned = pinned_names(own)
    for entry in tier.own_and_others(place, own_checkpoints(store, run))[0]:
        if entry.name not in bad:
            continue
        keep = "it is pinned" if entry.name in pinned else busy
        if not keep:
            keep = _still_good(tier, entry.name) if refused else f"evidence, kept without --refused: {bad[entry.name]}"
        yield GcCandidate(
            run=run.name, tier=tier, name=entry.name, bytes=entry.bytes, what=REFUSED, reason=bad[entry.name], keep=keep
        )  # fmt: skip


def _may_live(run: "Run", attempts: "Sequence[Attempt]") -> bool:
    """Return whether an attempt of the run may still read its checkpoints.

    A LOST attempt may read them until a later attempt is allowed or the run ends.
    """
    if any(attempt.state in LIVE_ATTEMPTS for attempt in attempts):
        return True
    return bool(attempts) and attempts[-1].state is AttemptState.LOST and run.state not in ENDED_RUNS


def _still_good(tier: Tier, name: str) -> str:
    """Return why to keep a refused copy that verifies now (another copy was bad, or a read failed); else empty."""
    bad = {fault.file for fault in verify_checkpoint(tier.storage, name, 2).faults}
    if not bad:
        return "its bytes are intact"
    absent, _ = missing_files(tier.storage, name) if not tier.shared else (frozenset(), 0)
    return "it is one node's part of a checkpoint, and its bytes are intact" if bad <= absent else ""


def _delete(screen: Screen, store: "Store", lease: "Lease | None", item: GcCandidate) -> bool:
    """Delete one folder, then record the deletion. Returns False if it could not be deleted."""
    run = store.run(item.run)
    try:
        gone = delete(item.tier.storage, item.name, _fence(store, run, lease, item))
    except OSError as error:
        screen.warn("NotDeleted", f"{item.path}: {error_words(error)}")
        return False
    if gone and item.what == REFUSED and lease is not None:
        known = any(row.name == item.name for row in store.checkpoints(item.run))
        tiers = visible_tiers(RunDir(Path(run.run_dir)))
        if known and not any(tier.catalog.is_committed(item.name) for tier in tiers):
            reason = "deleted by `orch ckpt gc --refused`"
            store.trust(item.run, item.name, Trust.DELETED, reason, epoch=lease.epoch, now=time.time())
    return gone


def _fence(store: "Store", run: "Run", lease: "Lease | None", item: GcCandidate) -> Callable[[], bool]:
    """Return the check made before each deletion: debris must be unused; a committed checkpoint needs our lease."""

    def is_unused() -> bool:
        parts = parse_name(item.name)
        return parts is not None and not _blocking_attempt(store, run, item.tier, parts.attempt, parts.nonce)

    def holds_lease() -> bool:
        held = store.lease()
        return held is not None and lease is not None and (held.epoch, held.holder) == (lease.epoch, lease.holder)

    return holds_lease if item.what == REFUSED else is_unused


@click.command("du", cls=Verb, json_data="list of {run, tier, trust, count, bytes, collectable}")
@click.argument("runs", metavar="[RUN...]", nargs=-1)
@click.pass_obj
def du(screen: Screen, runs: tuple[str, ...]) -> None:
    """Print checkpoint sizes by run, tier and trust; without RUN, for every run.

    TRUST is `debris` for half-written folders. GC FREES is the amount that `orch ckpt gc` would free.
    """
    with open_store(readonly=True) as store:
        chosen = [store.run(name) for name in runs] if runs else store.runs()
        rows = [row for run in chosen for row in _usage(screen, store, run)]
    columns = [
        Column("RUN", "run"),
        Column("TIER", "tier"),
        Column("TRUST", "trust"),
        Column("COUNT", "count", count, right=True),
        Column("SIZE", "bytes", size, right=True),
        Column("GC FREES", "collectable", size, right=True),
    ]
    screen.listing("ckpt.du", columns, rows if screen.json else sorted(rows, key=lambda row: -row["bytes"]))
    total, frees = sum(row["bytes"] for row in rows), sum(row["collectable"] for row in rows)
    if not screen.json:
        screen.note(f"{size(total)} in all" + (f"; `orch ckpt gc --all` frees {size(frees)}" if frees else ""))


def _usage(screen: Screen, store: "Store", run: "Run") -> Iterator[dict[str, Any]]:
    """Yield one row per tier and trust, and one for folders that are not checkpoints."""
    warn_of_missing(screen, run.name, run.run_dir)
    trust = {row.name: str(row.trust) for row in store.checkpoints(run.name)}
    place, own = RunDir(Path(run.run_dir)), own_checkpoints(store, run)
    for tier in visible_tiers(place):
        sums: dict[str, dict[str, Any]] = {}
        try:
            committed = {entry.name for entry in tier.catalog.committed_entries()}
            for name in tier.catalog.names():
                if name not in own and not tier.is_within(place):
                    continue  # belongs to another run with this name
                kind = trust.get(name, "COMMITTED") if name in committed else DEBRIS
                empty = {"run": run.name, "tier": tier.label, "trust": kind, "count": 0, "bytes": 0, "collectable": 0}
                row = sums.setdefault(kind, empty)
                row["count"] += 1
                row["bytes"] += sum(length or 0 for length in tier.storage.list(name).values())
            if DEBRIS in sums:
                items = find_tier_candidates(store, run, tier)
                sums[DEBRIS]["collectable"] = sum(item.bytes for item in items if not item.keep)
        except OSError as error:
            _warn_unreadable(screen, run, tier, error)
        yield from sums.values()
