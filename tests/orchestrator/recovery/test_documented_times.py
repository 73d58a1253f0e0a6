"""How long is waited before something is concluded, in seconds as people read them; and what nothing known means."""

from dataclasses import MISSING, fields, replace
from typing import Any

import pytest

from orchestrator.recovery.classify_failure import Escalation, Evidence, judge, judge_silence
from orchestrator.recovery.elastic_policy import LastAttempt, WorldSize
from orchestrator.recovery.failure_rate import FailureCount, NodeHistory
from orchestrator.recovery.node_exclusion import ExclusionDecision, NodeRecord
from orchestrator.recovery.retry_policy import EndedAttempt, RetryDecision
from orchestrator.scheduler.interface import JobStatus
from orchestrator.states import AttemptState
from trainer.protocol.failures.outcome import AgentEnd, AgentReport, AttemptOutcome, AttemptResult

RUNNING, ENDED, LOST = AttemptState.RUNNING, AttemptState.ENDED, AttemptState.LOST
JOB = JobStatus(job_id="7", name="orch-a-1-1-00000000", state="RUNNING", submit_time="", nodes=("n1", "n2"))
LOOK = Evidence(attempt=1, answered=True, job=JOB, started=True)
DONE = AttemptOutcome(
    attempt=1, job_id="7", result=AttemptResult.FINISHED, reason="", exit_code=0, step=9, generations=1, started_at=0.0,
    ended_at=1.0,
)  # fmt: skip
LEFT = AgentReport(node=1, name="n2", end=AgentEnd.SILENT, reason="", time=1.0)


def with_job(state: str) -> JobStatus:
    return replace(JOB, state=state)


@pytest.mark.parametrize(
    ("changes", "field", "seconds", "before", "after"),
    [
        ({"job": None, "silent_for": 60.0}, "absent_for", 60.0, RUNNING, LOST),
        ({"job": None, "absent_for": 60.0}, "silent_for", 60.0, RUNNING, LOST),
        ({"job": None, "silent_for": 300.0, "unrecorded": True}, "absent_for", 300.0, RUNNING, LOST),
        ({"job": None, "outcome": DONE}, "absent_for", 5.0, RUNNING, ENDED),
        ({"job": with_job("COMPLETED")}, "ended_for", 5.0, RUNNING, ENDED),
        ({"job": with_job("COMPLETING")}, "leaving_for", 600.0, RUNNING, ENDED),
        ({"leader_gone": "n1"}, "silent_for", 60.0, RUNNING, ENDED),
    ],
)  # fmt: skip
def test_an_end_is_concluded_after_so_many_seconds(
    changes: dict[str, Any], field: str, seconds: float, before: AttemptState, after: AttemptState
) -> None:
    for value, end in ((seconds - 0.5, before), (seconds, after)):
        assert judge(replace(LOOK, **changes, **{field: value}))[0] is end


def test_a_job_without_any_of_its_signs_is_judged_at_once() -> None:
    assert judge(replace(LOOK, job=with_job("FAILED"), started=False))[0] is ENDED
    assert judge(replace(LOOK, job=with_job("NODE_FAIL")))[0] is ENDED


@pytest.mark.parametrize(
    ("changes", "field", "seconds", "before", "after"),
    [
        ({"still_for": 0.0}, "silent_for", 60.0, Escalation.NOTHING, Escalation.REPORT),
        ({"silent_for": 2000.0}, "still_for", 900.0, Escalation.REPORT, Escalation.REQUEST_STOP),
        ({"silent_for": 2000.0}, "still_for", 960.0, Escalation.REQUEST_STOP, Escalation.CANCEL),
        ({"outcome": DONE}, "overstayed", 180.0, Escalation.NOTHING, Escalation.CANCEL),
        (
            {"silent_for": 2000.0, "reports": (LEFT,)}, "still_for", 120.0, Escalation.REPORT, Escalation.REQUEST_STOP,
        ),
    ],
)  # fmt: skip
def test_silence_is_held_against_a_job_after_so_many_seconds(
    changes: dict[str, Any], field: str, seconds: float, before: Escalation, after: Escalation
) -> None:
    for value, step in ((seconds - 0.5, before), (seconds, after)):
        assert judge_silence(replace(LOOK, **changes, **{field: value}), 900.0)[0] is step


@pytest.mark.parametrize(
    "kind",
    [
        Evidence,
        EndedAttempt,
        RetryDecision,
        LastAttempt,
        NodeRecord,
        NodeHistory,
        ExclusionDecision,
        FailureCount,
        WorldSize,
    ],
)
def test_what_was_not_looked_at_says_nothing(kind: Any) -> None:
    """Whoever gathers it fills in what there is: no duration, no sign, no name."""
    for field in fields(kind):
        if field.default is not MISSING and field.name != "history":
            assert not field.default, field.name
