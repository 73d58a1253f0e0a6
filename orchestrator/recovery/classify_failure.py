"""Judge from evidence alone whether and why an attempt has ended. Pure."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from orchestrator.recovery.missing_program import find_missing_program
from orchestrator.scheduler.interface import ENDED_STATES, LEAVING_STATES, JobStatus
from orchestrator.states import AttemptState
from trainer.protocol.cut_text import cut
from trainer.protocol.failures.failure_patterns import Meaning, log_line_meaning
from trainer.protocol.failures.outcome import (
    MORE_MEMORY,
    TRAITS,
    AgentEnd,
    AgentReport,
    AttemptOutcome,
    AttemptResult,
    ExitCode,
    Failure,
    FailureKind,
    select_kinds,
)

LOST_AFTER = 60.0
"""Seconds until a job counts as lost, if look-ups are answered without it and its heartbeat is silent."""
RECORD_WITHIN = 300.0
"""Replaces LOST_AFTER while accounting does not answer, because accounting may still name the cause."""
OUTCOME_GRACE = 5.0  # seconds until an outcome is visible after the job was seen to have ended
RECORD_GRACE = 10.0  # seconds that accounting may take to show who cancelled a job before its script ran
GONE_AFTER = 5.0  # seconds of answered look-ups without the job after which an existing outcome is accepted
LEAVING_LIMIT = 600.0
"""Seconds in COMPLETING after which the attempt is fenced and the next one starts without waiting for it."""

Verdict = tuple[AttemptState, str, Failure | None]
"""State of an attempt (RUNNING while nothing certain is known), the reason, and the failure unless it finished."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """State of an attempt at one moment. Durations are in seconds of the controller's monotonic clock."""

    attempt: int
    answered: bool  # the scheduler answered; without an answer there is no verdict
    job: JobStatus | None  # adopted job as the scheduler knows it; None if the answered look-ups do not include it
    restarts: int = 0  # times that Slurm had requeued the job before this attempt
    requeued_job: JobStatus | None = None  # next run of the job, if Slurm has ended the attempt's and requeued it
    requeued_for: float = 0.0  # seconds since that was first seen
    unrecorded: bool = False  # the job has left the queue while accounting, which knows its end, does not answer
    absent_for: float = 0.0  # seconds of answered look-ups without the job
    ended_for: float = 0.0  # seconds since the job was first seen to have ended, or to be gone and have an outcome
    leaving_for: float = 0.0  # seconds since the job was first seen in COMPLETING
    started: bool = False  # agents have left a heartbeat or an event
    silent_for: float = 0.0  # seconds for which the heartbeat was seen unchanged or missing
    gone: tuple[str, ...] = ()  # nodes that the scheduler has removed from a running job with spare nodes
    leader_gone: str = ""  # first node, if the scheduler has removed it from the job while the others keep running
    outcome: AttemptOutcome | None = None
    cancel_asked: bool = False
    saved_step: int | None = None  # newest step that this attempt saved, according to its own events
    tails: Mapping[str, str] = field(default_factory=dict)  # ends of the agents' logs by file name, if needed
    near_limit: bool = False  # it stopped when Slurm's signal was due under the job's final time limit
    leader: str = ""  # node of the attempt's coordinator; empty if unknown
    reports: tuple[AgentReport, ...] = ()  # from agents that outlived the coordinator; read only without an outcome
    still_for: float = 0.0  # seconds for which no file of the silent job has grown; 0 unless it is RUNNING
    overstayed: float = 0.0  # seconds for which the job has kept running after its attempt's outcome
    saves_failing: str = ""  # when saves began to fail and why, from the newest heartbeat; empty while they succeed
    waits: str = ""  # which node's preparation waits, and for what, from the newest heartbeat
    unsaved: str = ""  # what a failure would repeat, while a user's program has saved nothing for long
    disk: str = ""  # why the run's folder is not writable; probed only if the job is silent
    lost_interpreter: str = ""  # the job script's interpreter, if it is gone; checked only if no agent has started
    # Reasons of orch's own requests to end the job; empty without such a request:
    silenced: str = ""  # the heartbeat was silent
    requeued: str = ""  # Slurm had restarted it
    gave_up: str = ""  # the job had waited for nodes for too long, and a smaller one follows
    odd: str = ""  # foreign or damaged entries in the run directory, and the remedy

    @property
    def job_ended(self) -> bool:
        return self.job is not None and self.job.state in ENDED_STATES

    @property
    def job_leaving(self) -> bool:
        return self.job is not None and self.job.state in LEAVING_STATES


