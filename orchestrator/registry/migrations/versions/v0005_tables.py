"""Tables of the first release. Registries of the revisions 0001 to 0004 were never released and are refused."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = None

_IMMUTABLE = """
CREATE TRIGGER configs_never_{change} BEFORE {change} ON configs
BEGIN SELECT RAISE(ABORT, 'a config is never {past}: runs point at it'); END
"""
# REPLACE deletes without firing delete triggers, so a second row with the same digest must be refused too.
_NOT_REPLACED = """
CREATE TRIGGER configs_never_replaced BEFORE INSERT ON configs
WHEN EXISTS (SELECT 1 FROM configs WHERE digest = NEW.digest AND data IS NOT NEW.data)
BEGIN SELECT RAISE(ABORT, 'a config is never changed: runs point at it'); END
"""


def _text(name: str, *, null: bool = False) -> "sa.Column[str]":
    return sa.Column(name, sa.Text(), nullable=null)


def _text_or_empty(name: str) -> "sa.Column[str]":
    return sa.Column(name, sa.Text(), nullable=False, server_default="")


def _whole(name: str, *, null: bool = False) -> "sa.Column[int]":
    return sa.Column(name, sa.Integer(), nullable=null)


def _real(name: str, *, null: bool = False) -> "sa.Column[float]":
    return sa.Column(name, sa.Float(), nullable=null)


def upgrade() -> None:
    _configs()
    _runs()
    _attempts()
    _submissions()
    _generations()
    _checkpoints()
    _copies()
    _transitions()
    _notices()
    _controller()


def _configs() -> None:
    op.create_table("configs", _text("digest"), _text("data"), sa.PrimaryKeyConstraint("digest"))
    for change, past in (("UPDATE", "changed"), ("DELETE", "deleted")):
        op.execute(_IMMUTABLE.format(change=change, past=past))
    op.execute(_NOT_REPLACED)


def _runs() -> None:
    op.create_table(
        "runs",
        _whole("id"),
        *(_text(name) for name in ("name", "state", "reason", "cluster", "run_dir", "config_digest")),
        *(_whole(name) for name in ("total_steps", "step")),
        _real("loss", null=True),
        _real("not_before"),
        _whole("fresh_from"),
        _real("created_at"),
        _real("updated_at"),
        _text("identity"),
        _text_or_empty("scheduler"),
        sa.PrimaryKeyConstraint("id"),
        sa.UniqueConstraint("name"),
        sa.ForeignKeyConstraint(["config_digest"], ["configs.digest"], name="fk_runs_config_digest"),
    )
    op.create_index("ix_runs_state", "runs", ["state", "id"])


def _attempts() -> None:
    op.create_table(
        "attempts",
        _text("run"),
        _whole("number"),
        *(_text(name) for name in ("state", "nonce", "job_name", "reason")),
        _whole("epoch"),
        *(_text(name, null=True) for name in ("job_id", "submit_time", "job_state")),
        *(_text(name) for name in ("nodes", "excluded")),
        _real("intent_at"),
        *(_real(name, null=True) for name in ("submitted_at", "started_at", "ended_at")),
        *(_whole(name, null=True) for name in ("resumed_from", "first_step", "last_step", "saved_step")),
        _whole("generations"),
        *(_text(name, null=True) for name in ("failure", "decision")),
        _text_or_empty("scheduler"),
        sa.PrimaryKeyConstraint("run", "number"),
        sa.UniqueConstraint("job_name"),
        sa.ForeignKeyConstraint(["run"], ["runs.name"], name="fk_attempts_run"),
    )


def _submissions() -> None:
    op.create_table(
        "submissions",
        _text("run"),
        *(_whole(name) for name in ("attempt", "number")),
        _real("submitted_at"),
        _text("job_id", null=True),
        _text("outcome"),
        sa.PrimaryKeyConstraint("run", "attempt", "number"),
        sa.ForeignKeyConstraint(["run", "attempt"], ["attempts.run", "attempts.number"], name="fk_submissions_attempt"),
    )
    op.create_index("ix_submissions_submitted_at", "submissions", ["submitted_at"])


def _generations() -> None:
    op.create_table(
        "generations",
        _text("run"),
        _whole("attempt"),
        _whole("number"),
        _real("started_at"),
        _real("ended_at", null=True),
        *(_whole(name, null=True) for name in ("resumed_from", "last_step")),
        _text("reason"),
        _text("failure", null=True),
        _text_or_empty("tier"),
        sa.PrimaryKeyConstraint("run", "attempt", "number"),
        sa.ForeignKeyConstraint(["run", "attempt"], ["attempts.run", "attempts.number"], name="fk_generations_attempt"),
    )


def _checkpoints() -> None:
    op.create_table(
        "checkpoints",
        _text("run"),
        _text("name"),
        *(_whole(name) for name in ("step", "attempt")),
        _text("trust"),
        _whole("bytes"),
        _text("path"),
        _real("committed_at"),
        _text("reason"),
        _text_or_empty("tier"),
        *(_real(name, null=True) for name in ("seconds", "stall")),
        sa.PrimaryKeyConstraint("run", "name"),
        sa.ForeignKeyConstraint(["run"], ["runs.name"], name="fk_checkpoints_run"),
    )
    op.create_index("ix_checkpoints_step", "checkpoints", ["run", "step"])


def _copies() -> None:
    op.create_table(
        "copies",
        *(_text(name) for name in ("run", "name", "tier", "path")),
        _whole("bytes"),
        _real("copied_at"),
        sa.PrimaryKeyConstraint("run", "name", "tier"),
        sa.ForeignKeyConstraint(["run", "name"], ["checkpoints.run", "checkpoints.name"], name="fk_copies_checkpoint"),
    )


def _transitions() -> None:
    op.create_table(
        "transitions",
        _whole("id"),
        *(_text(name) for name in ("run", "kind", "subject", "before", "after", "reason")),
        _real("time"),
        sa.PrimaryKeyConstraint("id"),
        sa.ForeignKeyConstraint(["run"], ["runs.name"], name="fk_transitions_run"),
    )
    op.create_index("ix_transitions_run", "transitions", ["run", "id"])


def _notices() -> None:
    op.create_table(
        "notices",
        _text("run"),
        _whole("attempt"),
        _text("source"),
        _whole("seq"),
        _text("kind"),
        _whole("generation"),
        _real("time"),
        *(_text(name) for name in ("node", "data")),
        sa.PrimaryKeyConstraint("run", "attempt", "source", "seq"),
        sa.ForeignKeyConstraint(["run", "attempt"], ["attempts.run", "attempts.number"], name="fk_notices_attempt"),
    )
    op.create_index("ix_notices_kind", "notices", ["kind", "time"])


def _controller() -> None:
    """Create the tables for nodes, leases, requests, and offsets in event files."""
    op.create_table(
        "nodes",
        *(_text(name) for name in ("cluster", "name")),
        *(_real(name) for name in ("first_seen", "last_seen")),
        *(_whole(name) for name in ("attempts", "failures")),
        _real("excluded_until"),
        _text("reason"),
        sa.PrimaryKeyConstraint("cluster", "name"),
    )
    op.create_table(
        "lease",
        *(_whole(name) for name in ("id", "epoch")),
        _text("holder"),
        *(_real(name) for name in ("renewed_at", "expires_at", "ticked_at")),
        _text_or_empty("scheduler"),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("ix_lease_scheduler", "lease", ["scheduler"], unique=True)
    op.create_table(
        "asks",
        _whole("id"),
        *(_text(name) for name in ("run", "verb", "args")),
        _real("asked_at"),
        _real("answered_at", null=True),
        _text("answer"),
        sa.PrimaryKeyConstraint("id"),
        sa.ForeignKeyConstraint(["run"], ["runs.name"], name="fk_asks_run"),
    )
    op.create_index("ix_asks_answered_at", "asks", ["answered_at"])
    op.create_table(
        "cursors",
        *(_text(name) for name in ("run", "file")),
        _whole("offset"),
        sa.PrimaryKeyConstraint("run", "file"),
        sa.ForeignKeyConstraint(["run"], ["runs.name"], name="fk_cursors_run"),
    )
    op.create_table("meta", *(_text(name) for name in ("key", "value")), sa.PrimaryKeyConstraint("key"))
