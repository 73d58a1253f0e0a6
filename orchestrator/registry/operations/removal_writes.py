"""Removal of a run from the registry: the intent first, the rows last (`orch rm`)."""

from collections.abc import Sequence
from enum import StrEnum

from sqlalchemy import Connection, delete, select

from orchestrator.errors import Precondition
from orchestrator.registry.database import StoreOperations, writes
from orchestrator.registry.models import (
    AttemptRow,
    CheckpointRow,
    CopyRow,
    CursorRow,
    GenerationRow,
    NoticeRow,
    RestoreTestRow,
    RunRow,
    SubmissionRow,
    TransitionRow,
    UserRequestRow,
)
from orchestrator.registry.records import Attempt, Run
from orchestrator.registry.rows import alter_run, find_rows, the_run
from orchestrator.states import ENDED_RUNS, LIVE_ATTEMPTS, LIVE_RUNS, AttemptState

_BELONGING = (
    CursorRow, UserRequestRow, TransitionRow, NoticeRow, CopyRow, CheckpointRow, GenerationRow, SubmissionRow,
    AttemptRow,
)  # fmt: skip
"""Tables with rows of a run, referring tables first."""


class Removal(StrEnum):
    """Progress of a run's removal."""

    NONE = ""
    BEGUN = "begun"  # nothing of it may be resumed or tested any more
    SET_ASIDE = "set aside"  # its folder has been renamed; its remains have the new name


class RemovalWrites(StoreOperations):
    """Writes of `orch rm`. They need no lease, because an ended run has no controller."""

    @writes
    def begin_removal(self, connection: Connection, run: str) -> None:
        """Mark the run as being removed, which stops new work on it. Raises Precondition if it is in use."""
        found = the_run(connection, run)
        attempts = find_rows(connection, AttemptRow, Attempt, "number", run=run)
        under_way = (RestoreTestRow.run == run) & RestoreTestRow.ended_at.is_(None)
        tests = connection.execute(select(RestoreTestRow.test).where(under_way)).scalars().all()
        require_removable(found, attempts, tests)
        if not found.removal:
            alter_run(connection, run, removal=Removal.BEGUN, reason=f"is being removed; to finish that: orch rm {run}")

    @writes
    def note_set_aside(self, connection: Connection, run: str) -> None:
        """Record that a run's folder was renamed; from now on it counts as gone, not hidden."""
        alter_run(connection, run, removal=Removal.SET_ASIDE)

    @writes
    def delete_run(self, connection: Connection, run: str) -> None:
        """Delete every row of a run whose removal was begun."""
        assert the_run(connection, run).removal, f"the removal of {run} was not begun"
        connection.execute(delete(RestoreTestRow).where(RestoreTestRow.test == run))
        for table in _BELONGING:
            connection.execute(delete(table).where(table.run == run))
        connection.execute(delete(RunRow).where(RunRow.name == run))


def require_removable(run: Run, attempts: Sequence[Attempt], tests: Sequence[str]) -> None:
    """Raise Precondition if a run is or may be alive, or if `tests` of it are in progress."""
    # In an ended run, a LOST attempt never comes back.
    lost = attempts[-1].state is AttemptState.LOST and run.state not in ENDED_RUNS
    if run.state in LIVE_RUNS or lost or any(attempt.state in LIVE_ATTEMPTS for attempt in attempts):
        raise Precondition(
            f"{run.name} is {run.state}" + ("" if run.state in LIVE_RUNS else ", and its last job may still be alive"),
            where=run.reason,
            hint=f"`orch cancel {run.name}` stops it; then the same again",
        )
    if tests:
        raise Precondition(
            f"a restore test of {run.name} is under way: {tests[0]}",
            where=run.name,
            hint=f"`orch wait {tests[0]}`, or `orch cancel {tests[0]}`; then the same again",
        )
