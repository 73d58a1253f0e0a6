"""Attempts smaller than their run (`cluster.min_nodes`)."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("smaller_world", sa.Text(), nullable=True))
