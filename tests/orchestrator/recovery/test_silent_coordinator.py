"""Silent coordinators, full disks, and the seconds after which a conclusion is drawn."""

from dataclasses import MISSING, fields, replace
from typing import Any

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
from orchestrator.recovery.elastic_policy import LastAttempt, WorldSize
from orchestrator.recovery.failure_rate import FailureCount, NodeHistory
from orchestrator.recovery.node_exclusion import ExclusionDecision, NodeRecord
from orchestrator.recovery.retry_policy import EndedAttempt
from orchestrator.scheduler.interface import JobStatus
from orchestrator.states import AttemptState
from trainer.protocol.failures.decision import Decision
from trainer.protocol.failures.outcome import (
    AgentEnd,
    AgentReport,
    AttemptOutcome,
    AttemptResult,
    ExitCode,
    Failure,
    FailureKind,
)

LIMIT = 900.0
JOB = JobStatus(job_id="7", name="orch-a-1-1-00000000", state="RUNNING", submit_time="", nodes=("n1", "n2"))
QUIET = Evidence(attempt=1, answered=True, job=JOB, started=True, silent_for=950.0, still_for=LIMIT, leader="n1")
ENDED = AttemptOutcome(
    attempt=1, job_id="7", result=AttemptResult.FAILED, reason="rank 3 died", exit_code=75, step=9, generations=1,
    started_at=0.0, ended_at=1.0,
)  # fmt: skip

OVERSTAYED = "its attempt has ended, but the job has kept running for 180 s"


def report(
    end: AgentEnd, node: int = 1, reason: str = "n2 lost the coordinator: it was silent for 60 s"
) -> AgentReport:
    return AgentReport(node=node, name=f"n{node + 1}", end=end, reason=reason, time=1.0)


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
def test_escalation_of_a_silent_job(changes: dict[str, object], step: Escalation, reason: str) -> None:
    assert judge_silence(replace(QUIET, **changes), LIMIT) == (step, reason)


@pytest.mark.parametrize("state", ["SUSPENDED", "STOPPED", "COMPLETING", "PENDING", "SIGNALING"])
def test_suspended_job_is_not_silent(state: str) -> None:
    suspended = replace(QUIET, job=replace(JOB, state=state), still_for=1e6, overstayed=1e6)
    assert judge_silence(suspended, LIMIT)[0] is Escalation.NOTHING


def test_without_a_limit_silence_is_only_reported() -> None:
    assert judge_silence(replace(QUIET, still_for=1e6), 0.0)[0] is Escalation.REPORT
    left = replace(QUIET, still_for=1e6, reports=(report(AgentEnd.SILENT),))
    assert judge_silence(left, 0.0)[0] is Escalation.REPORT


def test_departed_peers_shorten_the_wait() -> None:
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
        # Its own node saw the coordinator stall, whatever its peers report.
        ("FAILED", {"reports": (report(AgentEnd.FROZEN, 0), report(AgentEnd.SILENT))}, "agent_lost", "n1"),
        ("FAILED", {"reports": (report(AgentEnd.SILENT),)}, "agent_lost", "n1"),
        ("CANCELLED", {"silenced": "heartbeat silent", "reports": (report(AgentEnd.SILENT),)}, "agent_lost", "n1"),
        # Silence alone names no node: the file system may be the cause.
        ("CANCELLED", {"silenced": "heartbeat silent"}, "agent_lost", None),
        ("FAILED", {"reports": (report(AgentEnd.GONE),)}, "agent_lost", None),
        # Slurm's cause takes precedence.
        ("NODE_FAIL", {"reports": (report(AgentEnd.SILENT),)}, "node_lost", None),
        ("TIMEOUT", {"reports": (report(AgentEnd.SILENT),)}, "time_limit", None),
        ("PREEMPTED", {"reports": (report(AgentEnd.FROZEN, 0),)}, "preempted", None),
        ("CANCELLED", {"reports": (report(AgentEnd.SILENT),)}, "cancelled", None),
        ("CANCELLED", {"cancel_asked": True, "silenced": "heartbeat silent"}, "cancelled", None),
    ],
)  # fmt: skip
def test_node_named_for_a_stalled_coordinator(
    state: str, changes: dict[str, object], kind: str, node: str | None
) -> None:
    failure = classify(replace(QUIET, job=replace(JOB, state=state), **changes))
    assert (str(failure.kind), failure.node) == (kind, node)


def test_outcome_counts_although_orch_cancelled_the_job() -> None:
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


DISK = "disk full (/runs/a-1)"
SAVES_FAILING = "saves failing since step 30: disk full (/runs/a-1/checkpoints)"
PEER_GONE = {"agent-0000.log": "Connection closed by peer"}


def ended_job(state: str, code: int | None = 1, **fields: object) -> Evidence:
    job = JobStatus(job_id="7", name="orch-a-1-00000001", state=state, exit_code=code)
    return Evidence(**{"attempt": 1, "answered": True, "job": job, "started": True, "ended_for": 99.0, **fields})


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        (ended_job("FAILED", disk=DISK), f"job 7 ended as FAILED without an outcome: {DISK}"),
        (ended_job("FAILED", disk=DISK, started=False), f"job 7 ended as FAILED without an outcome: {DISK}"),
        (
            ended_job("FAILED", disk=DISK, saves_failing=SAVES_FAILING),
            f"job 7 ended as FAILED without an outcome: {SAVES_FAILING}",
        ),
        (ended_job("FAILED", disk=DISK, tails=PEER_GONE), f"job 7 ended as FAILED without an outcome: {DISK}"),
        (
            ended_job("FAILED", ExitCode.STORAGE),
            "job 7 ended as FAILED without an outcome: its exit code (74) means that its storage was full",
        ),
        (ended_job("TIMEOUT", None, saves_failing=SAVES_FAILING), f"job 7 reached its time limit: {SAVES_FAILING}"),
    ],
)
def test_full_disk_is_the_cause(evidence: Evidence, reason: str) -> None:
    failure = classify(evidence)
    assert (failure.kind, failure.reason) == (FailureKind.STORAGE, reason)