class Role(StrEnum):
    """Role of a log message in finding the cause."""

    ROOT = "root"  # a cause
    CASCADE = "cascade"  # an effect of another process's end, which names no cause and never replaces a root
    TEARDOWN = "teardown"  # printed during shutdown: ignored


STANDS_FOR: dict[Meaning, tuple[FailureKind, Role]] = {
    Meaning.NO_SECRETS: (FailureKind.SUBMIT_REJECTED, Role.ROOT),
    Meaning.TIME_LIMIT: (FailureKind.TIME_LIMIT, Role.ROOT),
    Meaning.PREEMPTED: (FailureKind.PREEMPTED, Role.ROOT),
    Meaning.NODE_LOST: (FailureKind.NODE_LOST, Role.ROOT),
    Meaning.STORAGE: (FailureKind.STORAGE, Role.ROOT),
    Meaning.NOT_LAUNCHED: (FailureKind.LAUNCH_FAILED, Role.ROOT),
    Meaning.INSTALLATION: (FailureKind.INSTALLATION, Role.ROOT),
    Meaning.MEMORY: (FailureKind.OUT_OF_MEMORY, Role.ROOT),
    Meaning.TASK_KILLED: (FailureKind.AGENT_LOST, Role.ROOT),
    Meaning.PEER_GONE: (FailureKind.AGENT_LOST, Role.CASCADE),
    Meaning.NO_RENDEZVOUS: (FailureKind.LAUNCH_FAILED, Role.CASCADE),
    Meaning.REQUEUED: (FailureKind.NODE_LOST, Role.CASCADE),
    Meaning.CANCELLED: (FailureKind.CANCELLED, Role.TEARDOWN),
    Meaning.TEARDOWN: (FailureKind.UNKNOWN, Role.TEARDOWN),
}
"""Failure kind and role for every meaning that a log line can have."""


class Match(NamedTuple):
    """Log line that matches the table of failure patterns."""

    kind: FailureKind
    role: Role
    line: str
    source: str


def scan(tails: Mapping[str, str]) -> list[Match]:
    """Return every line that matches a known pattern, in log order."""
    lines = ((source, line) for source, text in tails.items() for line in text.splitlines())
    known = ((source, line, log_line_meaning(line)) for source, line in lines)
    return [Match(*STANDS_FOR[meaning], cut(line.strip(), 300), source) for source, line, meaning in known if meaning]


def before_cancel(matches: list[Match]) -> list[Match]:
    """Return the matches that precede Slurm's cancel message in each log."""
    cancelled: set[str] = set()
    found = []
    for match in matches:
        if match.kind is FailureKind.CANCELLED:
            cancelled.add(match.source)
        elif match.source not in cancelled:
            found.append(match)
    return found


def earliest(matches: list[Match]) -> Match | None:
    """Return the first root cause, else the first cascade."""
    found = [match for role in (Role.ROOT, Role.CASCADE) for match in matches if match.role is role]
    return found[0] if found else None


