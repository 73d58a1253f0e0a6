"""What ended an attempt, by table: evidence in, verdict with its reason out."""

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.recovery.classify_failure import LEAVING_LIMIT, AttemptEnd, classify, judge
from orchestrator.recovery.evidence import Evidence, LogTail
from orchestrator.scheduler.interface import JobStatus
from trainer.protocol.failures.outcome import AttemptOutcome, AttemptResult, Failure, FailureKind


def job(state: str, **fields: Any) -> JobStatus:
    return JobStatus(job_id="7", name="orch-a-1-00000001", state=state, **fields)


def outcome(result: AttemptResult, reason: str = "", failure: Failure | None = None) -> AttemptOutcome:
    return AttemptOutcome(
        attempt=1, job_id="7", result=result, reason=reason, exit_code=0, step=30, generations=1, started_at=0.0,
        ended_at=9.0, failure=failure,
    )  # fmt: skip


def evidence(state: str | None = None, **fields: Any) -> Evidence:
    known = {
        "attempt": 1,
        "answered": True,
        "saved_step": 30,
        "job": job(state) if state else None,
        "started": True,
        "ended_for": 99.0,
    }
    return Evidence(**{**known, **fields})


def agents(text: str) -> tuple[LogTail, ...]:
    return (LogTail(source="agent-0000.log", text=text),)


FINISHED = outcome(AttemptResult.FINISHED, "all ranks finished")
KILLED = Failure(kind=FailureKind.RANK_KILLED, reason="rank 1 died of SIGKILL", rank=1, node="n2")
SHORT_OF_MEMORY = replace(KILLED, kind=FailureKind.OUT_OF_MEMORY)
BUG = Failure(kind=FailureKind.USER_ERROR, reason="ValueError: no", rank=0)

OPEN = {
    "no answer": (evidence(None, answered=False, absent_for=999.0, silent_for=999.0), "does not answer"),
    "no answer, outcome": (evidence(None, answered=False, outcome=FINISHED), "does not answer"),
    "pending": (evidence("PENDING"), "job 7 is PENDING"),
    "running, done": (evidence("RUNNING", outcome=FINISHED), "job 7 is RUNNING"),
    "completing": (evidence("COMPLETING", outcome=FINISHED, leaving_for=30.0), "job 7 is COMPLETING"),
    "a word nobody knows": (evidence("PURGATORY"), "job 7 is PURGATORY"),
    "just gone": (evidence(None, absent_for=59.0, silent_for=999.0), "looking again"),
    "gone, accounting silent": (evidence(None, absent_for=299.0, silent_for=999.0, unrecorded=True), "looking again"),
    "gone but beating": (evidence(None, absent_for=999.0, silent_for=3.0), "heartbeat goes on"),
    "gone, outcome, once": (evidence(None, absent_for=0.0, outcome=FINISHED), "looking again"),
    "leader out, still beating": (evidence("RUNNING", leader_gone="n1", silent_for=59.0), "job 7 is RUNNING"),
    "silent with its leader": (evidence("RUNNING", silent_for=999.0), "job 7 is RUNNING"),
    "outcome on its way": (evidence("COMPLETED", ended_for=1.0), "waiting for its outcome"),
}


@pytest.mark.parametrize("name", OPEN)
def test_nothing_certain_is_no_end(name: str) -> None:
    given, words = OPEN[name]
    verdict = judge(given)
    assert verdict.end is AttemptEnd.OPEN
    assert words in verdict.reason