@pytest.mark.parametrize(
    ("evidence", "kind"),
    [
        (ended_job("CANCELLED", disk=DISK), FailureKind.CANCELLED),
        (ended_job("NODE_FAIL", disk=DISK, saves_failing=SAVES_FAILING), FailureKind.NODE_LOST),
        (ended_job("PREEMPTED", saves_failing=SAVES_FAILING), FailureKind.PREEMPTED),
        (ended_job("TIMEOUT", None), FailureKind.TIME_LIMIT),
        (ended_job("FAILED"), FailureKind.AGENT_LOST),
    ],
)
def test_external_causes_take_precedence_over_a_full_disk(evidence: Evidence, kind: FailureKind) -> None:
    assert classify(evidence).kind is kind


def test_job_that_cannot_write_its_heartbeat_is_not_ended() -> None:
    job = JobStatus(job_id="7", name="orch-a-1-00000001", state="RUNNING")
    silent = Evidence(attempt=1, answered=True, job=job, started=True, silent_for=5000.0, still_for=5000.0)
    assert judge_silence(silent, 900.0)[0] is Escalation.CANCEL
    assert judge_silence(replace(silent, disk=DISK), 900.0) == (
        Escalation.REPORT,
        f"its heartbeat cannot be written: {DISK}",
    )


RUNNING, OVER, LOST = AttemptState.RUNNING, AttemptState.ENDED, AttemptState.LOST
RUNNING_JOB = Evidence(attempt=1, answered=True, job=JOB, started=True)
FINISHED = AttemptOutcome(
    attempt=1, job_id="7", result=AttemptResult.FINISHED, reason="", exit_code=0, step=9, generations=1, started_at=0.0,
    ended_at=1.0,
)  # fmt: skip
LEFT_SILENT = AgentReport(node=1, name="n2", end=AgentEnd.SILENT, reason="", time=1.0)


def job_in_state(state: str) -> JobStatus:
    return replace(JOB, state=state)


@pytest.mark.parametrize(
    ("changes", "field", "seconds", "before", "after"),
    [
        ({"job": None, "silent_for": 60.0}, "absent_for", 60.0, RUNNING, LOST),
        ({"job": None, "absent_for": 60.0}, "silent_for", 60.0, RUNNING, LOST),
        ({"job": None, "silent_for": 300.0, "unrecorded": True}, "absent_for", 300.0, RUNNING, LOST),
        ({"job": None, "outcome": FINISHED}, "absent_for", 5.0, RUNNING, OVER),
        ({"job": job_in_state("COMPLETED")}, "ended_for", 5.0, RUNNING, OVER),
        ({"job": job_in_state("COMPLETING")}, "leaving_for", 600.0, RUNNING, OVER),
        ({"leader_gone": "n1"}, "silent_for", 60.0, RUNNING, OVER),
    ],
)  # fmt: skip
def test_end_is_concluded_after_documented_seconds(
    changes: dict[str, Any], field: str, seconds: float, before: AttemptState, after: AttemptState
) -> None:
    for value, end in ((seconds - 0.5, before), (seconds, after)):
        assert judge(replace(RUNNING_JOB, **changes, **{field: value}))[0] is end


def test_ended_job_without_agents_is_judged_at_once() -> None:
    assert judge(replace(RUNNING_JOB, job=job_in_state("FAILED"), started=False))[0] is OVER
    assert judge(replace(RUNNING_JOB, job=job_in_state("NODE_FAIL")))[0] is OVER


@pytest.mark.parametrize(
    ("changes", "field", "seconds", "before", "after"),
    [
        ({"still_for": 0.0}, "silent_for", 60.0, Escalation.NOTHING, Escalation.REPORT),
        ({"silent_for": 2000.0}, "still_for", 900.0, Escalation.REPORT, Escalation.REQUEST_STOP),
        ({"silent_for": 2000.0}, "still_for", 960.0, Escalation.REQUEST_STOP, Escalation.CANCEL),
        ({"outcome": FINISHED}, "overstayed", 180.0, Escalation.NOTHING, Escalation.CANCEL),
        ({"silent_for": 2000.0, "reports": (LEFT_SILENT,)}, "still_for", 120.0, Escalation.REPORT,
         Escalation.REQUEST_STOP),
    ],
)  # fmt: skip
def test_silence_escalates_after_documented_seconds(
    changes: dict[str, Any], field: str, seconds: float, before: Escalation, after: Escalation
) -> None:
    for value, step in ((seconds - 0.5, before), (seconds, after)):
        assert judge_silence(replace(RUNNING_JOB, **changes, **{field: value}), 900.0)[0] is step


@pytest.mark.parametrize(
    "kind",
    [
        Evidence,
        EndedAttempt,
        Decision,
        LastAttempt,
        NodeRecord,
        NodeHistory,
        ExclusionDecision,
        FailureCount,
        WorldSize,
    ],
)
def test_defaults_mean_nothing_observed(kind: Any) -> None:
    for field in fields(kind):
        if field.default is not MISSING and field.name != "history":
            assert not field.default, field.name