def judge(evidence: Evidence) -> Verdict:
    """Return the verdict on an attempt. A missing report alone does not end an attempt."""
    # Without an answer from the scheduler the state is unknown, whatever the files show.
    if not evidence.answered:
        return _open("the scheduler does not answer: nothing is assumed")
    job = evidence.job
    if job is None:
        return _judge_absent(evidence) if evidence.requeued_job is None else _judge_requeued(evidence)
    # A job in COMPLETING still has processes; a stuck one is fenced instead of waited for.
    if evidence.job_leaving:
        stuck = evidence.leaving_for >= LEAVING_LIMIT
        return _judge_ended(evidence) if stuck else _open(f"job {job.job_id} is {job.state}")
    # Slurm has removed the first node from the job, and the heartbeat is silent.
    if evidence.leader_gone and evidence.silent_for >= LOST_AFTER:
        if evidence.outcome is not None:
            return _judge_ended(evidence)
        # With --no-kill the job would idle until its time limit.
        leader = evidence.leader_gone
        reason = f"{leader}, which led job {job.job_id}, is out of the job and its heartbeat is silent"
        return AttemptState.ENDED, reason, Failure(kind=FailureKind.NODE_LOST, reason=reason, node=leader)
    if not evidence.job_ended:
        return _open(f"job {job.job_id} is {job.state}")
    # The program exited on its own, so its outcome may become visible a little later.
    by_itself = job.state in _EXIT_STATES
    if evidence.outcome is None and evidence.started and by_itself and evidence.ended_for < OUTCOME_GRACE:
        return _open(f"job {job.job_id} has ended: waiting for its outcome file")
    # Accounting may show a little later who cancelled it: a person, or a node that could not launch it.
    if job.cancelled_by is None and evidence.ended_for < RECORD_GRACE and _launch_failed(evidence, job):
        return _open(f"job {job.job_id} was cancelled: waiting for accounting to show by whom")
    return _judge_ended(evidence)


def _open(reason: str) -> Verdict:
    return AttemptState.RUNNING, reason, None


def _judge_requeued(evidence: Evidence) -> Verdict:
    """Return the verdict on a run of a job that Slurm has ended, while accounting does not show how."""
    if evidence.requeued_for >= RECORD_GRACE or evidence.unrecorded:
        return _judge_ended(evidence)
    return _open("Slurm has requeued the job: waiting for accounting to show why")


def _judge_absent(evidence: Evidence) -> Verdict:
    if evidence.outcome is not None and evidence.absent_for >= GONE_AFTER:
        return _judge_ended(evidence)
    if evidence.absent_for < (RECORD_WITHIN if evidence.unrecorded else LOST_AFTER):
        return _open("the scheduler does not know the job: looking again")
    if evidence.silent_for < LOST_AFTER:
        return _open("the scheduler does not know the job, but its heartbeat continues")
    failure = classify(evidence)
    return AttemptState.LOST, failure.reason, failure


def _judge_ended(evidence: Evidence) -> Verdict:
    outcome = evidence.outcome
    if outcome is not None and outcome.result is AttemptResult.FINISHED:
        return AttemptState.ENDED, outcome.reason or "all steps are trained", None
    failure = classify(evidence)
    return AttemptState.ENDED, failure.reason, failure


_SLURM_KINDS = {state: kind for kind, traits in TRAITS.items() for state in traits.slurm_states}
"""Failure kinds of the states in which Slurm itself names the cause."""

_EXIT_STATES = frozenset({"COMPLETED", "FAILED"})  # states that Slurm derives from the exit of the batch script
_TAKEN_AWAY = frozenset({"CANCELLED", "REVOKED"})
"""States after a scancel, by a person or by the daemon of a node that could not launch the job."""
_SLURMD_USER = 0
_SENDERS = select_kinds(lambda traits: traits.asked_by_slurm)  # failure kinds for which Slurm asks a job to stop
_STOPS = select_kinds(lambda traits: traits.asked_to_stop)
"""Failure kinds that the job itself reports as the reason to stop."""
_SLURM_CANCEL = re.compile(r"CANCELLED AT .{0,100} DUE TO ")
_UNLAUNCHED = re.compile(r"Task launch for \S{1,100} failed on node (\S{1,300}): ")
_SRUN_SIGNALLED, _LOST = "srun: forcing job termination", FailureKind.AGENT_LOST
_OWN_CAUSES = select_kinds(lambda traits: traits.seen_inside)
"""Causes that the job saw from inside; Slurm's report of its end must not hide them."""


