"""Rebuild of a registry from run directories: each run's record, and whatever its jobs' files add to it."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from checkpointing.storage.durable import fsync_dir, only_own_files, read_json
from checkpointing.storage.trusted_path import check_private
from orchestrator.config.run_config import RunConfig
from orchestrator.errors import RegistryError
from orchestrator.recovery.elastic_policy import choose_smaller_world
from orchestrator.registry import fast_queries, versions
from orchestrator.registry.controller_writes import NO_HOLDER
from orchestrator.registry.database import Database
from orchestrator.registry.lease import displayed_state, holder_host
from orchestrator.registry.records import Attempt, Checkpoint, EventCursor, Lease, Node, Run, Transition
from orchestrator.registry.run_record import RunRecord
from orchestrator.registry.sqlite_errors import ForeignDatabase
from orchestrator.registry.store import Store
from orchestrator.run_dirs.controlled_run import ControlledRun
from orchestrator.run_dirs.ingest import ingest
from orchestrator.run_dirs.inheritable_checkpoints import look, of_run, shared_places
from orchestrator.run_dirs.other_registry import find_serving_registry, read_leases
from orchestrator.states import LIVE_RUNS, AttemptState, RunState, Trust
from trainer.protocol.config import hash_config
from trainer.protocol.events import Event, EventKind, read_events
from trainer.protocol.failures.outcome import AttemptOutcome, AttemptResult
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.plain_data import build
from trainer.protocol.run_dir import AttemptDir, RunDir

T = TypeVar("T")

log = logging.getLogger("orch.registry")
HOLDER = "orch db rebuild"
_UNUSABLE = (OSError, ValueError, TypeError, KeyError, AttributeError)
"""Errors from damaged or foreign files."""


@dataclass(frozen=True, kw_only=True)
class ImportableRun:
    """A run directory that can be imported."""

    folder: RunDir
    configs: dict[str, dict[str, Any]]  # of every attempt and of the run, by digest
    record: RunRecord

    @property
    def config(self) -> RunConfig:
        """Config of the run's next attempt."""
        config: RunConfig = build(RunConfig, self.configs[self.record.run.config_digest])
        return config


def rebuild(
    store_path: Path,
    roots: Sequence[Path],
    *,
    now: float | None = None,
    on_aside: Callable[[Path], object] = lambda path: None,
) -> int:
    """Rebuild the registry from the run directories below `roots`; return the number of runs.

    An existing registry is renamed to `<name>.<time>.old`, and `on_aside` is called with that path. Unreadable folders
    are logged. Raises RegistryError, without changing anything, if two folders have the same run name, or if a
    controller of this registry, or of another registry that serves one of the runs, is alive.
    """
    now = time.time() if now is None else now
    _refuse_foreign(store_path)
    _refuse_while_served(store_path, now)
    found = sorted(
        _find_importable_runs(roots, partial(_known_config, store_path)),
        key=lambda item: (item.record.run.created_at, item.record.run.name),
    )
    _refuse_twins(found)
    _refuse_runs_of_others(found, store_path, now)
    draft = store_path.with_name(f".{store_path.name}.{os.getpid()}.rebuild")
    _remove(draft)
    try:
        with Store.open(draft) as store:
            store.database.after_commit = lambda runs: None  # records must not name a draft
            _fill(store, found, now)
        if (aside := _set_aside(store_path, now)) is not None:
            on_aside(aside)
        os.replace(draft, store_path)
        fsync_dir(store_path.parent)
    finally:
        _remove(draft)
    return len(found)


def _refuse_foreign(path: Path) -> None:
    """Raise ForeignDatabase for another program's database, which must not be replaced by ours."""
    try:
        versions.read_version(path)
    except ForeignDatabase:
        raise
    except RegistryError:
        log.info("%s cannot be read: it is set aside", path)  # an unreadable registry is the reason for a rebuild


