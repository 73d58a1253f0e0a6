"""What was noticed inside an attempt: incidents, stragglers, batches left out, spare nodes used, unfit nodes."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.create_table(
        "notices",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.Column("seq", sa.Integer(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("generation", sa.Integer(), nullable=False),
        sa.Column("time", sa.Float(), nullable=False),
        sa.Column("node", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run", "attempt", "source", "seq"),
        sa.ForeignKeyConstraint(["run", "attempt"], ["attempts.run", "attempts.number"], name="fk_notices_attempt"),
    )
    op.create_index("ix_notices_kind", "notices", ["kind", "time"])
