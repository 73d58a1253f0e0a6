"""Calls of sbatch: written down before they are made, with what they answered."""

from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from orchestrator.registry.database import StoreOperations, writes
from orchestrator.registry.models import SubmissionRow
from orchestrator.registry.operations.lease_writes import fence
from orchestrator.registry.rows import changed


class SubmissionWrites(StoreOperations):
    """Writes of the lease's holder about its submissions."""

    @writes
    def add_submission(self, connection: Connection, run: str, attempt: int, *, epoch: int, now: float) -> int:
        """Write down that the attempt's job is about to be submitted (again); returns the submission's number."""
        fence(connection, epoch)
        wanted = (SubmissionRow.run == run) & (SubmissionRow.attempt == attempt)
        query = select(func.coalesce(func.max(SubmissionRow.number), 0)).where(wanted)
        number = int(connection.execute(query).scalar_one()) + 1
        values = {"run": run, "attempt": attempt, "number": number, "submitted_at": now, "outcome": ""}
        connection.execute(insert(SubmissionRow).values(**values))
        return number

    @writes
    def note_submission(
        self, connection: Connection, /, run: str, attempt: int, number: int, *, epoch: int, **changes: Any
    ) -> None:
        """Write down what became of a submission."""
        fence(connection, epoch)
        wanted = (SubmissionRow.run == run) & (SubmissionRow.attempt == attempt) & (SubmissionRow.number == number)
        connection.execute(update(SubmissionRow).where(wanted).values(**changed(SubmissionRow, changes)))
