"""Tables of the registry as SQLAlchemy's typed models; `migrations/` creates them."""

import json
import math
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from sqlalchemy import Dialect, Float, ForeignKey, ForeignKeyConstraint, Index, Integer, MetaData, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from checkpointing.storage.durable import dump_line, number
from orchestrator.states import AttemptState, RunState, Trust


class Words(TypeDecorator[tuple[str, ...]]):
    """Tuple of strings as JSON text."""

    impl, cache_ok = Text, True

    def process_bind_param(self, value: tuple[str, ...] | None, dialect: Dialect) -> str | None:
        return None if value is None else dump_line(list(value))

    def process_result_value(self, value: str | None, dialect: Dialect) -> tuple[str, ...] | None:
        return None if value is None else tuple(json.loads(value))


class Document(TypeDecorator[dict[str, Any]]):
    """JSON object as text; None is NULL."""

    impl, cache_ok = Text, True

    def process_bind_param(self, value: dict[str, Any] | None, dialect: Dialect) -> str | None:
        return None if value is None else dump_line(value)

    def process_result_value(self, value: str | None, dialect: Dialect) -> dict[str, Any] | None:
        return None if value is None else json.loads(value)


class Number(TypeDecorator[float]):
    """Float that preserves NaN, which SQLite would store as NULL."""

    impl, cache_ok = Float, True

    def bind_processor(self, dialect: Dialect) -> Callable[[Any], Any]:
        # Float's own processor would turn the text back into a NaN, so it is omitted.
        return lambda value: value if value is None or math.isfinite(value) else json.loads(dump_line(value))

    def process_result_value(self, value: Any, dialect: Dialect) -> float | None:
        return None if value is None else number(value)


class EnumText(TypeDecorator[StrEnum]):
    """Member of a StrEnum, stored by its value."""

    impl, cache_ok = Text, True

    def __init__(self, kind: type[StrEnum]) -> None:
        super().__init__()
        self.kind = kind

    def process_bind_param(self, value: StrEnum | None, dialect: Dialect) -> str | None:
        return None if value is None else str(self.kind(value))

    def process_result_value(self, value: str | None, dialect: Dialect) -> StrEnum | None:
        return None if value is None else self.kind(value)


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention={"fk": "fk_%(table_name)s_%(column_0_name)s", "ix": "ix_%(column_0_label)s"})
    type_annotation_map = {
        str: Text(),
        float: Number(),
        dict[str, Any]: Document(),
        tuple[str, ...]: Words(),
        RunState: EnumText(RunState),
        AttemptState: EnumText(AttemptState),
        Trust: EnumText(Trust),
    }


class ConfigRow(Base):
    """Resolved config under the digest of its bytes; triggers refuse changes and deletion."""

    __tablename__ = "configs"
    digest: Mapped[str] = mapped_column(primary_key=True)
    data: Mapped[str]


