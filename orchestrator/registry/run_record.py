"""Run record: a copy of a run's rows in its run directory, in case the registry is lost."""

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
from orchestrator.registry.reads import Reads
from orchestrator.registry.records import (
    Attempt,
    Checkpoint,
    CheckpointCopy,
    Generation,
    Node,
    Notice,
    RestoreTest,
    Run,
    Submission,
    Transition,
)
from orchestrator.states import Trust
from trainer.protocol.plain_data import build
from trainer.protocol.run_dir import RunDir

SCHEMA = "orch.record/1"
DELETED_KEPT = 100
"""Maximum number of deleted checkpoints in a record. A long run deletes thousands; the newest are kept."""
_YEAR_3000 = 32_503_680_000
"""Seconds since the epoch."""
log = logging.getLogger("orch.registry")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """All rows of one run and of the nodes it has used."""

    run: Run
    attempts: tuple[Attempt, ...]
    generations: tuple[Generation, ...]
    checkpoints: tuple[Checkpoint, ...]
    copies: tuple[CheckpointCopy, ...] = ()
    notices: tuple[Notice, ...] = ()
    restore_test: RestoreTest | None = None  # the test that this run executes
    submissions: tuple[Submission, ...] = ()
    transitions: tuple[Transition, ...]
    nodes: tuple[Node, ...]
    cursors: dict[str, int]
    registry: str = ""  # file from which it was copied
    changes: int = 0  # number of transitions, including omitted ones

    def encode(self) -> bytes:
        return dump_line({"schema": SCHEMA, **_fields(self)}).encode()

    @classmethod
    def read(cls, path: Path) -> "RunRecord":
        """Parse a record. Raises OSError if it is missing, ValueError if it is invalid."""
        fields = read_json(path)
        if not isinstance(fields, dict) or fields.get("schema") != SCHEMA:
            raise ValueError(f"{path} is not a run record")
        if found := _impossible(fields):
            raise ValueError(f"{path} is damaged: {found}")
        try:
            record: RunRecord = build(cls, fields)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} is damaged: {error}") from error
        return record


def _fields(value: Any) -> Any:
    """Return the same as `dataclasses.asdict`, but without deep copies: a record is written after every change."""
    if is_dataclass(value):
        return {name: _fields(inner) for name, inner in vars(value).items()}
    return [_fields(item) for item in value] if isinstance(value, tuple) else value


def _impossible(value: Any, name: str = "") -> str:
    """Return the first number outside the range of the registry or the calendar; "" if all are valid."""
    if isinstance(value, dict):
        return next(filter(None, (_impossible(inner, key) for key, inner in value.items())), "")
    if isinstance(value, list):
        return next(filter(None, (_impossible(inner, name) for inner in value)), "")
    most = _YEAR_3000 if name == "time" or name.endswith("_at") else math.inf if isinstance(value, float) else 1 << 62
    return f"{name} is {value}" if isinstance(value, int | float) and abs(value) > most else ""


def load_record(store: Reads, name: str) -> RunRecord:
    """Return the record of a run from its current rows."""
    return store.database.read(lambda: _load_record(store, name))


def _load_record(store: Reads, name: str) -> RunRecord:
    run, attempts = store.run(name), tuple(store.attempts(name))
    used = {node for attempt in attempts for node in attempt.nodes}
    used |= {str(attempt.failure["node"]) for attempt in attempts if attempt.failure and attempt.failure.get("node")}
    checkpoints, transitions = store.checkpoints(name), store.transitions(name)
    forgotten = _long_deleted(checkpoints)
    return RunRecord(
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
    deleted = sorted((one.step, one.name) for one in checkpoints if one.trust is Trust.DELETED)
    return {name for _, name in deleted[: max(0, len(deleted) - DELETED_KEPT)]}


def write_record(folder: RunDir, record: RunRecord) -> int:
    """Update the record of one run; return the number of bytes written. Raises OSError."""
    # The folder is created after the run's row; a later change of state writes the record.
    if not folder.run.exists() or _is_behind(record, folder.record):
        return 0
    data = record.encode()
    write_durably(folder.record, data)
    return len(data)


def write_records(
    store: Reads,
    runs: Iterable[str],
    write: Callable[[RunDir, RunRecord], object] = write_record,
    missed: Callable[[str], None] = log.warning,
) -> None:
    """Update the records of these runs. A folder that cannot be written to merely goes without its copy.

    `missed` is called with a message for each such folder.
    """
    for name in runs:
        try:
            record = load_record(store, name)
            write(RunDir(Path(record.run.run_dir)), record)
        except (OSError, NotFound) as error:
            why = error_words(error) if isinstance(error, OSError) else str(error)
            missed(f"the change to {name} is in the registry, but not in the record in the run's folder: {why}")


def is_other_registry(named: str, registry: Path) -> bool:
    """Return whether a record names a registry other than this file; a restored backup counts as the same."""
    if not named or Path(named) == registry.absolute():
        return False
    try:
        return not os.path.samefile(named, registry)
    except OSError:
        return True


def _is_behind(record: RunRecord, path: Path) -> bool:
    """Return whether a newer record exists, from a faster process or from another registry that drives the run."""
    try:
        known: Any = read_json(path)
        theirs = {(one["number"], one["nonce"]) for one in known["attempts"]}
        ours = {(attempt.number, attempt.nonce) for attempt in record.attempts}
        if theirs != ours and is_other_registry(known.get("registry", ""), Path(record.registry)):
            return not theirs <= ours
        return int(known["changes"]) > record.changes
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # damaged or foreign content
        return False
