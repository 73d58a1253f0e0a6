"""The record of a run: a copy of its rows in its run directory, so that losing the registry loses nothing."""

import logging
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, read_json, write_durably
from checkpointing.storage.storage_errors import error_words
from orchestrator.errors import NotFound
from orchestrator.registry.operations.reads import Reads
from orchestrator.registry.records import (
    Attempt,
    Checkpoint,
    Copy,
    Generation,
    Node,
    Notice,
    RestoreTest,
    Run,
    Submission,
    Transition,
)
from orchestrator.states import Trust
from trainer.contract.config import build
from trainer.contract.run_dir import RunDir

SCHEMA = "orch.record/1"
DELETED_KEPT = 100
"""So many of the checkpoints that were deleted stay in a record, the newest: a run of months deletes thousands."""
_YEAR_3000 = 32_503_680_000
"""Seconds since the epoch."""
log = logging.getLogger("orch.registry")


@dataclass(frozen=True, kw_only=True)
class Record:
    """All rows that belong to one run, and those of the nodes it has used."""

    run: Run
    attempts: tuple[Attempt, ...]
    generations: tuple[Generation, ...]
    checkpoints: tuple[Checkpoint, ...]
    copies: tuple[Copy, ...] = ()
    notices: tuple[Notice, ...] = ()
    restore_test: RestoreTest | None = None  # that this run is
    submissions: tuple[Submission, ...] = ()
    transitions: tuple[Transition, ...]
    nodes: tuple[Node, ...]
    cursors: dict[str, int]
    registry: str = ""  # the file that this was copied from
    changes: int = 0  # how many transitions there were, those left out included

    def encode(self) -> bytes:
        return dump_line({"schema": SCHEMA, **_fields(self)}).encode()

    @classmethod
    def read(cls, path: Path) -> "Record":
        """Parse a record; raises OSError when there is none, ValueError when it is not one."""
        try:
            fields = read_json(path)
        except RecursionError as error:
            raise ValueError(f"{path} is damaged: it is nested too deeply") from error
        if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
            raise ValueError(f"{path} is not a record of a run")
        if found := _impossible(fields):
            raise ValueError(f"{path} is damaged: {found}")
        try:
            record = build(cls, fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        assert isinstance(record, cls)
        return record


def _fields(value: Any) -> Any:
    """`dataclasses.asdict`, without its copies of what lies below: a record is written with every change."""
    if is_dataclass(value):
        return {name: _fields(inner) for name, inner in vars(value).items()}
    return [_fields(item) for item in value] if isinstance(value, tuple) else value


def _impossible(value: Any, name: str = "") -> str:
    """The first number that no registry can hold, or no calendar has; empty where there is none."""
    if isinstance(value, dict):
        return next(filter(None, (_impossible(inner, key) for key, inner in value.items())), "")
    if isinstance(value, list):
        return next(filter(None, (_impossible(inner, name) for inner in value)), "")
    most = _YEAR_3000 if name == "time" or name.endswith("_at") else math.inf if isinstance(value, float) else 1 << 62
    return f"{name} is {value}" if isinstance(value, int | float) and abs(value) > most else ""


def record_of(store: Reads, name: str) -> Record:
    """What the registry knows of a run now."""
    return store.database.read(lambda _: _record_of(store, name))


def _record_of(store: Reads, name: str) -> Record:
    run, attempts = store.run(name), tuple(store.attempts(name))
    used = {node for attempt in attempts for node in attempt.nodes}
    used |= {str(attempt.failure["node"]) for attempt in attempts if attempt.failure and attempt.failure.get("node")}
    checkpoints, transitions = store.checkpoints(name), store.transitions(name)
    forgotten = _long_deleted(checkpoints)
    return Record(
        run=run,
        attempts=attempts,
        generations=tuple(store.generations(name)),
        checkpoints=tuple(one for one in checkpoints if one.name not in forgotten),
        copies=tuple(store.copies(name)),
        notices=tuple(store.notices(name)),
        restore_test=store.restore_test(name),
        submissions=tuple(store.submissions(name)),
        transitions=tuple(one for one in transitions if one.kind != "checkpoint" or one.subject not in forgotten),
        nodes=tuple(node for node in store.nodes() if node.cluster == run.domain and node.name in used),
        cursors=store.cursors(name),
        registry=str(store.database.path),
        changes=len(transitions),
    )


def _long_deleted(checkpoints: Iterable[Checkpoint]) -> set[str]:
    """Names of the checkpoints that were deleted, but for the newest."""
    deleted = sorted((one.step, one.name) for one in checkpoints if one.trust is Trust.DELETED)
    return {name for _, name in deleted[: max(0, len(deleted) - DELETED_KEPT)]}


def write_record(folder: RunDir, record: Record) -> int:
    """Bring the record of one run up to date; how many bytes were written. Raises OSError."""
    # The controller makes the folder after the run's row; a later change of state finds it.
    if not folder.run.exists() or _is_behind(record, folder.record):
        return 0
    data = record.encode()
    write_durably(folder.record, data)
    return len(data)


def write_records(
    store: Reads,
    runs: Iterable[str],
    write: Callable[[RunDir, Record], object] = write_record,
    missed: Callable[[str], None] = log.warning,
) -> None:
    """Bring the records of these runs up to date; a folder that cannot be written only misses this copy.

    `missed` is told of each such folder.
    """
    for name in runs:
        try:
            record = record_of(store, name)
            write(RunDir(Path(record.run.run_dir)), record)
        except (OSError, NotFound) as error:
            why = error_words(error) if isinstance(error, OSError) else str(error)
            missed(f"the change of {name} is in the registry, and not in the record in the run's folder: {why}")


def is_other_registry(named: str, registry: Path) -> bool:
    """Whether a record names another registry than this file; one that was put back from a backup is the same."""
    if not named or Path(named) == registry.absolute():
        return False
    try:
        return not os.path.samefile(named, registry)
    except OSError:
        return True


def _is_behind(record: Record, path: Path) -> bool:
    """Whether a faster process has written a newer record already, or another registry has gone on with the run."""
    try:
        known: Any = read_json(path)
        theirs = {(one["number"], one["nonce"]) for one in known["attempts"]}
        ours = {(attempt.number, attempt.nonce) for attempt in record.attempts}
        if theirs != ours and is_other_registry(known.get("registry", ""), Path(record.registry)):
            return not theirs <= ours
        return int(known.get("changes") or len(known["transitions"])) > record.changes
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):  # whatever was made of it
        return False
