"""A running job whose coordinator says nothing: told early, ended late, and only with proof."""

from dataclasses import asdict, replace

import pytest

from orchestrator.recovery.classify_failure import (
    ABANDONED,
    GRACE,
    OVERSTAY,
    Escalation,
    Evidence,
    classify,
    judge,
    judge_silence,
)
from orchestrator.scheduler.interface import JobStatus
from trainer.protocol.failures.outcome import AgentEnd, AgentReport, AttemptOutcome, AttemptResult, Failure, FailureKind

LIMIT = 900.0
JOB = JobStatus(job_id="7", name="orch-a-1-1-00000000", state="RUNNING", submit_time="", nodes=("n1", "n2"))
QUIET = Evidence(attempt=1, answered=True, job=JOB, started=True, silent_for=950.0, still_for=LIMIT, leader="n1")
ENDED = AttemptOutcome(
    attempt=1, job_id="7", result=AttemptResult.FAILED, reason="rank 3 died", exit_code=75, step=9, generations=1,
    started_at=0.0, ended_at=1.0,
)  # fmt: skip

OVERSTAYED = "its attempt has ended, and the job runs on for 180 s"


def report(
    end: AgentEnd, node: int = 1, reason: str = "n2 lost the coordinator: it was silent for 60 s"
) -> AgentReport:
    return AgentReport(node=node, name=f"n{node + 1}", end=end, reason=reason, time=1.0)


def test_evidence_begins_with_nothing_observed() -> None:
    first = Evidence(attempt=1, answered=True, job=JOB)
    assert {name for name, value in asdict(first).items() if value} == {"attempt", "answered", "job"}
    assert (first.job_ended, first.job_leaving) == (False, False)


@pytest.mark.parametrize(
    ("changes", "step", "reason"),
    [
        ({"silent_for": 59.0, "still_for": 0.0}, Escalation.NOTHING, ""),
        ({"silent_for": 125.0, "still_for": 60.0}, Escalation.REPORT, "heartbeat silent for 2 min"),
        ({"still_for": LIMIT - 1}, Escalation.REPORT, "heartbeat silent for 15 min"),
        ({}, Escalation.REQUEST_STOP, "heartbeat silent for 950 s, nothing was written for 900 s"),
        ({"still_for": LIMIT + GRACE}, Escalation.CANCEL, "heartbeat silent for 950 s, nothing was written for 960 s"),
        ({"still_for": LIMIT + GRACE, "started": False}, Escalation.NOTHING, ""),
        ({"still_for": LIMIT + GRACE, "answered": False}, Escalation.NOTHING, ""),
        ({"still_for": LIMIT + GRACE, "job": None}, Escalation.NOTHING, ""),
        ({"outcome": ENDED, "overstayed": OVERSTAY - 1}, Escalation.NOTHING, ""),
        ({"outcome": ENDED, "overstayed": OVERSTAY}, Escalation.CANCEL, OVERSTAYED),
    ],
)  # fmt: skip
def test_how_far_silence_is_held_against_a_job(changes: dict[str, object], step: Escalation, reason: str) -> None:
    assert judge_silence(replace(QUIET, **changes), LIMIT) == (step, reason)


@pytest.mark.parametrize("state", ["SUSPENDED", "STOPPED", "COMPLETING", "PENDING", "SIGNALING"])
def test_a_suspended_job_is_not_silent(state: str) -> None:
    suspended = replace(QUIET, job=replace(JOB, state=state), still_for=1e6, overstayed=1e6)
    assert judge_silence(suspended, LIMIT)[0] is Escalation.NOTHING


def test_without_a_limit_it_is_only_told() -> None:
    assert judge_silence(replace(QUIET, still_for=1e6), 0.0)[0] is Escalation.REPORT
    left = replace(QUIET, still_for=1e6, reports=(report(AgentEnd.SILENT),))
    assert judge_silence(left, 0.0)[0] is Escalation.REPORT


def test_peers_that_have_left_shorten_the_wait() -> None:
    left = replace(QUIET, reports=(report(AgentEnd.SILENT),), silent_for=130.0, still_for=ABANDONED)
    assert judge_silence(left, LIMIT)[0] is Escalation.REQUEST_STOP
    assert judge_silence(replace(left, still_for=119.0), LIMIT)[0] is Escalation.REPORT
    assert judge_silence(replace(left, still_for=120.0), LIMIT)[0] is Escalation.REQUEST_STOP
    assert "1 agent(s) have left because of it" in judge_silence(left, LIMIT)[1]
    assert judge_silence(replace(left, reports=(report(AgentEnd.GONE),)), LIMIT)[0] is Escalation.REPORT


CANCELLED = replace(JOB, state="CANCELLED")


@pytest.mark.parametrize(
    ("state", "changes", "kind", "node"),
    [
        # Its own node saw the coordinator stand still, whatever its peers say besides.
        ("FAILED", {"reports": (report(AgentEnd.FROZEN, 0), report(AgentEnd.SILENT))}, "agent_lost", "n1"),
        ("FAILED", {"reports": (report(AgentEnd.SILENT),)}, "agent_lost", "n1"),
        ("CANCELLED", {"silenced": "heartbeat silent", "reports": (report(AgentEnd.SILENT),)}, "agent_lost", "n1"),
        # Silence alone names nobody: the file system may be what stands still.
        ("CANCELLED", {"silenced": "heartbeat silent"}, "agent_lost", None),
        ("FAILED", {"reports": (report(AgentEnd.GONE),)}, "agent_lost", None),
        # Others' words about the end win.
        ("NODE_FAIL", {"reports": (report(AgentEnd.SILENT),)}, "node_lost", None),
        ("TIMEOUT", {"reports": (report(AgentEnd.SILENT),)}, "time_limit", None),
        ("PREEMPTED", {"reports": (report(AgentEnd.FROZEN, 0),)}, "preempted", None),
        ("CANCELLED", {"reports": (report(AgentEnd.SILENT),)}, "cancelled", None),
        ("CANCELLED", {"cancel_asked": True, "silenced": "heartbeat silent"}, "cancelled", None),
    ],
)  # fmt: skip
def test_who_is_named_for_a_coordinator_that_stood_still(
    state: str, changes: dict[str, object], kind: str, node: str | None
) -> None:
    failure = classify(replace(QUIET, job=replace(JOB, state=state), **changes))
    assert (str(failure.kind), failure.node) == (kind, node)


def test_an_outcome_is_believed_although_orch_had_to_cancel_its_job() -> None:
    stopped = replace(ENDED, result=AttemptResult.STOPPED, reason="heartbeat silent")
    ours = replace(QUIET, job=CANCELLED, outcome=stopped, silenced="its attempt has ended")
    assert classify(ours).kind is FailureKind.PREEMPTED
    assert classify(replace(ours, silenced="")).kind is FailureKind.CANCELLED
    done = replace(ours, outcome=replace(ENDED, result=AttemptResult.FINISHED))
    assert judge(done)[2] is None


def test_an_agent_that_refuses_an_older_coordinator_is_the_cause_of_its_loss():
    lost = Failure(kind=FailureKind.AGENT_LOST, reason="no agent of node(s) 1 joined within 120 s")
    refused = report(AgentEnd.REFUSED, reason="n2: all nodes must start the same installation of orch")
    evidence = replace(QUIET, outcome=replace(ENDED, failure=lost), reports=(refused,))
    failure = classify(evidence)
    assert (failure.kind, failure.node, failure.reason) == (FailureKind.INSTALLATION, "n2", refused.reason)
    assert classify(replace(evidence, reports=())).kind is FailureKind.AGENT_LOST