def _refuse_while_served(path: Path, now: float) -> None:
    for lease in read_leases(path):  # an unreadable lease is the reason for a rebuild
        if displayed_state(lease, now).may_write:
            of = f" of {lease.scheduler}" if lease.scheduler else ""
            raise RegistryError(
                f"a controller{of} is alive ({lease.holder}) and writes to this registry",
                where=str(path),
                hint=f"`orch controller stop` on {holder_host(lease.holder)}, then try again",
            )


def _refuse_runs_of_others(found: list[ImportableRun], path: Path, now: float) -> None:
    """Raise RegistryError if another registry's controller serves a run; otherwise two controllers would serve it."""
    for item in found:
        if (other := find_serving_registry(item.record, path, now)) is not None:
            raise RegistryError(other.what, where=str(item.folder.path), hint=other.hint)


def _refuse_twins(found: list[ImportableRun]) -> None:
    seen: dict[str, Path] = {}
    for item in found:
        name = item.record.run.name
        if name in seen:
            raise RegistryError(
                f"two folders claim to be the run {name}: {seen[name]} and {item.folder.path}",
                where="the roots given",
                hint="leave one root out, or move one of the two folders away",
            )
        seen[name] = item.folder.path


KnownConfig = Callable[[str], dict[str, Any] | None]
"""Lookup of a config by digest in the registry to be replaced; None if it is missing."""


def _known_config(path: Path, digest: str) -> dict[str, Any] | None:
    try:
        return fast_queries.config(path, digest) if path.exists() else None
    except (RegistryError, ValueError, TypeError):
        return None


def _find_importable_runs(roots: Sequence[Path], known: KnownConfig) -> Iterator[ImportableRun]:
    for root in dict.fromkeys(root.resolve() for root in roots):
        folders = [root] if (root / "run.json").is_file() else sorted(root.iterdir())
        for path in folders:
            try:
                if (path / "run.json").is_file() and not path.name.startswith("."):
                    check_private(path)  # name and nonce are public, so any user could have created such a folder
                    with only_own_files():
                        found = _read(RunDir(path), known)
                    yield found
            except _UNUSABLE as error:
                log.warning("skipped %s: %s", path, error)


def _read(folder: RunDir, known: KnownConfig) -> ImportableRun:
    run, config = read_json(folder.run), read_json(folder.config)
    if not isinstance(run, dict) or not isinstance(config, dict):
        raise ValueError(f"{folder.run} or {folder.config} is not a JSON object")
    if run.get("schema") != "orch.run/1":
        raise ValueError(f"{folder.run} does not belong to an orch run")
    digest = hash_config(config)
    if digest != run["config_digest"]:
        kept = known(run["config_digest"])
        if kept is None or hash_config(kept) != run["config_digest"]:
            digests = f"its digest is {digest}, the run's is {run['config_digest']}"
            raise ValueError(f"{folder.config} was changed ({digests}): restore it, and rebuild again")
        log.warning("%s was changed: the run keeps the configuration that the registry had", folder.config)
        config = kept
    try:
        record = RunRecord.read(folder.record)
        if record.run.name != run["name"]:
            raise ValueError(f"{folder.record} belongs to another run")
    except _UNUSABLE as error:
        log.info("no record: %s", error)
        return _with_configs(folder, _relocate_record(salvage(folder, run), folder), config, recorded=False)
    return _with_configs(folder, _with_submission(_relocate_record(record, folder), folder), config, recorded=True)


def _with_submission(record: RunRecord, folder: RunDir) -> RunRecord:
    """Mark the newest attempt as submitted if the record lacks that change and the folder proves it."""
    last, place = record.attempts[-1], folder.attempt(record.attempts[-1].number)
    left = (place.submission, place.logs, place.events, place.outcomes)
    begun = place.go.exists() or place.heartbeat.exists() or any(any(one.iterdir()) for one in left if one.is_dir())
    if last.submitted_at is not None or not begun:
        return record
    return replace(record, attempts=(*record.attempts[:-1], replace(last, submitted_at=last.intent_at)))