class RunRow(Base):
    """Run; `id` grows with time, so the newest runs have the highest ones."""

    __tablename__ = "runs"
    __table_args__ = (Index("ix_runs_state", "state", "id"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(unique=True)
    state: Mapped[RunState]
    reason: Mapped[str]
    cluster: Mapped[str]
    run_dir: Mapped[str]
    config_digest: Mapped[str] = mapped_column(ForeignKey("configs.digest"))
    total_steps: Mapped[int]
    step: Mapped[int]
    loss: Mapped[float | None]
    not_before: Mapped[float]
    fresh_from: Mapped[int]
    created_at: Mapped[float]
    updated_at: Mapped[float]
    identity: Mapped[dict[str, Any]]
    scheduler: Mapped[str] = mapped_column(server_default="")
    tags: Mapped[tuple[str, ...]] = mapped_column(server_default="[]")
    notified: Mapped[dict[str, Any]] = mapped_column(server_default="{}")
    removal: Mapped[str] = mapped_column(server_default="")


class AttemptRow(Base):
    __tablename__ = "attempts"
    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[AttemptState]
    nonce: Mapped[str]
    job_name: Mapped[str] = mapped_column(unique=True)
    reason: Mapped[str]
    epoch: Mapped[int]
    job_id: Mapped[str | None]
    submit_time: Mapped[str | None]
    job_state: Mapped[str | None]
    nodes: Mapped[tuple[str, ...]]
    excluded: Mapped[tuple[str, ...]]
    intent_at: Mapped[float]
    submitted_at: Mapped[float | None]
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]
    resumed_from: Mapped[int | None]
    first_step: Mapped[int | None]
    last_step: Mapped[int | None]
    saved_step: Mapped[int | None]
    generations: Mapped[int]
    failure: Mapped[dict[str, Any] | None]
    decision: Mapped[dict[str, Any] | None]
    scheduler: Mapped[str] = mapped_column(server_default="")
    config_digest: Mapped[str] = mapped_column(server_default="")
    smaller_world: Mapped[dict[str, Any] | None]


class SubmissionRow(Base):
    """Call of sbatch for an attempt; `outcome` is empty while it is unknown."""

    __tablename__ = "submissions"
    __table_args__ = (
        ForeignKeyConstraint(["run", "attempt"], ["attempts.run", "attempts.number"], name="fk_submissions_attempt"),
        Index("ix_submissions_submitted_at", "submitted_at"),
    )
    run: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    submitted_at: Mapped[float]
    job_id: Mapped[str | None]
    outcome: Mapped[str]


class GenerationRow(Base):
    __tablename__ = "generations"
    __table_args__ = (
        ForeignKeyConstraint(["run", "attempt"], ["attempts.run", "attempts.number"], name="fk_generations_attempt"),
    )
    run: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    started_at: Mapped[float]
    ended_at: Mapped[float | None]
    resumed_from: Mapped[int | None]
    last_step: Mapped[int | None]
    reason: Mapped[str]
    failure: Mapped[dict[str, Any] | None]
    tier: Mapped[str] = mapped_column(server_default="")


class CheckpointRow(Base):
    __tablename__ = "checkpoints"
    __table_args__ = (Index("ix_checkpoints_step", "run", "step"),)
    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    step: Mapped[int]
    attempt: Mapped[int]
    trust: Mapped[Trust]
    bytes: Mapped[int]
    path: Mapped[str]
    committed_at: Mapped[float]
    reason: Mapped[str]
    tier: Mapped[str] = mapped_column(server_default="")
    seconds: Mapped[float | None]
    stall: Mapped[float | None]
    manifest: Mapped[str] = mapped_column(server_default="")


class RestoreTestRow(Base):
    """Restore test; `test` is the run that executes it, `run` the run whose checkpoint it restores."""

    __tablename__ = "restore_tests"
    __table_args__ = (
        Index("ix_restore_tests_run", "run", "begun_at"),
        Index("ix_restore_tests_ended_at", "ended_at"),
    )
    test: Mapped[str] = mapped_column(ForeignKey("runs.name", name="fk_restore_tests_test"), primary_key=True)
    run: Mapped[str]
    checkpoint: Mapped[str]
    layout: Mapped[str]
    step: Mapped[int]
    begun_at: Mapped[float]
    ended_at: Mapped[float | None]
    verdict: Mapped[str]
    reason: Mapped[str]
    evidence: Mapped[dict[str, Any]]
    forced: Mapped[bool] = mapped_column(Integer)


class CopyRow(Base):
    """Copy of a checkpoint in a further tier; a deleted copy has no row."""

    __tablename__ = "copies"
    __table_args__ = (
        ForeignKeyConstraint(["run", "name"], ["checkpoints.run", "checkpoints.name"], name="fk_copies_checkpoint"),
    )
    run: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    tier: Mapped[str] = mapped_column(primary_key=True)
    path: Mapped[str]
    bytes: Mapped[int]
    copied_at: Mapped[float]


class TransitionRow(Base):
    __tablename__ = "transitions"
    __table_args__ = (Index("ix_transitions_run", "run", "id"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    run: Mapped[str] = mapped_column(ForeignKey("runs.name"))
    kind: Mapped[str]
    subject: Mapped[str]
    before: Mapped[str]
    after: Mapped[str]
    reason: Mapped[str]
    time: Mapped[float]


class NoticeRow(Base):
    """Event of an attempt kept for people; source and number identify it."""

    __tablename__ = "notices"
    __table_args__ = (
        ForeignKeyConstraint(["run", "attempt"], ["attempts.run", "attempts.number"], name="fk_notices_attempt"),
        Index("ix_notices_kind", "kind", "time"),
    )
    run: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    source: Mapped[str] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    kind: Mapped[str]
    generation: Mapped[int]
    time: Mapped[float]
    node: Mapped[str]
    data: Mapped[dict[str, Any]]


class NodeRow(Base):
    __tablename__ = "nodes"
    cluster: Mapped[str] = mapped_column(primary_key=True)
    name: Mapped[str] = mapped_column(primary_key=True)
    first_seen: Mapped[float]
    last_seen: Mapped[float]
    attempts: Mapped[int]
    failures: Mapped[int]
    excluded_until: Mapped[float]
    reason: Mapped[str]


class LeaseRow(Base):
    """Lease of a scheduler instance; epochs grow across all rows, so an epoch identifies its row."""

    __tablename__ = "lease"
    __table_args__ = (Index("ix_lease_scheduler", "scheduler", unique=True),)
    id: Mapped[int] = mapped_column(primary_key=True)
    epoch: Mapped[int]
    holder: Mapped[str]
    renewed_at: Mapped[float]
    expires_at: Mapped[float]
    ticked_at: Mapped[float]
    scheduler: Mapped[str] = mapped_column(server_default="")


class UserRequestRow(Base):
    __tablename__ = "asks"
    __table_args__ = (Index("ix_asks_answered_at", "answered_at"),)
    id: Mapped[int] = mapped_column(primary_key=True)
    run: Mapped[str] = mapped_column(ForeignKey("runs.name"))
    verb: Mapped[str]
    args: Mapped[dict[str, Any]]
    asked_at: Mapped[float]
    answered_at: Mapped[float | None]
    answer: Mapped[str]


class CursorRow(Base):
    """Byte offset up to which an event file of a run has been read."""

    __tablename__ = "cursors"
    run: Mapped[str] = mapped_column(ForeignKey("runs.name"), primary_key=True)
    file: Mapped[str] = mapped_column(primary_key=True)
    offset: Mapped[int]