def classify(evidence: Evidence) -> Failure:
    """Return the earliest root cause of an attempt that ended without finishing."""
    job, outcome = evidence.job, evidence.outcome
    # A user's cancel explains the end, whatever the job reported.
    if evidence.cancel_asked:
        return Failure(kind=FailureKind.CANCELLED, reason="cancelled by `orch cancel`")
    # The job saw this cause itself before Slurm ended it.
    if outcome is not None and outcome.failure is not None and outcome.failure.kind in _OWN_CAUSES:
        return outcome.failure
    # An older release of orch may not know what a newer release refuses.
    refused = next((report for report in evidence.reports if report.end is AgentEnd.REFUSED), None)
    if refused is not None:
        return Failure(kind=FailureKind.INSTALLATION, reason=refused.reason, node=refused.name)
    # The job was asked to stop and cancelled while it waited for nodes. That explains any end.
    if evidence.gave_up:
        return Failure(kind=FailureKind.NODES_MISSING, reason=evidence.gave_up)
    # Slurm restarted the job, and orch ended it, because a requeued job must not train again.
    restarted = job is not None and job.restarts > evidence.restarts
    if job is not None and (restarted or (evidence.requeued and job.state in _TAKEN_AWAY)):
        times = f" ({job.restarts} restarts)" if job.restarts else ""  # unknown to accounting
        return _requeue_failure(evidence, f"Slurm requeued job {job.job_id}{times}; orch ended it")
    # A coordinator that stalled cannot report its own end.
    if outcome is None and (stood := _stood_still(evidence, job)) is not None:
        return stood
    # Someone else cancelled the job. It is not restarted, whether or not its ranks saved and exited in time.
    by_others = job is not None and job.state in _TAKEN_AWAY and not evidence.silenced
    stop_failed = outcome is not None and outcome.failure is not None and outcome.failure.kind in _STOPS
    if by_others and job and outcome and (outcome.result is AttemptResult.STOPPED or stop_failed):
        saved = _saved_step_suffix(evidence) if outcome.failure is None else f"; {outcome.failure.reason}"
        reason = f"job {job.job_id} was cancelled, not by orch{saved}"
        return Failure(kind=FailureKind.CANCELLED, reason=reason, step=outcome.step or None)
    # Its time limit passed while saves failed, so more time would not have helped.
    if evidence.saves_failing and job is not None and _SLURM_KINDS.get(job.state) is FailureKind.TIME_LIMIT:
        reason = f"job {job.job_id} reached its time limit: {evidence.saves_failing}"
        return Failure(kind=FailureKind.STORAGE, reason=reason)
    # Slurm names the cause.
    if job is not None and job.state in _SLURM_KINDS:
        return _failure_from_slurm(job, outcome)
    # The coordinator lost a node before Slurm noticed, and now Slurm reports the node down too.
    lost = outcome.failure if outcome else None
    if job is not None and lost is not None and lost.kind is _LOST and lost.node in job.nodes_down:
        return replace(
            lost, kind=FailureKind.NODE_LOST, reason=f"Slurm reports node {lost.node} down; the job saw: {lost.reason}"
        )
    # An agent that never joined was perhaps never started: its node lacks a program.
    if job is not None and lost is not None and lost.kind is _LOST and not lost.node:
        lost = _unstarted_agent(evidence, job, lost)
        if lost is not None:
            return lost
    # The coordinator's outcome takes precedence over COMPLETED and FAILED.
    if outcome is not None:
        return _failure_from_outcome(evidence, outcome)
    if job is None and (requeued := evidence.requeued_job) is not None:
        return _requeue_failure(evidence, f"Slurm requeued job {requeued.job_id}; accounting does not show why")
    if job is None:
        reason = f"Slurm has not known the job for {evidence.absent_for:.0f} s and its heartbeat is silent"
        also = "; its accounting does not answer" if evidence.unrecorded else ""
        return Failure(kind=FailureKind.JOB_LOST, reason=reason + also)
    return _failure_from_logs(evidence, job)


