"""Verdicts on attempts and their reasons, from tables of evidence."""

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.recovery.classify_failure import LEAVING_LIMIT, Evidence, classify, judge
from orchestrator.scheduler.interface import JobStatus
from orchestrator.states import AttemptState
from trainer.protocol.failures.outcome import AttemptOutcome, AttemptResult, Failure
from trainer.protocol.failures.outcome import FailureKind as Kind


def job(state: str, **fields: Any) -> JobStatus:
    return JobStatus(job_id="7", name="orch-a-1-00000001", state=state, **fields)


def outcome(result: AttemptResult, reason: str = "", failure: Failure | None = None) -> AttemptOutcome:
    return AttemptOutcome(
        attempt=1, job_id="7", result=result, reason=reason, exit_code=0, step=30, generations=1, started_at=0.0,
        ended_at=9.0, failure=failure,
    )  # fmt: skip


def evidence(state: str | None = None, **fields: Any) -> Evidence:
    known = {"saved_step": 30, "job": job(state) if state else None, "started": True, "ended_for": 99.0}
    return Evidence(**{"attempt": 1, "answered": True, **known, **fields})


def agents(text: str) -> dict[str, str]:
    return {"agent-0000.log": text}


FINISHED = outcome(AttemptResult.FINISHED, "all ranks finished")
KILLED = Failure(kind=Kind.RANK_KILLED, reason="rank 1 died of SIGKILL", rank=1, node="n2")
SHORT_OF_MEMORY = replace(KILLED, kind=Kind.OUT_OF_MEMORY)
BUG = Failure(kind=Kind.USER_ERROR, reason="ValueError: no", rank=0)

OPEN = {
    "no answer": (evidence(None, answered=False, absent_for=999.0, silent_for=999.0), "does not answer"),
    "no answer, outcome": (evidence(None, answered=False, outcome=FINISHED), "does not answer"),
    "pending": (evidence("PENDING"), "job 7 is PENDING"),
    "running, done": (evidence("RUNNING", outcome=FINISHED), "job 7 is RUNNING"),
    "completing": (evidence("COMPLETING", outcome=FINISHED, leaving_for=30.0), "job 7 is COMPLETING"),
    "an unknown state": (evidence("PURGATORY"), "job 7 is PURGATORY"),
    "just gone": (evidence(None, absent_for=59.0, silent_for=999.0), "looking again"),
    "gone, accounting silent": (evidence(None, absent_for=299.0, silent_for=999.0, unrecorded=True), "looking again"),
    "gone but beating": (evidence(None, absent_for=999.0, silent_for=3.0), "heartbeat continues"),
    "gone, outcome, once": (evidence(None, absent_for=0.0, outcome=FINISHED), "looking again"),
    "leader out, still beating": (evidence("RUNNING", leader_gone="n1", silent_for=59.0), "job 7 is RUNNING"),
    "silent with its leader": (evidence("RUNNING", silent_for=999.0), "job 7 is RUNNING"),
    "outcome on its way": (evidence("COMPLETED", ended_for=1.0), "waiting for its outcome"),
}


@pytest.mark.parametrize("name", OPEN)
def test_attempt_stays_open_without_certainty(name: str) -> None:
    given, words = OPEN[name]
    state, reason, failure = judge(given)
    assert (state, failure) == (AttemptState.RUNNING, None)
    assert words in reason


