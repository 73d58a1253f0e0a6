"""Config of each attempt: `orch resume RUN KEY=VALUE` changes the next attempt's."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.add_column("attempts", sa.Column("config_digest", sa.Text(), nullable=False, server_default=""))
    op.execute("UPDATE attempts SET config_digest = (SELECT config_digest FROM runs WHERE runs.name = attempts.run)")
