"""Every call of sbatch with what it answered: a restart forgets neither a job nor how many were submitted."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.create_table(
        "submissions",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("submitted_at", sa.Float(), nullable=False),
        sa.Column("job_id", sa.Text(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("run", "attempt", "number"),
        sa.ForeignKeyConstraint(["run", "attempt"], ["attempts.run", "attempts.number"], name="fk_submissions_attempt"),
    )
    op.create_index("ix_submissions_submitted_at", "submissions", ["submitted_at"])
