"""Restore tests, and the digest of every checkpoint's manifest at commit."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    op.add_column("checkpoints", sa.Column("manifest", sa.Text(), nullable=False, server_default=""))
    op.create_table(
        "restore_tests",
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("test", "run", "checkpoint", "layout")),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("begun_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True),
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("verdict", "reason", "evidence")),
        sa.Column("forced", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("test"),
        sa.ForeignKeyConstraint(["test"], ["runs.name"], name="fk_restore_tests_test"),
    )
    op.create_index("ix_restore_tests_run", "restore_tests", ["run", "begun_at"])
    op.create_index("ix_restore_tests_ended_at", "restore_tests", ["ended_at"])