def _with_configs(folder: RunDir, record: RunRecord, submitted: dict[str, Any], *, recorded: bool) -> ImportableRun:
    """Return each attempt with the config from its folder. A change that no attempt has used is lost."""
    configs: dict[str, dict[str, Any]] = {}

    def add_config(file: Path) -> str:
        config = submitted if file == folder.config else read_json(file)
        build(RunConfig, config)  # raises if the current rules reject it, since no controller could serve it
        digest = hash_config(config)
        configs[digest] = config
        return digest

    def with_config(attempt: Attempt) -> Attempt:
        number = attempt.number
        # An attempt that has not begun has no config file yet, and uses the run's config.
        if number > 1 and not (folder.attempt(number).path / "intent.json").exists():
            return replace(attempt, config_digest=add_config(folder.attempt_run_config(number - 1)), smaller_world=None)
        own, base = add_config(folder.attempt_config(number)), add_config(folder.attempt_run_config(number))
        if own == base:
            return replace(attempt, config_digest=own, smaller_world=None)
        mine, full = configs[own].get("cluster", {}), configs[base].get("cluster", {})
        reason = (attempt.smaller_world or {}).get("reason", "nodes were missing when it was begun")
        return replace(attempt, config_digest=own, smaller_world=choose_smaller_world(mine, full, base, reason))

    attempts = tuple(map(with_config, record.attempts))
    if not recorded or record.run.config_digest not in configs:
        newest = attempts[-1].base_digest
        steps = 0 if configs[newest].get("command") else configs[newest]["train"]["steps"]
        run = replace(record.run, config_digest=newest, total_steps=steps)
        if recorded and run.state in LIVE_RUNS:
            lost = "rebuilt, but a change to its configuration is lost: repeat it with `orch resume RUN KEY=VALUE`"
            run = replace(run, state=RunState.HELD, reason=lost.replace("RUN", run.name))
        record = replace(record, run=run)
    return ImportableRun(folder=folder, configs=configs, record=replace(record, attempts=attempts))


def _relocate_record(record: RunRecord, folder: RunDir) -> RunRecord:
    """Return the record with the folder's current path, because folders may be moved or copied."""
    if Path(record.run.run_dir) == folder.path:
        return record
    here = str(folder.checkpoints)
    checkpoints = [
        {**item.__dict__, "path": item.path if item.tier else f"{here}/{item.name}"} for item in record.checkpoints
    ]
    before = str(RunDir(Path(record.run.run_dir)).checkpoints)
    copies = [
        replace(item, tier=here, path=f"{here}/{item.name}") if item.tier == before else item for item in record.copies
    ]
    run = {**record.run.__dict__, "run_dir": str(folder.path)}
    fields = {**record.__dict__, "run": type(record.run)(**run), "copies": tuple(copies)}
    return RunRecord(**{**fields, "checkpoints": tuple(Checkpoint(**item) for item in checkpoints)})


def _fill(store: Store, found: list[ImportableRun], now: float) -> None:
    epoch = max((_epoch(item) for item in found), default=0)
    # The next holder's epoch must be higher than all epochs before the loss of the registry.
    lost = Lease(epoch=epoch, holder=NO_HOLDER, renewed_at=0.0, expires_at=0.0)
    store.together(lambda: store.database.put(lost))
    lease = store.take_lease(HOLDER, now, 3600.0)
    assert lease is not None

    def fill() -> None:
        for item in found:
            for config in item.configs.values():
                store.put_config(config)
            _put_record(store.database, item.record)
            _catch_up(store, item, lease.epoch, now)

    store.together(fill)
    store.drop_lease(lease)


def _put_record(database: Database, record: RunRecord) -> None:
    tests = () if record.restore_test is None else (record.restore_test,)
    rows = (
        record.run, *record.attempts, *record.submissions, *record.generations, *record.checkpoints, *record.copies,
        *record.notices, *tests, *record.transitions,
    )  # fmt: skip
    for row in rows:
        database.put(row)
    for file, offset in record.cursors.items():
        database.put(EventCursor(run=record.run.name, file=file, offset=offset))
    for node in record.nodes:
        known = database.first(Node, cluster=node.cluster, name=node.name)
        if known is None:
            database.put(node)
        elif known.last_seen <= node.last_seen:
            database.update(Node, vars(node), cluster=node.cluster, name=node.name)