SIGNALLED = outcome(AttemptResult.STOPPED, "an agent got SIGTERM")
LATE = Failure(kind=FailureKind.PREEMPTED, reason="ranks were asked to save and stop, did not do so, and were killed")
LOST = Failure(kind=FailureKind.AGENT_LOST, reason="its connection ended", node="n2")
ENDS = {
    "finished": (evidence("COMPLETED", outcome=FINISHED), AttemptEnd.FINISHED, None, "all ranks finished"),
    "finished, then preempted": (evidence("PREEMPTED", outcome=FINISHED), AttemptEnd.FINISHED, None, "all ranks"),
    "finished, queue forgot": (evidence(None, absent_for=6.0, outcome=FINISHED), AttemptEnd.FINISHED, None,
    "all ranks"),
    "completed without a word": (evidence("COMPLETED"), AttemptEnd.FAILED, FailureKind.UNKNOWN, "without an outcome"),
    "leader out, silent": (
        evidence("RUNNING", leader_gone="n1", silent_for=60.0), AttemptEnd.FAILED, FailureKind.NODE_LOST,
        "n1, which led job 7, is out of the job and its heartbeat is silent",
    ),
    "leader out, done": (
        evidence("RUNNING", leader_gone="n1", silent_for=60.0, outcome=FINISHED), AttemptEnd.FINISHED, None,
        "all ranks",
    ),
    "never started": (
        evidence("FAILED", started=False), AttemptEnd.FAILED, FailureKind.LAUNCH_FAILED, "before its agents started",
    ),
    "environment moved": (
        evidence("FAILED", started=False, lost_interpreter="/venv/bin/python"), AttemptEnd.FAILED,
        FailureKind.LAUNCH_FAILED,
        "its interpreter /venv/bin/python is gone; put its environment back",
    ),
    "first agent died": (evidence("FAILED"), AttemptEnd.FAILED, FailureKind.AGENT_LOST, "after its agents had started"),
    "secrets that others can read": (
        evidence(
            "FAILED", tails=agents("orch-agent: refuses to train: cannot read the run's secrets: /f can be read by all")
        ),
        AttemptEnd.FAILED, FailureKind.SUBMIT_REJECTED, "/f can be read by all",
    ),
    "preempted": (evidence("PREEMPTED"), AttemptEnd.FAILED, FailureKind.PREEMPTED, "Slurm ended job 7: PREEMPTED"),
    "preempted, saved": (
        evidence("PREEMPTED", outcome=outcome(AttemptResult.STOPPED, "an agent got SIGTERM")),
        AttemptEnd.FAILED, FailureKind.PREEMPTED, "PREEMPTED",
    ),
    "timeout": (evidence("TIMEOUT"), AttemptEnd.FAILED, FailureKind.TIME_LIMIT, "TIMEOUT"),
    "deadline": (evidence("DEADLINE"), AttemptEnd.FAILED, FailureKind.TIME_LIMIT, "DEADLINE"),
    "node fail": (
        evidence("NODE_FAIL", job=job("NODE_FAIL", reason="NodeDown")), AttemptEnd.FAILED, FailureKind.NODE_LOST,
        "NODE_FAIL (NodeDown)",
    ),
    "node fail seen inside": (
        evidence("NODE_FAIL", outcome=outcome(AttemptResult.FAILED, "", replace(KILLED, kind=FailureKind.AGENT_LOST))),
        AttemptEnd.FAILED, FailureKind.NODE_LOST, "the job saw: rank 1",
    ),
    "node down, the job ended first": (
        evidence("FAILED", job=job("FAILED", nodes_down=("n2",)), outcome=outcome(AttemptResult.FAILED, "", LOST)),
        AttemptEnd.FAILED, FailureKind.NODE_LOST, "Slurm has node n2 down; the job saw: its connection ended",
    ),
    "another node down": (
        evidence("FAILED", job=job("FAILED", nodes_down=("n1",)), outcome=outcome(AttemptResult.FAILED, "", LOST)),
        AttemptEnd.FAILED, FailureKind.AGENT_LOST, "its connection ended",
    ),
    "out of memory": (
        evidence("OUT_OF_MEMORY"), AttemptEnd.FAILED, FailureKind.OUT_OF_MEMORY, "OUT_OF_MEMORY; give the job more",
    ),
    "out of memory, seen from inside": (
        evidence("OUT_OF_MEMORY", outcome=outcome(AttemptResult.FAILED, "", SHORT_OF_MEMORY)),
        AttemptEnd.FAILED, FailureKind.OUT_OF_MEMORY, "rank 1 died of SIGKILL",
    ),
    "a wait that orch has given up": (
        evidence("CANCELLED", started=False, gave_up="1 node was missing for 1h01m"), AttemptEnd.FAILED,
        FailureKind.NODES_MISSING, "1 node was missing for 1h01m",
    ),
    "a wait that orch has given up just as it ended": (
        evidence("COMPLETED", gave_up="1 node was missing", outcome=outcome(AttemptResult.STOPPED, "1 node was")),
        AttemptEnd.FAILED, FailureKind.NODES_MISSING, "1 node was missing",
    ),
    "a wait that orch has given up, of a job that Slurm forgot": (
        evidence(None, absent_for=60.0, silent_for=999.0, started=False, gave_up="1 node was missing"), AttemptEnd.LOST,
        FailureKind.NODES_MISSING, "1 node was missing",
    ),
    "boot": (evidence("BOOT_FAIL", started=False), AttemptEnd.FAILED, FailureKind.LAUNCH_FAILED, "BOOT_FAIL"),
    "outcome beats FAILED": (
        evidence("FAILED", outcome=outcome(AttemptResult.FAILED, "", KILLED)), AttemptEnd.FAILED,
        FailureKind.RANK_KILLED,
        "rank 1 died of SIGKILL",
    ),
    "outcome beats COMPLETED": (
        evidence("COMPLETED", outcome=outcome(AttemptResult.FAILED, "", BUG)), AttemptEnd.FAILED,
        FailureKind.USER_ERROR,
        "ValueError",
    ),
    "a bug before the time limit": (
        evidence("TIMEOUT", outcome=outcome(AttemptResult.FAILED, "", BUG)), AttemptEnd.FAILED, FailureKind.USER_ERROR,
        "ValueError",
    ),
    "stopped at the limit": (
        evidence("FAILED", outcome=outcome(AttemptResult.STOPPED, "the time limit is near")),
        AttemptEnd.FAILED, FailureKind.TIME_LIMIT, "stopped, with step 30 saved",
    ),
    "stopped, and nothing is known to be saved": (
        evidence("FAILED", outcome=outcome(AttemptResult.STOPPED, "the time limit is near"), saved_step=None),
        AttemptEnd.FAILED, FailureKind.TIME_LIMIT, "stopped: the time limit is near",
    ),
    "scancelled, and nothing is known to be saved": (
        evidence("CANCELLED", outcome=outcome(AttemptResult.STOPPED, "an agent got SIGTERM"), saved_step=None),
        AttemptEnd.FAILED, FailureKind.CANCELLED, "job 7 was cancelled, not by orch",
    ),
    "stopped by a signal": (
        evidence("FAILED", outcome=outcome(AttemptResult.STOPPED, "an agent got SIGUSR2")),
        AttemptEnd.FAILED, FailureKind.PREEMPTED, "SIGUSR2",
    ),
    "stopped by a signal, on a node that is down": (
        evidence("FAILED", job=job("FAILED", nodes_down=("n2",)), outcome=SIGNALLED),
        AttemptEnd.FAILED, FailureKind.NODE_LOST, "stopped, with step 30 saved: an agent got SIGTERM; node n2 is down",
    ),
    "stopped by a signal, the limit was shortened": (
        evidence("FAILED", outcome=SIGNALLED, near_limit=True),
        AttemptEnd.FAILED, FailureKind.TIME_LIMIT, "an agent got SIGTERM; the job was near its time limit",
    ),
    "stopped by a signal, Slurm tells of a lost node": (
        evidence("FAILED", outcome=SIGNALLED, tails=agents(
            "slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-22T17:14:47 DUE TO NODE FAILURE, SEE "
            "SLURMCTLD LOG FOR DETAILS ***"
        )),
        AttemptEnd.FAILED, FailureKind.NODE_LOST, "Slurm says: slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT",
    ),
    "stopped by a signal, Slurm tells of the limit": (
        evidence("FAILED", outcome=SIGNALLED, tails=agents(
            "slurmstepd-n1: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-22T17:14:47 DUE TO TIME LIMIT ***"
        )),
        AttemptEnd.FAILED, FailureKind.TIME_LIMIT, "DUE TO TIME LIMIT",
    ),
    "stopped by a signal, within a preemption's grace time": (
        evidence("FAILED", outcome=SIGNALLED, tails=agents(
            "slurmstepd-n1: error: *** STEP 14.0 ON n1 CANCELLED AT 2026-11-22T17:24:06 ***\norch-agent: got SIGTERM"
        )),
        AttemptEnd.FAILED, FailureKind.PREEMPTED, "stopped, with step 30 saved: an agent got SIGTERM",
    ),
    "could not stop in time, on a node that is down": (
        evidence("FAILED", job=job("FAILED", nodes_down=("n2",)), outcome=outcome(AttemptResult.FAILED, "", LATE)),
        AttemptEnd.FAILED, FailureKind.NODE_LOST, "and were killed; node n2 is down",
    ),
    "could not stop in time, shortened limit": (
        evidence("FAILED", outcome=outcome(AttemptResult.FAILED, "", LATE), near_limit=True),
        AttemptEnd.FAILED, FailureKind.TIME_LIMIT, "near its time limit",
    ),
    "scancelled, could not save in time": (
        evidence("CANCELLED", outcome=outcome(AttemptResult.FAILED, "", LATE)),
        AttemptEnd.FAILED, FailureKind.CANCELLED, "job 7 was cancelled, not by orch; ranks were asked to save",
    ),
    "scancelled": (evidence("CANCELLED"), AttemptEnd.FAILED, FailureKind.CANCELLED, "cancelled, not by orch"),
    "scancelled, saved": (
        evidence("CANCELLED", outcome=outcome(AttemptResult.STOPPED, "an agent got SIGTERM")),
        AttemptEnd.FAILED, FailureKind.CANCELLED, "cancelled, not by orch, with step 30 saved",
    ),
    "revoked, saved": (
        evidence("REVOKED", outcome=outcome(AttemptResult.STOPPED, "an agent got SIGTERM")),
        AttemptEnd.FAILED, FailureKind.CANCELLED, "cancelled, not by orch",
    ),
    "killed before the scancel": (
        evidence("CANCELLED", outcome=outcome(AttemptResult.FAILED, "", KILLED)), AttemptEnd.FAILED,
        FailureKind.RANK_KILLED, "rank 1 died of SIGKILL",
    ),
    "cancelled by us": (
        evidence("CANCELLED", cancel_asked=True), AttemptEnd.FAILED, FailureKind.CANCELLED,
        "cancelled by `orch cancel`",
    ),
    "requeued": (
        evidence("CANCELLED", job=job("CANCELLED", restarts=1)), AttemptEnd.FAILED, FailureKind.NODE_LOST,
        "requeued job 7",
    ),
    "requeued, and accounting does not tell": (
        evidence("CANCELLED", requeued="requeued by Slurm"), AttemptEnd.FAILED, FailureKind.NODE_LOST,
        "Slurm requeued job 7; orch ended it",
    ),
    "requeued, but it ended before that": (
        evidence("TIMEOUT", requeued="requeued by Slurm"), AttemptEnd.FAILED, FailureKind.TIME_LIMIT, "TIMEOUT",
    ),
    "requeued, never trained": (
        evidence("CANCELLED", job=job("CANCELLED", restarts=1), started=False), AttemptEnd.FAILED,
        FailureKind.LAUNCH_FAILED,
        "requeued job 7",
    ),
    "lost": (
        evidence(None, absent_for=61.0, silent_for=61.0), AttemptEnd.LOST, FailureKind.JOB_LOST, "heartbeat is silent",
    ),
    "lost, accounting silent": (
        evidence(None, absent_for=301.0, silent_for=61.0, unrecorded=True), AttemptEnd.LOST, FailureKind.JOB_LOST,
        "accounting does not answer",
    ),
    "stuck": (evidence("COMPLETING", leaving_for=LEAVING_LIMIT), AttemptEnd.FAILED, FailureKind.UNKNOWN, "COMPLETING"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_ends_keep_their_cause(name: str) -> None:
    given, end, kind, words = ENDS[name]
    verdict = judge(given)
    assert verdict.end is end
    assert (verdict.failure.kind if verdict.failure else None) == kind
    assert words in verdict.reason


def test_the_node_of_the_job_s_own_word_is_kept_under_slurm_s() -> None:
    given = evidence("NODE_FAIL", outcome=outcome(AttemptResult.FAILED, "", KILLED))
    assert classify(given).node == "n2"


def test_a_node_that_slurm_has_lost_is_named_where_the_job_saw_only_its_own_stop() -> None:
    down = job("NODE_FAIL", nodes_down=("n2",))
    assert classify(evidence("NODE_FAIL", job=down, outcome=outcome(AttemptResult.FAILED, "", LATE))).node == "n2"


@pytest.mark.parametrize(
    ("state", "ending", "script", "code"),
    [
        ("FAILED", {"exit_code": 127}, True, 127),
        ("FAILED", {"signal": 9}, True, None),
        ("FAILED", {}, True, None),
        ("COMPLETED", {"exit_code": 0}, True, None),
        ("BOOT_FAIL", {"exit_code": 127}, False, None),
        ("LAUNCH_FAILED", {}, False, None),
    ],
)
def test_a_batch_script_that_ended_before_any_agent_lived_is_known_without_its_exit_code(
    state: str, ending: dict[str, int], script: bool, code: int | None
) -> None:
    failure = classify(evidence(state, started=False, job=job(state, **ending)))
    assert (failure.kind, failure.script, failure.exit_code) == (FailureKind.LAUNCH_FAILED, script, code)


LOGS = {
    "root after echo": ("gloo: Connection reset by peer\nOSError: [Errno 28] No space left on device", "storage"),
    "echo only": ("x Connection closed by peer [10.0.0.2]", "agent_lost"),
    "teardown only": ("srun: error: n1: tasks 0-1: Terminated", "agent_lost"),
    "time limit": ("slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026 DUE TO TIME LIMIT ***", "time_limit"),
    "first root wins": ("OSError: Disk quota exceeded\nsrun: error: Node failure on n2", "storage"),
    "no payload": ("could not find submitted jobs", "launch_failed"),
    "nothing known": ("hello", "agent_lost"),
}


@pytest.mark.parametrize("name", LOGS)
def test_logs_speak_only_where_no_outcome_does(name: str) -> None:
    text, kind = LOGS[name]
    assert classify(evidence("FAILED", tails=agents(text))).kind == kind
    told = evidence("FAILED", tails=agents(text), outcome=outcome(AttemptResult.FAILED, "", KILLED))
    assert classify(told) == KILLED


CANCELLED_AT = "slurmstepd-n1: error: *** STEP 2.0 ON n1 CANCELLED AT 2026-11-22T17:14:47 ***"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (f"{CANCELLED_AT}\norch-agent: got SIGTERM\nsrun: error: n1: task 0: Killed", "cancelled"),
        (f"{CANCELLED_AT}\n[Errno 5] Input/output error", "cancelled"),
        (f"[Errno 28] No space left on device\n{CANCELLED_AT}\nsrun: error: n1: task 0: Killed", "storage"),
        ("srun: error: n1: task 0: Killed", "agent_lost"),  # before anybody cancelled it
        (CANCELLED_AT.removesuffix("***") + "DUE TO TIME LIMIT ***", "time_limit"),
    ],
)
def test_a_scancel_is_not_explained_by_what_it_killed(text: str, kind: str) -> None:
    """Ranks that do not end within KillWait are killed, and leave no outcome."""
    assert classify(evidence("CANCELLED", tails=agents(text))).kind == kind


