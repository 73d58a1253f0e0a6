"""Insertion of rows read from run directories into a registry under reconstruction."""

from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.dialects.sqlite import insert as insert_or

from orchestrator.registry.database import StoreOperations, writes
from orchestrator.registry.models import (
    AttemptRow,
    Base,
    CheckpointRow,
    CopyRow,
    CursorRow,
    GenerationRow,
    LeaseRow,
    NodeRow,
    NoticeRow,
    RestoreTestRow,
    RunRow,
    SubmissionRow,
    TransitionRow,
)
from orchestrator.registry.operations.controller_writes import NOBODY
from orchestrator.registry.operations.run_record import RunRecord
from orchestrator.registry.records import (
    Attempt,
    Checkpoint,
    CheckpointCopy,
    Generation,
    Node,
    Notice,
    RestoreTest,
    Run,
    Submission,
    Transition,
)
from orchestrator.registry.rows import insertion

Row = Run | Attempt | Submission | Generation | Checkpoint | CheckpointCopy | Notice | RestoreTest | Transition


class RebuildWrites(StoreOperations):
    """Writes of `orch db rebuild`, on a file that no other process has open."""

    @writes
    def put_record(self, connection: Connection, record: RunRecord) -> None:
        """Insert all recorded rows of a run; for a node that is already known, the later row is kept."""
        rows: list[tuple[type[Base], Row]] = [(RunRow, record.run)]
        rows += [(AttemptRow, item) for item in record.attempts]
        rows += [(SubmissionRow, item) for item in record.submissions]
        rows += [(GenerationRow, item) for item in record.generations]
        rows += [(CheckpointRow, item) for item in record.checkpoints]
        rows += [(CopyRow, item) for item in record.copies]
        rows += [(NoticeRow, item) for item in record.notices]
        rows += [(RestoreTestRow, item) for item in (record.restore_test,) if item is not None]
        rows += [(TransitionRow, item) for item in record.transitions]
        for model, item in rows:
            connection.execute(insertion(model), dict(item.__dict__))
        for file, offset in record.cursors.items():
            connection.execute(insertion(CursorRow), {"run": record.run.name, "file": file, "offset": offset})
        for node in record.nodes:
            _put_node(connection, node)

    @writes
    def start_epochs_after(self, connection: Connection, epoch: int) -> None:
        """Set the epoch so that the next lease holder is newer than every one before the loss of the registry."""
        lost: dict[str, Any] = {"epoch": epoch, "holder": NOBODY, "renewed_at": 0.0, "expires_at": 0.0}
        row = insert_or(LeaseRow).values(id=1, ticked_at=0.0, **lost)
        connection.execute(row.on_conflict_do_update(index_elements=("id",), set_=lost))


def _put_node(connection: Connection, node: Node) -> None:
    wanted = (NodeRow.cluster == node.cluster) & (NodeRow.name == node.name)
    known = connection.execute(select(NodeRow.last_seen).where(wanted)).scalar()
    row = insert_or(NodeRow).values(**node.__dict__)
    if known is None or known <= node.last_seen:
        rest = {key: value for key, value in node.__dict__.items() if key not in ("cluster", "name")}
        connection.execute(row.on_conflict_do_update(index_elements=("cluster", "name"), set_=rest))
