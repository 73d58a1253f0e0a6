"""A disk that takes no more is the cause, whatever the end of the job looks like."""

from dataclasses import replace

import pytest

from orchestrator.recovery.classify_failure import Escalation, Evidence, classify, judge_silence
from orchestrator.scheduler.interface import JobStatus
from trainer.protocol.failures.outcome import ExitCode, FailureKind

DISK = "disk full (/runs/a-1)"
SAVES = "saves failing since step 30: disk full (/runs/a-1/checkpoints)"
PEER_GONE = {"agent-0000.log": "Connection closed by peer"}


def ended(state: str, code: int | None = 1, **fields: object) -> Evidence:
    job = JobStatus(job_id="7", name="orch-a-1-00000001", state=state, exit_code=code)
    return Evidence(**{"attempt": 1, "answered": True, "job": job, "started": True, "ended_for": 99.0, **fields})


@pytest.mark.parametrize(
    ("evidence", "reason"),
    [
        (ended("FAILED", disk=DISK), f"job 7 ended as FAILED without an outcome: {DISK}"),
        (ended("FAILED", disk=DISK, started=False), f"job 7 ended as FAILED without an outcome: {DISK}"),
        (ended("FAILED", disk=DISK, saves_failing=SAVES), f"job 7 ended as FAILED without an outcome: {SAVES}"),
        (ended("FAILED", disk=DISK, tails=PEER_GONE), f"job 7 ended as FAILED without an outcome: {DISK}"),
        (
            ended("FAILED", ExitCode.STORAGE),
            "job 7 ended as FAILED without an outcome: its storage took no more, by its exit code (74)",
        ),
        (ended("TIMEOUT", None, saves_failing=SAVES), f"job 7 reached its time limit: {SAVES}"),
    ],
)
def test_the_end_is_storage(evidence: Evidence, reason: str) -> None:
    failure = classify(evidence)
    assert (failure.kind, failure.reason) == (FailureKind.STORAGE, reason)


@pytest.mark.parametrize(
    ("evidence", "kind"),
    [
        (ended("CANCELLED", disk=DISK), FailureKind.CANCELLED),
        (ended("NODE_FAIL", disk=DISK, saves_failing=SAVES), FailureKind.NODE_LOST),
        (ended("PREEMPTED", saves_failing=SAVES), FailureKind.PREEMPTED),
        (ended("TIMEOUT", None), FailureKind.TIME_LIMIT),
        (ended("FAILED"), FailureKind.AGENT_LOST),
    ],
)
def test_what_somebody_else_did_stays_what_it_is(evidence: Evidence, kind: FailureKind) -> None:
    assert classify(evidence).kind is kind


def test_a_job_that_cannot_write_its_heartbeat_is_not_ended_for_its_silence() -> None:
    job = JobStatus(job_id="7", name="orch-a-1-00000001", state="RUNNING")
    silent = Evidence(attempt=1, answered=True, job=job, started=True, silent_for=5000.0, still_for=5000.0)
    assert judge_silence(silent, 900.0)[0] is Escalation.CANCEL
    assert judge_silence(replace(silent, disk=DISK), 900.0) == (
        Escalation.REPORT,
        f"its heartbeat cannot be written: {DISK}",
    )