def _unstarted_agent(evidence: Evidence, job: JobStatus, lost: Failure) -> Failure | None:
    """Return the failure of a job whose other agents waited for one that its node could not start."""
    missing = find_missing_program(evidence.tails)
    if missing is None:
        return None
    node, reason = missing.only_node(job.nodes), f"{missing.describe(())}: {lost.reason}"
    return replace(lost, kind=FailureKind.LAUNCH_FAILED, node=node, reason=reason)


def _requeue_failure(evidence: Evidence, reason: str) -> Failure:
    return Failure(kind=FailureKind.NODE_LOST if evidence.started else FailureKind.LAUNCH_FAILED, reason=reason)


def _stood_still(evidence: Evidence, job: JobStatus | None) -> Failure | None:
    """Return a silent coordinator's failure, as reported by its own node, its peers or orch's cancellation.

    A node is named only if it was seen to stall; silence alone may be due to the network or the file system.
    """
    taken = job is not None and job.state in _TAKEN_AWAY and not evidence.silenced
    if taken or (job is not None and job.state in _SLURM_KINDS):
        return None
    frozen = next((report for report in evidence.reports if report.end is AgentEnd.FROZEN), None)
    if frozen is not None:
        return Failure(kind=FailureKind.AGENT_LOST, reason=frozen.reason, node=frozen.name)
    silent = [report for report in evidence.reports if report.end is AgentEnd.SILENT and report.node != 0]
    if silent and evidence.leader:
        reason = f"the coordinator on {evidence.leader} fell silent: {silent[0].reason}"
        return Failure(kind=FailureKind.AGENT_LOST, reason=reason, node=evidence.leader)
    if evidence.silenced:
        return Failure(kind=FailureKind.AGENT_LOST, reason=f"orch ended the job: {evidence.silenced}")
    return None


def _failure_from_slurm(job: JobStatus, outcome: AttemptOutcome | None) -> Failure:
    kind = _SLURM_KINDS[job.state]
    seen = outcome.failure if outcome else None
    # A hold is no cause: Slurm may still record that of the submission, or one that was released since.
    detail = f" ({job.reason})" if job.reason and job.reason != "None" and not job.reason.startswith("JobHeld") else ""
    reason = f"Slurm ended job {job.job_id}: {job.state}{detail}"
    node = job.nodes_down[0] if kind is FailureKind.NODE_LOST and job.nodes_down else None
    if seen is not None and kind in (FailureKind.NODE_LOST, FailureKind.OUT_OF_MEMORY):
        node = seen.node or node
        return replace(seen, kind=kind, node=node, reason=f"{reason}; the job saw: {seen.reason}")
    reason = f"{reason}; {MORE_MEMORY}" if kind is FailureKind.OUT_OF_MEMORY else reason
    step = outcome.step if outcome else None
    # A job that Slurm could not launch has no exit code.
    code = None if kind is FailureKind.LAUNCH_FAILED else job.exit_code
    return Failure(kind=kind, reason=reason, node=node, step=step, exit_code=code, signal=job.signal)


def _failure_from_outcome(evidence: Evidence, outcome: AttemptOutcome) -> Failure:
    if outcome.failure is not None and outcome.failure.kind is not FailureKind.PREEMPTED:
        return outcome.failure
    if outcome.failure is None and outcome.result is not AttemptResult.STOPPED:
        return Failure(kind=FailureKind.UNKNOWN, reason=outcome.reason, step=outcome.step, exit_code=outcome.exit_code)
    saved = f"stopped{_saved_step_suffix(evidence)}: {outcome.reason}"
    stopped = outcome.failure or Failure(kind=FailureKind.PREEMPTED, reason=saved, step=outcome.step or None)
    word = outcome.reason.lower().replace("_", " ")
    if outcome.failure is None and ("time limit" in word or "deadline" in word):
        return replace(stopped, kind=FailureKind.TIME_LIMIT)
    return _failure_from_signal(evidence, stopped)