PROLOG_OF_N2 = """\
srun: error: Task launch for StepId=20.0 failed on node n2: Job prolog failed
srun: error: Application launch failed: Job prolog failed
slurmstepd-n1: error: Prolog failure on node n2
slurmstepd-n1: error: *** JOB 20 ON n1 CANCELLED AT 2026-11-26T18:13:49 ***
srun: error: n1: task 0: Terminated
"""
SPOOL_OF_N2 = """\
srun: error: Task launch for StepId=21.0 failed on node n2: Unspecified error
srun: error: Application launch failed: Unspecified error
slurmstepd-n1: error: *** STEP 21.0 ON n1 CANCELLED AT 2026-11-26T18:13:53 ***
srun: error: n1: task 0: Killed
"""
REVOKED = "srun: error: Task launch for StepId=5.0 failed on node n2: Job credential revoked"
SCANCELLED = "slurmstepd-n1: error: *** JOB 15 ON n1 CANCELLED AT 2026-11-26T18:13:14 ***"
ON_N1: dict[str, Any] = {"nodes": ("n1",), "unlaunched": True, "cancelled_by": 0}
ON_BOTH: dict[str, Any] = {"nodes": ("n1", "n2"), "cancelled_by": 0}
NOT_LAUNCHED = {
    "its disk is full": (job("CANCELLED", **ON_N1), "", "launch_failed", "n1", "n1 could not launch job 7; the log"),
    "its prolog fails": (
        job("CANCELLED", **ON_N1), "Error running slurm prolog: 1", "launch_failed", "n1",
        "n1 could not launch job 7: Error running slurm prolog: 1",
    ),
    "no accounting": (
        job("CANCELLED", nodes=("n1",), unlaunched=True), "", "launch_failed", "n1", "n1 could not launch job 7",
    ),
    "the prolog of another node fails": (
        job("CANCELLED", **ON_BOTH, signal=15), PROLOG_OF_N2, "launch_failed", "n2", "failed on node n2: Job prolog",
    ),
    "the disk of another node is full": (
        job("FAILED", **ON_BOTH, exit_code=137), SPOOL_OF_N2, "launch_failed", "n2", "n2: Unspecified error",
    ),
    "a node of another job": (
        job("FAILED", nodes=("n1", "n3"), exit_code=137), SPOOL_OF_N2, "launch_failed", None, "Unspecified error",
    ),
    "cancelled by its owner in the prolog": (
        job("CANCELLED", nodes=("n1",), unlaunched=True, cancelled_by=1000), "", "cancelled", None, "not by orch",
    ),
    "cancelled in the queue": (job("CANCELLED", cancelled_by=0), "", "cancelled", None, "not by orch"),
    "cancelled by root": (
        job("CANCELLED", nodes=("n1",), signal=15), SCANCELLED, "cancelled", None, "not by orch",
    ),
    "cancelled by root, from accounting": (job("CANCELLED", **ON_N1), SCANCELLED, "cancelled", None, "not by orch"),
    "cancelled while its step started": (
        job("CANCELLED", **ON_BOTH, signal=15), f"{REVOKED}\n{SCANCELLED}", "cancelled", None, "not by orch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_LAUNCHED)
def test_a_node_that_cannot_launch_a_job_is_told_from_a_persons_scancel(name: str) -> None:
    """Jobs and logs as Slurm 22.05 recorded them in the lab."""
    ended, text, kind, node, words = NOT_LAUNCHED[name]
    failure = judge(evidence(job=ended, started=False, tails=agents(text))).failure
    assert failure is not None
    assert (failure.kind, failure.node, failure.script) == (kind, node, kind == "launch_failed" and node is None)
    assert words in failure.reason


def test_a_job_that_never_ran_waits_for_the_record_of_who_cancelled_it() -> None:
    ended = job("CANCELLED", nodes=("n1",), unlaunched=True)
    assert judge(evidence(job=ended, started=False, ended_for=1.0)).end is AttemptEnd.OPEN
    assert judge(evidence(job=replace(ended, cancelled_by=0), started=False, ended_for=1.0)).end is AttemptEnd.FAILED
    assert judge(evidence(job=ended, started=False, ended_for=1.0, cancel_asked=True)).end is AttemptEnd.FAILED


def test_a_log_line_never_blames_a_node() -> None:
    assert classify(evidence("FAILED", tails=agents("srun: error: Node failure on n17"))).node is None


def test_where_a_command_stood_is_not_called_saved() -> None:
    """Its step is that of the last line with its progress: it may have saved nothing."""
    stopped = replace(outcome(AttemptResult.STOPPED, "an agent got SIGTERM"), step=119)
    for state, words in (
        ("FAILED", "stopped: an agent got SIGTERM"),
        ("CANCELLED", "job 7 was cancelled, not by orch"),
    ):
        failure = judge(evidence(state, outcome=stopped, saved_step=None)).failure
        assert failure is not None
        assert (failure.step, failure.reason) == (119, words)


def test_an_srun_that_was_signalled_itself_is_named_and_blames_no_agent() -> None:
    text = "srun: forcing job termination\nsrun: error: n1: task 0: Killed\n"
    failure = classify(evidence("FAILED", started=True, tails=agents(text)))
    assert failure.kind is FailureKind.PREEMPTED
    assert "srun got SIGTERM, as by `scancel --full`, and killed its step; `scancel -s TERM " in failure.reason
    full = classify(evidence("FAILED", started=True, tails=agents(f"OSError: [Errno 28]\n{text}")))
    assert full.kind is FailureKind.STORAGE, "what was said before it"
    killed = classify(evidence("FAILED", started=True, tails=agents("srun: error: n1: task 0: Killed")))
    assert killed.kind is FailureKind.AGENT_LOST


def test_an_end_that_the_job_itself_cannot_explain_is_unknown_with_its_words() -> None:
    told = replace(outcome(AttemptResult.FAILED, "the coordinator ended"), exit_code=7)
    found = judge(evidence("FAILED", outcome=told))
    assert found.end is AttemptEnd.FAILED
    assert found.failure == Failure(kind=FailureKind.UNKNOWN, reason="the coordinator ended", step=30, exit_code=7)
