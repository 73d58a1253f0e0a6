"""Run, attempt and checkpoint states, and the table of allowed transitions."""

from enum import StrEnum


class RunState(StrEnum):
    CREATED = "CREATED"
    QUEUED = "QUEUED"
    RUNNING = "RUNNING"
    RECOVERING = "RECOVERING"
    HELD = "HELD"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class AttemptState(StrEnum):
    INTENT = "INTENT"
    SUBMITTED = "SUBMITTED"
    RUNNING = "RUNNING"
    ENDED = "ENDED"
    LOST = "LOST"


class Trust(StrEnum):
    WRITING = "WRITING"
    COMMITTED = "COMMITTED"
    VERIFIED = "VERIFIED"
    RESTORED = "RESTORED"
    SUSPECT = "SUSPECT"
    CORRUPT = "CORRUPT"
    DELETED = "DELETED"


_LIVE = {RunState.CREATED, RunState.QUEUED, RunState.RUNNING, RunState.RECOVERING}
LIVE_RUNS = frozenset(_LIVE)
ENDED_RUNS = frozenset({RunState.SUCCEEDED, RunState.FAILED, RunState.CANCELLED})
LIVE_ATTEMPTS = frozenset({AttemptState.INTENT, AttemptState.SUBMITTED, AttemptState.RUNNING})

_STOPS = {RunState.HELD, RunState.FAILED, RunState.CANCELLED, RunState.SUCCEEDED}
TRANSITIONS: dict[type[StrEnum], dict[StrEnum, frozenset[StrEnum]]] = {
    RunState: {
        RunState.CREATED: frozenset({RunState.QUEUED, RunState.RUNNING, RunState.RECOVERING} | _STOPS),
        RunState.QUEUED: frozenset({RunState.RUNNING, RunState.RECOVERING} | _STOPS),
        RunState.RUNNING: frozenset({RunState.QUEUED, RunState.RECOVERING} | _STOPS),
        RunState.RECOVERING: frozenset({RunState.QUEUED, RunState.RUNNING} | _STOPS),
        RunState.HELD: frozenset({RunState.RECOVERING, RunState.CANCELLED}),
        RunState.FAILED: frozenset({RunState.RECOVERING}),
        RunState.CANCELLED: frozenset({RunState.RECOVERING}),
        RunState.SUCCEEDED: frozenset({RunState.RECOVERING}),  # with more steps, by `orch resume`
    },
    AttemptState: {
        AttemptState.INTENT: frozenset({AttemptState.SUBMITTED, AttemptState.ENDED, AttemptState.LOST}),
        AttemptState.SUBMITTED: frozenset({AttemptState.RUNNING, AttemptState.ENDED, AttemptState.LOST}),
        AttemptState.RUNNING: frozenset({AttemptState.ENDED, AttemptState.LOST}),
        AttemptState.ENDED: frozenset(),
        AttemptState.LOST: frozenset({AttemptState.ENDED}),
    },
    Trust: {
        Trust.WRITING: frozenset({Trust.COMMITTED, Trust.CORRUPT, Trust.DELETED}),
        Trust.COMMITTED: frozenset({Trust.VERIFIED, Trust.RESTORED, Trust.SUSPECT, Trust.CORRUPT, Trust.DELETED}),
        Trust.VERIFIED: frozenset({Trust.RESTORED, Trust.SUSPECT, Trust.CORRUPT, Trust.DELETED}),
        Trust.RESTORED: frozenset({Trust.SUSPECT, Trust.CORRUPT, Trust.DELETED}),
        # To RESTORED or COMMITTED: by a restore test, or by failures that prove the program to be the cause.
        Trust.SUSPECT: frozenset({Trust.COMMITTED, Trust.VERIFIED, Trust.RESTORED, Trust.CORRUPT, Trust.DELETED}),
        # A restore verifies every byte, so afterwards a good copy exists or the file is readable again.
        Trust.CORRUPT: frozenset({Trust.RESTORED, Trust.DELETED}),
        Trust.DELETED: frozenset(),
    },
}
"""Keyed by kind first: members of different enums with the same value are equal as strings."""


def may_move(before: StrEnum, after: StrEnum) -> bool:
    """Return whether the table allows this transition."""
    return type(after) is type(before) and after in TRANSITIONS[type(before)][before]