def _failure_from_signal(evidence: Evidence, stopped: Failure) -> Failure:
    """Return the failure of an attempt that received a signal, which may have one of several causes.

    Slurm sends it for preemption, the time limit and a lost node.
    """
    job = evidence.job
    # Slurm prints its own message on every node whose step it ends.
    match = next(
        (match for match in scan(evidence.tails) if match.kind in _SENDERS and _SLURM_CANCEL.search(match.line)), None
    )
    if match is not None:
        return replace(stopped, kind=match.kind, reason=f"{stopped.reason}; Slurm printed: {match.line}")
    if job is not None and job.nodes_down:
        down = job.nodes_down[0]
        return replace(stopped, kind=FailureKind.NODE_LOST, node=down, reason=f"{stopped.reason}; node {down} is down")
    if evidence.near_limit:
        reason = f"{stopped.reason}; the job was near its time limit"
        return replace(stopped, kind=FailureKind.TIME_LIMIT, reason=reason)
    return stopped


def _saved_step_suffix(evidence: Evidence) -> str:
    """Describe the newest saved step of the attempt, which may be older than the step it had reached."""
    return f", with step {evidence.saved_step} saved" if evidence.saved_step is not None else ""


def _failure_from_logs(evidence: Evidence, job: JobStatus) -> Failure:
    kind, reason = _from_logs(evidence, job)
    node = _unlaunched_node(evidence, job) if kind is FailureKind.LAUNCH_FAILED else None
    # The batch script exited before any agent started; its exit code may be unknown.
    script = kind is FailureKind.LAUNCH_FAILED and job.state in _EXIT_STATES and not evidence.started and node is None
    code = job.exit_code if kind is not FailureKind.LAUNCH_FAILED or (script and job.state == "FAILED") else None
    return Failure(kind=kind, reason=reason, node=node, exit_code=code, signal=job.signal, script=script)


def _launch_failed(evidence: Evidence, job: JobStatus) -> bool:
    """Return whether a node's daemon cancelled a job that it could not launch, as it does with --no-requeue.

    If a person cancels a job, Slurm signals the script and says so in the job's log.
    """
    by_person = job.cancelled_by not in (None, _SLURMD_USER) or evidence.cancel_asked
    ran = evidence.started or any(match.kind is FailureKind.CANCELLED for match in scan(evidence.tails))
    return job.unlaunched and not by_person and not ran


def _unlaunched_node(evidence: Evidence, job: JobStatus) -> str | None:
    """Return the job's node that Slurm reports as unable to start it; None unless it is certain which one."""
    named = (_UNLAUNCHED.search(match.line) for match in scan(evidence.tails))
    found = next((name[1] for name in named if name and name[1] in job.nodes), None)
    if found is None and (missing := find_missing_program(evidence.tails)) is not None:
        return missing.only_node(job.nodes)
    return found or (job.batch_node or None if _launch_failed(evidence, job) else None)