def _epoch(item: ImportableRun) -> int:
    epochs = [attempt.epoch for attempt in item.record.attempts]
    tokens = [_read_or_none(LaunchToken.read, place.go) for place in item.folder.all_attempts()]
    epochs += [token.epoch for token in tokens if token is not None]  # None: never launched, or fenced
    return max(epochs, default=0)


def _catch_up(store: Store, item: ImportableRun, epoch: int, now: float) -> None:
    """Import what the jobs have written since the record, then compare the checkpoints with the disk."""
    attempts = item.record.attempts
    for count in range(1, len(attempts) + 1):
        view = ControlledRun(run=item.record.run, attempts=attempts[:count], config=item.config)
        try:
            ingest(store, view, epoch=epoch, now=now)
        except _UNUSABLE as error:
            log.warning("%s: the last events of attempt %d cannot be imported: %s", item.folder.path, count, error)
    _check_against_disk(store, item, epoch, now)
    # Reading old events again must not change the run's update time.
    store.note_run(item.record.run.name, epoch=epoch, now=item.record.run.updated_at)


def _check_against_disk(store: Store, item: ImportableRun, epoch: int, now: float) -> None:
    name, folder = item.record.run.name, item.folder
    config = item.config.checkpoint
    places = shared_places(config, folder)
    entries, unread = look(places)
    for path, error in unread.items():
        log.warning("%s: its checkpoints in %s keep their recorded state: %s", folder.path, path, error)
    seen = of_run(entries, item.record.run, item.record.attempts)
    on_disk = {entry.name: entry for entry in seen}
    # Local disks of nodes and unreadable tiers cannot be checked from here.
    own = set() if str(folder.checkpoints.absolute()) in unread else {""}
    looked = own | {place.path for place in places if place.path not in unread}
    known = {row.name: row for row in store.checkpoints(name)}
    for entry in on_disk.values():
        if entry.name not in known:
            place = str(entry.path).rpartition("/")[0]
            checkpoint = Checkpoint(
                run=name, name=entry.name, step=entry.step, attempt=entry.attempt, trust=Trust.COMMITTED,
                bytes=entry.bytes, path=str(entry.path), committed_at=entry.committed_at,
                tier="" if place == str(folder.checkpoints) else place,
            )  # fmt: skip
            store.put_checkpoint(checkpoint, epoch=epoch)
    for row in known.values():
        if row.trust is not Trust.DELETED and row.name not in on_disk and row.tier in looked:
            store.trust(name, row.name, Trust.DELETED, "its folder is gone", epoch=epoch, now=now)


def _set_aside(path: Path, now: float) -> Path | None:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now))
    there = path.exists()
    for tail in ("", "-wal", "-shm", "-journal"):
        file = path.with_name(path.name + tail)
        if file.exists():
            os.rename(file, path.with_name(f"{path.name}.{stamp}.old{tail}"))
    return path.with_name(f"{path.name}.{stamp}.old") if there else None


def _remove(draft: Path) -> None:
    for tail in ("", "-wal", "-shm", "-journal"):
        draft.with_name(draft.name + tail).unlink(missing_ok=True)


FRESH = 120.0
"""Age in seconds up to which a heartbeat proves that the job is alive."""


