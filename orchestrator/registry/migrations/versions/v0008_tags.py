"""Tags of runs, their sent notifications, and the progress of their removal (`orch rm`)."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    for name, default in (("tags", "[]"), ("notified", "{}"), ("removal", "")):
        op.add_column("runs", sa.Column(name, sa.Text(), nullable=False, server_default=default))