def _from_logs(evidence: Evidence, job: JobStatus) -> tuple[FailureKind, str]:
    matches = scan(evidence.tails)
    # Processes killed after a cancellation do not explain it.
    found = earliest(before_cancel(matches) if job.state in _TAKEN_AWAY else matches)
    ended = f"job {job.job_id} ended as {job.state} without an outcome"
    if _launch_failed(evidence, job):
        cause = f": {found.line}" if found is not None else "; see its slurmd's log for the cause"
        node = job.batch_node or f"a node of {', '.join(job.nodes)}"
        return FailureKind.LAUNCH_FAILED, f"{node} could not launch job {job.job_id}{cause}"
    # Messages that result from the cancellation do not hide it.
    if job.state in _TAKEN_AWAY and (found is None or found.role is not Role.ROOT):
        return FailureKind.CANCELLED, f"job {job.job_id} was cancelled, not by orch"
    # The agents' last report, or a full or broken disk, explains why the outcome is missing.
    rooted = found is not None and found.role is Role.ROOT
    if job.exit_code == ExitCode.STORAGE or (evidence.disk and not rooted):
        why = evidence.saves_failing or evidence.disk or "its exit code (74) means that its storage was full"
        return FailureKind.STORAGE, f"{ended}: {why}"
    if evidence.lost_interpreter and not evidence.started:
        cure = "put its environment back, or add cluster.python=PATH to `orch resume`"
        return FailureKind.LAUNCH_FAILED, f"{ended}: its interpreter {evidence.lost_interpreter} is gone; {cure}"
    unstarted = not evidence.started or (found is not None and found.kind is FailureKind.LAUNCH_FAILED)
    if unstarted and (missing := find_missing_program(evidence.tails)) is not None:
        return FailureKind.LAUNCH_FAILED, f"{ended}: {missing.describe(job.nodes)}"
    # On SIGTERM, srun sends SIGKILL to the step, so no rank could save, and no agent has failed.
    if any(_SRUN_SIGNALLED in match.line for match in matches) and (found is None or found.kind is _LOST):
        cure = f"`scancel -s TERM {job.job_id}` and `orch cancel` let it save"
        return FailureKind.PREEMPTED, f"{ended}: srun got SIGTERM (`scancel --full`?) and killed its step; {cure}"
    if found is not None:
        return found.kind, f"{ended}; {found.source} has: {found.line}"
    if not evidence.started:
        return FailureKind.LAUNCH_FAILED, f"{ended}, before its agents started"
    if job.state == "FAILED":
        return FailureKind.AGENT_LOST, f"{ended}, after its agents had started"
    return FailureKind.UNKNOWN, ended


GRACE = 60.0  # seconds that a silent job has to react to the stop request before it is cancelled
ABANDONED = 120.0  # seconds of silence that suffice if agents have left because they lost the coordinator
OVERSTAY = 180.0
"""Seconds that a job may run after its attempt's outcome. Agents exit within seconds; Slurm's KillWait is 30."""


class Escalation(StrEnum):
    """Action on a silent job."""

    NOTHING = "nothing"
    REPORT = "tell"
    REQUEST_STOP = "ask"
    CANCEL = "cancel"


def judge_silence(evidence: Evidence, limit: float) -> tuple[Escalation, str]:
    """Decide what to do with a running job after `limit` seconds (0: never) without a heartbeat or a growing file."""
    # A job that is suspended, held, leaving or unknown is not expected to report.
    if not evidence.answered or evidence.job is None or evidence.job.state != "RUNNING" or evidence.job.held:
        return Escalation.NOTHING, ""
    # The attempt's outcome is recorded, but a stalled process keeps the allocation.
    if evidence.outcome is not None:
        if evidence.overstayed < OVERSTAY:
            return Escalation.NOTHING, ""
        return Escalation.CANCEL, f"its attempt has ended, but the job has kept running for {evidence.overstayed:.0f} s"
    if not evidence.started or evidence.silent_for < LOST_AFTER:
        return Escalation.NOTHING, ""
    # The job may be alive but unable to write its heartbeat.
    if evidence.disk:
        return Escalation.REPORT, f"its heartbeat cannot be written: {evidence.disk}"
    left = [report for report in evidence.reports if report.end is AgentEnd.SILENT]
    bound = min(limit, ABANDONED) if left and limit else limit
    also = f", and {len(left)} agent(s) have left because of it" if left else ""
    # If its files grow, or could not be watched, a process may be alive.
    if not bound or evidence.still_for < bound:
        return Escalation.REPORT, f"heartbeat silent for {evidence.silent_for // 60:.0f} min{also}"
    written = f"nothing was written for {evidence.still_for:.0f} s"
    step = Escalation.REQUEST_STOP if evidence.still_for < bound + GRACE else Escalation.CANCEL
    return step, f"heartbeat silent for {evidence.silent_for:.0f} s, {written}{also}"
