"""Which scheduler instance a run, an attempt and a lease belong to; empty where that is not known."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    for table in ("runs", "attempts", "lease"):
        op.add_column(table, sa.Column("scheduler", sa.Text(), nullable=False, server_default=""))
    op.create_index("ix_lease_scheduler", "lease", ["scheduler"], unique=True)