SIGNALLED = outcome(AttemptResult.STOPPED, "an agent got SIGTERM")
LATE = Failure(kind=Kind.PREEMPTED, reason="ranks were asked to save and stop, did not do so, and were killed")
LOST = Failure(kind=Kind.AGENT_LOST, reason="its connection ended", node="n2")
STEP_CANCELLED = "slurmstepd-n1: error: *** STEP 2.0 ON n1 CANCELLED AT 2026-11-22T17:14:47"
ENDS = {
    "finished": (evidence("COMPLETED", outcome=FINISHED), None, "all ranks finished"),
    "finished, then preempted": (evidence("PREEMPTED", outcome=FINISHED), None, "all ranks"),
    "finished, queue forgot": (evidence(None, absent_for=6.0, outcome=FINISHED), None, "all ranks"),
    "completed without an outcome": (evidence("COMPLETED"), Kind.UNKNOWN, "without an outcome"),
    "leader out, silent": (
        evidence("RUNNING", leader_gone="n1", silent_for=60.0), Kind.NODE_LOST,
        "n1, which led job 7, is out of the job and its heartbeat is silent",
    ),
    "leader out, done": (evidence("RUNNING", leader_gone="n1", silent_for=60.0, outcome=FINISHED), None, "all ranks"),
    "never started": (evidence("FAILED", started=False), Kind.LAUNCH_FAILED, "before its agents started"),
    "environment moved": (
        evidence("FAILED", started=False, lost_interpreter="/venv/bin/python"), Kind.LAUNCH_FAILED,
        "its interpreter /venv/bin/python is gone; put its environment back",
    ),
    "first agent died": (evidence("FAILED"), Kind.AGENT_LOST, "after its agents had started"),
    "secrets that others can read": (
        evidence("FAILED", tails=agents("x: refuses to train: cannot read the run's secrets: /f can be read by all")),
        Kind.SUBMIT_REJECTED, "/f can be read by all",
    ),
    "preempted": (evidence("PREEMPTED"), Kind.PREEMPTED, "Slurm ended job 7: PREEMPTED"),
    "preempted, saved": (evidence("PREEMPTED", outcome=SIGNALLED), Kind.PREEMPTED, "PREEMPTED"),
    "timeout": (evidence("TIMEOUT"), Kind.TIME_LIMIT, "TIMEOUT"),
    "deadline": (evidence("DEADLINE"), Kind.TIME_LIMIT, "DEADLINE"),
    "node fail": (
        evidence("NODE_FAIL", job=job("NODE_FAIL", reason="NodeDown")), Kind.NODE_LOST, "NODE_FAIL (NodeDown)",
    ),
    "node fail seen inside": (
        evidence("NODE_FAIL", outcome=outcome(AttemptResult.FAILED, "", replace(KILLED, kind=Kind.AGENT_LOST))),
        Kind.NODE_LOST, "the job saw: rank 1",
    ),
    "node down, the job ended first": (
        evidence("FAILED", job=job("FAILED", nodes_down=("n2",)), outcome=outcome(AttemptResult.FAILED, "", LOST)),
        Kind.NODE_LOST, "Slurm reports node n2 down; the job saw: its connection ended",
    ),
    "another node down": (
        evidence("FAILED", job=job("FAILED", nodes_down=("n1",)), outcome=outcome(AttemptResult.FAILED, "", LOST)),
        Kind.AGENT_LOST, "its connection ended",
    ),
    "out of memory": (evidence("OUT_OF_MEMORY"), Kind.OUT_OF_MEMORY, "OUT_OF_MEMORY; give the job more"),
    "out of memory, seen from inside": (
        evidence("OUT_OF_MEMORY", outcome=outcome(AttemptResult.FAILED, "", SHORT_OF_MEMORY)), Kind.OUT_OF_MEMORY,
        "rank 1 died of SIGKILL",
    ),
    "a wait that orch has given up": (
        evidence("CANCELLED", started=False, gave_up="1 node was missing for 1h01m"), Kind.NODES_MISSING,
        "1 node was missing for 1h01m",
    ),
    "a wait that orch has given up just as it ended": (
        evidence("COMPLETED", gave_up="1 node was missing", outcome=outcome(AttemptResult.STOPPED, "1 node was")),
        Kind.NODES_MISSING, "1 node was missing",
    ),
    "a wait that orch has given up, of a job that Slurm forgot": (
        evidence(None, absent_for=60.0, silent_for=999.0, started=False, gave_up="1 node was missing"),
        Kind.NODES_MISSING, "1 node was missing",
    ),
    "boot": (evidence("BOOT_FAIL", started=False), Kind.LAUNCH_FAILED, "BOOT_FAIL"),
    "outcome beats FAILED": (
        evidence("FAILED", outcome=outcome(AttemptResult.FAILED, "", KILLED)), Kind.RANK_KILLED,
        "rank 1 died of SIGKILL",
    ),
    "outcome beats COMPLETED": (
        evidence("COMPLETED", outcome=outcome(AttemptResult.FAILED, "", BUG)), Kind.USER_ERROR, "ValueError",
    ),
    "a bug before the time limit": (
        evidence("TIMEOUT", outcome=outcome(AttemptResult.FAILED, "", BUG)), Kind.USER_ERROR, "ValueError",
    ),
    "stopped at the limit": (
        evidence("FAILED", outcome=outcome(AttemptResult.STOPPED, "the time limit is near")), Kind.TIME_LIMIT,
        "stopped, with step 30 saved",
    ),
    "stopped, and nothing is known to be saved": (
        evidence("FAILED", outcome=outcome(AttemptResult.STOPPED, "the time limit is near"), saved_step=None),
        Kind.TIME_LIMIT, "stopped: the time limit is near",
    ),
    "scancelled, and nothing is known to be saved": (
        evidence("CANCELLED", outcome=SIGNALLED, saved_step=None),
        Kind.CANCELLED, "job 7 was cancelled, not by orch",
    ),
    "stopped by a signal": (
        evidence("FAILED", outcome=outcome(AttemptResult.STOPPED, "an agent got SIGUSR2")), Kind.PREEMPTED, "SIGUSR2",
    ),
    "stopped by a signal, on a node that is down": (
        evidence("FAILED", job=job("FAILED", nodes_down=("n2",)), outcome=SIGNALLED), Kind.NODE_LOST,
        "stopped, with step 30 saved: an agent got SIGTERM; node n2 is down",
    ),
    "stopped by a signal, the limit was shortened": (
        evidence("FAILED", outcome=SIGNALLED, near_limit=True), Kind.TIME_LIMIT,
        "an agent got SIGTERM; the job was near its time limit",
    ),
    "stopped by a signal, Slurm reports a lost node": (
        evidence("FAILED", outcome=SIGNALLED, tails=agents(
            f"{STEP_CANCELLED} DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"
        )),
        Kind.NODE_LOST, "Slurm printed: slurmstepd-n1: error: *** STEP 2.0 ON n1 CANCELLED AT",
    ),
    "stopped by a signal, Slurm reports the limit": (
        evidence("FAILED", outcome=SIGNALLED, tails=agents(f"{STEP_CANCELLED} DUE TO TIME LIMIT ***")), Kind.TIME_LIMIT,
        "DUE TO TIME LIMIT",
    ),
    "stopped by a signal, within a preemption's grace time": (
        evidence("FAILED", outcome=SIGNALLED, tails=agents(f"{STEP_CANCELLED} ***\norch-agent: got SIGTERM")),
        Kind.PREEMPTED, "stopped, with step 30 saved: an agent got SIGTERM",
    ),
    "could not stop in time, on a node that is down": (
        evidence("FAILED", job=job("FAILED", nodes_down=("n2",)), outcome=outcome(AttemptResult.FAILED, "", LATE)),
        Kind.NODE_LOST, "and were killed; node n2 is down",
    ),
    "could not stop in time, shortened limit": (
        evidence("FAILED", outcome=outcome(AttemptResult.FAILED, "", LATE), near_limit=True), Kind.TIME_LIMIT,
        "near its time limit",
    ),
    "scancelled, could not save in time": (
        evidence("CANCELLED", outcome=outcome(AttemptResult.FAILED, "", LATE)), Kind.CANCELLED,
        "job 7 was cancelled, not by orch; ranks were asked to save",
    ),
    "scancelled": (evidence("CANCELLED"), Kind.CANCELLED, "cancelled, not by orch"),
    "scancelled, saved": (
        evidence("CANCELLED", outcome=SIGNALLED), Kind.CANCELLED,
        "cancelled, not by orch, with step 30 saved",
    ),
    "revoked, saved": (evidence("REVOKED", outcome=SIGNALLED), Kind.CANCELLED, "cancelled, not by orch"),
    "killed before the scancel": (
        evidence("CANCELLED", outcome=outcome(AttemptResult.FAILED, "", KILLED)), Kind.RANK_KILLED,
        "rank 1 died of SIGKILL",
    ),
    "cancelled by us": (evidence("CANCELLED", cancel_asked=True), Kind.CANCELLED, "cancelled by `orch cancel`"),
    "requeued": (evidence("CANCELLED", job=job("CANCELLED", restarts=1)), Kind.NODE_LOST, "requeued job 7"),
    "requeued, unknown to accounting": (
        evidence("CANCELLED", requeued="requeued by Slurm"), Kind.NODE_LOST, "Slurm requeued job 7; orch ended it",
    ),
    "requeued, but it ended before that": (
        evidence("TIMEOUT", requeued="requeued by Slurm"), Kind.TIME_LIMIT, "TIMEOUT",
    ),
    "requeued, never trained": (
        evidence("CANCELLED", job=job("CANCELLED", restarts=1), started=False), Kind.LAUNCH_FAILED, "requeued job 7",
    ),
    "lost": (evidence(None, absent_for=61.0, silent_for=61.0), Kind.JOB_LOST, "heartbeat is silent"),
    "lost, accounting silent": (
        evidence(None, absent_for=301.0, silent_for=61.0, unrecorded=True), Kind.JOB_LOST, "accounting does not answer",
    ),
    "stuck": (evidence("COMPLETING", leaving_for=LEAVING_LIMIT), Kind.UNKNOWN, "COMPLETING"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_ends_keep_their_cause(name: str) -> None:
    given, kind, words = ENDS[name]
    state, reason, failure = judge(given)
    assert state is (AttemptState.LOST if given.job is None and given.outcome is None else AttemptState.ENDED)
    assert (failure.kind if failure else None) == kind
    assert words in reason


def test_node_reported_by_the_job_is_kept_when_slurm_names_the_cause() -> None:
    given = evidence("NODE_FAIL", outcome=outcome(AttemptResult.FAILED, "", KILLED))
    assert classify(given).node == "n2"


def test_down_node_is_named_if_the_job_saw_only_its_own_stop() -> None:
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
def test_failed_batch_script_is_recognized_without_its_exit_code(
    state: str, ending: dict[str, int], script: bool, code: int | None
) -> None:
    failure = classify(evidence(state, started=False, job=job(state, **ending)))
    assert (failure.kind, failure.script, failure.exit_code) == (Kind.LAUNCH_FAILED, script, code)


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
def test_logs_are_used_only_without_an_outcome(name: str) -> None:
    text, kind = LOGS[name]
    assert classify(evidence("FAILED", tails=agents(text))).kind == kind
    with_outcome = evidence("FAILED", tails=agents(text), outcome=outcome(AttemptResult.FAILED, "", KILLED))
    assert classify(with_outcome) == KILLED


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (f"{STEP_CANCELLED} ***\norch-agent: got SIGTERM\nsrun: error: n1: task 0: Killed", "cancelled"),
        (f"{STEP_CANCELLED} ***\n[Errno 5] Input/output error", "cancelled"),
        (f"[Errno 28] No space left on device\n{STEP_CANCELLED} ***\nsrun: error: n1: task 0: Killed", "storage"),
        ("srun: error: n1: task 0: Killed", "agent_lost"),  # before the scancel
        (f"{STEP_CANCELLED} DUE TO TIME LIMIT ***", "time_limit"),
    ],
)
def test_processes_killed_by_scancel_do_not_explain_it(text: str, kind: str) -> None:
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
ON_N1: dict[str, Any] = {"nodes": ("n1",), "batch_node": "n1", "unlaunched": True, "cancelled_by": 0}
ON_BOTH: dict[str, Any] = {"nodes": ("n1", "n2"), "cancelled_by": 0}
NOT_LAUNCHED = {
    "its disk is full": (job("CANCELLED", **ON_N1), "", "launch_failed", "n1", "n1 could not launch job 7; see its"),
    "its prolog fails": (
        job("CANCELLED", **ON_N1), "Error running slurm prolog: 1", "launch_failed", "n1",
        "n1 could not launch job 7: Error running slurm prolog: 1",
    ),
    "on the node of rank 0, which is not the first": (
        job("CANCELLED", **ON_BOTH, batch_node="n2", unlaunched=True), "", "launch_failed", "n2",
        "n2 could not launch job 7",
    ),
    "on an unknown node": (
        job("CANCELLED", **ON_BOTH, unlaunched=True), "", "launch_failed", None, "a node of n1, n2 could not launch",
    ),
    "no accounting": (
        job("CANCELLED", nodes=("n1",), batch_node="n1", unlaunched=True), "", "launch_failed", "n1",
        "n1 could not launch job 7",
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
def test_failed_launch_on_a_node_differs_from_a_persons_scancel(name: str) -> None:
    ended, text, kind, node, words = NOT_LAUNCHED[name]
    failure = judge(evidence(job=ended, started=False, tails=agents(text)))[2]
    assert failure is not None
    by_script = kind == "launch_failed" and node is None and ended.state != "CANCELLED"
    assert (failure.kind, failure.node, failure.script) == (kind, node, by_script)
    assert words in failure.reason


def test_a_hold_does_not_explain_a_jobs_end() -> None:
    for reason in ("JobHeldUser", "JobHeldAdmin"):
        ended = job("NODE_FAIL", reason=reason, nodes_down=("n2",))
        assert classify(evidence(job=ended)).reason == "Slurm ended job 7: NODE_FAIL"
    assert classify(evidence(job=job("NODE_FAIL", reason="NodeDown"))).reason.endswith("NODE_FAIL (NodeDown)")


NO_APPTAINER = "slurmstepd: error: execve(): apptainer: No such file or directory"
EXIT_OF_ALL = "srun: error: n[1-2]: tasks 0-1: Exited with exit code 2"
MISSING_PROGRAMS = {
    "on all nodes": ({"7_0_log.err": NO_APPTAINER, "7_1_log.err": NO_APPTAINER, "7.err": EXIT_OF_ALL}, None,
                     "apptainer was not found on n[1-2]; install it there, or load its module (template `modules`), or "
                     "cluster.template_args.program=PATH"),
    "no exits": ({"7_0_log.err": NO_APPTAINER}, None, "apptainer was not found on n1, n2; "),
    "on one node": (
        {"7_1_log.err": NO_APPTAINER, "7.err": "srun: error: n2: task 1: Exited with exit code 2"}, "n2",
        "apptainer was not found on n2; install",
    ),
    "in a task's shell": ({"7_0_log.err": "bash: line 3: exec: shifter: not found"}, None, "shifter was not found"),
    "a path": (
        {"7_0_log.err": "hello\nbash: line 3: /opt/python3: No such file or directory\n"}, None,
        "/opt/python3 was not found on n1, n2; check that every node sees that path",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISSING_PROGRAMS)
def test_a_program_that_nodes_lack_is_named_with_the_nodes_and_the_remedy(name: str) -> None:
    tails, node, words = MISSING_PROGRAMS[name]
    ended = job("FAILED", nodes=("n1", "n2"), exit_code=2)
    failure = classify(evidence(job=ended, started=False, tails=tails))
    assert (failure.kind, failure.node) == (Kind.LAUNCH_FAILED, node)
    assert words in failure.reason


def test_an_agent_that_never_joined_was_not_started_by_its_node() -> None:
    tails, node, words = MISSING_PROGRAMS["on one node"]
    late = Failure(kind=Kind.AGENT_LOST, reason="no agent of node(s) 1 joined within 300 s")
    given = evidence(
        job=job("FAILED", nodes=("n1", "n2")), outcome=outcome(AttemptResult.FAILED, "", late), tails=tails
    )
    failure = classify(given)
    assert (failure.kind, failure.node) == (Kind.LAUNCH_FAILED, node)
    assert failure.reason.startswith(words)
    assert failure.reason.endswith(f": {late.reason}")
    assert classify(replace(given, tails=agents("hello"))) == late


def test_a_program_that_a_setup_script_lacks_is_no_cause() -> None:
    text = "bash: line 2: /opt/site/hello: No such file or directory\nTraceback"
    failure = classify(evidence(job=job("FAILED", nodes=("n1",)), started=False, tails={"7_0_log.err": text}))
    assert "was not found" not in failure.reason


def test_verdict_on_a_job_that_never_ran_waits_for_accounting() -> None:
    ended = job("CANCELLED", nodes=("n1",), unlaunched=True)
    assert judge(evidence(job=ended, started=False, ended_for=1.0))[0] is AttemptState.RUNNING
    assert judge(evidence(job=replace(ended, cancelled_by=0), started=False, ended_for=1.0))[0] is AttemptState.ENDED
    assert judge(evidence(job=ended, started=False, ended_for=1.0, cancel_asked=True))[0] is AttemptState.ENDED


def test_a_log_line_never_blames_a_node() -> None:
    assert classify(evidence("FAILED", tails=agents("srun: error: Node failure on n17"))).node is None


def test_step_of_a_command_does_not_count_as_saved() -> None:
    stopped = replace(SIGNALLED, step=119)
    for state, words in (
        ("FAILED", "stopped: an agent got SIGTERM"),
        ("CANCELLED", "job 7 was cancelled, not by orch"),
    ):
        failure = judge(evidence(state, outcome=stopped, saved_step=None))[2]
        assert failure is not None
        assert (failure.step, failure.reason) == (119, words)


def test_signalled_srun_is_named_and_no_agent_is_blamed() -> None:
    text = "srun: forcing job termination\nsrun: error: n1: task 0: Killed\n"
    failure = classify(evidence("FAILED", started=True, tails=agents(text)))
    assert failure.kind is Kind.PREEMPTED
    assert "srun got SIGTERM (`scancel --full`?) and killed its step; `scancel -s TERM " in failure.reason
    full = classify(evidence("FAILED", started=True, tails=agents(f"OSError: [Errno 28]\n{text}")))
    assert full.kind is Kind.STORAGE, "printed before the kill"
    killed = classify(evidence("FAILED", started=True, tails=agents("srun: error: n1: task 0: Killed")))
    assert killed.kind is Kind.AGENT_LOST


def test_end_without_explanation_is_unknown_with_the_outcomes_reason() -> None:
    failed = replace(outcome(AttemptResult.FAILED, "the coordinator ended"), exit_code=7)
    state, _, failure = judge(evidence("FAILED", outcome=failed))
    assert state is AttemptState.ENDED
    assert failure == Failure(kind=Kind.UNKNOWN, reason="the coordinator ended", step=30, exit_code=7)