def salvage(folder: RunDir, run: dict[str, Any], now: float | None = None) -> RunRecord:
    """Build a record from run.json and the attempts' files. Raises OSError, ValueError or KeyError."""
    now = time.time() if now is None else now
    places = [place for place in folder.all_attempts() if (place.path / "intent.json").exists()]
    attempts = [_salvage_attempt(run["name"], place, newest=place is places[-1]) for place in places]
    if not attempts:
        raise ValueError(f"{folder.attempts} has no attempt")
    state, reason = _run_state(attempts[-1], places[-1], now)
    row = Run(
        name=run["name"],
        state=state,
        reason=reason,
        cluster=run["cluster"],
        run_dir=str(folder.path),
        config_digest=run["config_digest"],
        total_steps=run["total_steps"],
        created_at=run["created_at"],
        updated_at=max(run["created_at"], *(attempt.ended_at or attempt.intent_at for attempt in attempts)),
        identity=run["identity"],
        scheduler=run.get("scheduler", "") or attempts[-1].scheduler,
        tags=tuple(run.get("tags", ())),
        predecessor=run.get("predecessor", ""),
        predecessor_created_at=run.get("predecessor_created_at", 0.0),
        sweep=run.get("sweep") or {},
    )
    note = Transition(
        run=row.name, kind="run", subject=row.name, before="", after=state, reason=reason, time=row.updated_at
    )
    return RunRecord(
        run=row, attempts=tuple(attempts), generations=(), checkpoints=(), transitions=(note,), nodes=(), cursors={}
    )


def _salvage_attempt(run: str, place: AttemptDir, *, newest: bool) -> Attempt:
    intent = read_json(place.path / "intent.json")
    token, started, outcome = (
        _read_or_none(LaunchToken.read, place.go),
        _find_start_event(place),
        _read_or_none(AttemptOutcome.read, place.outcome),
    )
    job_id = (token and token.job_id) or (started and started.data.get("job_id")) or (outcome and outcome.job_id)
    if outcome is not None:
        state = AttemptState.ENDED
    elif not newest:
        state = AttemptState.LOST  # a later attempt was allowed, so this one is over
    elif job_id:
        state = AttemptState.RUNNING if started else AttemptState.SUBMITTED
    else:
        state = AttemptState.INTENT
    return Attempt(
        run=run,
        number=int(intent["attempt"]),
        state=state,
        nonce=intent["nonce"],
        job_name=intent["job_name"],
        reason=outcome.reason if outcome else "",
        epoch=token.epoch if token else 0,
        job_id=str(job_id) if job_id else None,
        excluded=tuple(intent["excluded"]),
        intent_at=float(intent["at"]),
        # It may have been submitted just after its intent, so look-ups decide, as for any ambiguous submission.
        submitted_at=float(intent["at"]),
        started_at=outcome.started_at if outcome else started.time if started else None,
        ended_at=outcome.ended_at if outcome else None,
        last_step=(outcome.step or None) if outcome else None,  # unknown for a command
        failure=outcome.failure.to_json() if outcome and outcome.failure else None,
        scheduler=intent.get("scheduler", ""),
    )


def _run_state(last: Attempt, place: AttemptDir, now: float) -> tuple[RunState, str]:
    """Return the run's state. Only a finished run and a live job are certain; otherwise a person must decide."""
    outcome = _read_or_none(AttemptOutcome.read, place.outcome)
    if outcome is not None and outcome.result is AttemptResult.FINISHED:
        return RunState.SUCCEEDED, outcome.reason
    if outcome is None and _is_fresh(place.heartbeat, now):
        return RunState.RUNNING, "rebuilt from its run directory: its job is alive"
    known = f"its last attempt ended: {outcome.reason}" if outcome else "its last attempt left no outcome"
    return RunState.HELD, f"rebuilt without its record, and {known}; to continue: orch resume {last.run}"


def _is_fresh(path: Path, now: float) -> bool:
    try:
        return now - path.stat().st_mtime < FRESH
    except OSError:
        return False


def _read_or_none(read: Callable[[Path], T], path: Path) -> T | None:
    try:
        return read(path)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _find_start_event(place: AttemptDir) -> Event | None:
    files = sorted(place.events.glob("*.jsonl")) if place.events.is_dir() else []
    events = [event for path in files for event in read_events(path)[0]]
    return next((event for event in events if event.kind == EventKind.ATTEMPT_STARTED), None)
