"""Where checkpoints lie besides the run's own folder, what a save has cost, and where a generation was loaded from."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.add_column("generations", sa.Column("tier", sa.Text(), nullable=False, server_default=""))
    op.add_column("checkpoints", sa.Column("tier", sa.Text(), nullable=False, server_default=""))
    op.add_column("checkpoints", sa.Column("seconds", sa.Float(), nullable=True))
    op.add_column("checkpoints", sa.Column("stall", sa.Float(), nullable=True))
    op.create_table(
        "copies",
        *(sa.Column(name, sa.Text(), nullable=False) for name in ("run", "name", "tier", "path")),
        sa.Column("bytes", sa.Integer(), nullable=False),
        sa.Column("copied_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("run", "name", "tier"),
        sa.ForeignKeyConstraint(["run", "name"], ["checkpoints.run", "checkpoints.name"], name="fk_copies_checkpoint"),
    )
