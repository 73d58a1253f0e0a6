"""How an attempt ended and why: pure, from evidence only."""

import re
from dataclasses import dataclass, replace
from enum import StrEnum

from orchestrator.recovery.evidence import Evidence, Role, before_cancel, earliest, scan
from orchestrator.scheduler.interface import JobStatus
from trainer.contract.failures.outcome import (
    MORE_MEMORY,
    AgentEnd,
    AttemptOutcome,
    AttemptResult,
    ExitCode,
    Failure,
    FailureKind,
    kinds_with,
)

LOST_AFTER = 60.0
"""Seconds of answered look-ups without the job, and of a silent heartbeat, before a job counts as lost."""
RECORD_WITHIN = 300.0
"""Like LOST_AFTER, while accounting does not answer: it may still name the cause."""
OUTCOME_GRACE = 5.0
"""Seconds that an outcome may take to become visible after the job was seen ended."""
GONE_AFTER = 5.0
"""Seconds of answered look-ups without the job that an outcome needs as company."""
LEAVING_LIMIT = 600.0
"""Seconds in COMPLETING after which the attempt is fenced off, and the next one begins without waiting for it."""


class End(StrEnum):
    """What can be said about an attempt's end."""

    OPEN = "open"  # it lives, or nothing certain is known
    FINISHED = "finished"
    FAILED = "failed"  # ended before its work was done, for whatever reason
    LOST = "lost"  # Slurm no longer knows the job


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The end of an attempt with its reason; `failure` is set for FAILED and LOST."""

    end: End
    reason: str
    failure: Failure | None = None


def judge(evidence: Evidence) -> Verdict:
    """Whether the attempt is over. Silence is never an end."""
    # Without an answer from the scheduler the state is unknown, whatever the files say.
    if not evidence.answered:
        return Verdict(end=End.OPEN, reason="the scheduler does not answer: nothing is assumed")
    if evidence.job is None:
        return _judge_absent(evidence)
    # A job that is leaving still has processes; a stuck one is fenced off instead of waited for.
    if evidence.job_leaving:
        if evidence.leaving_for < LEAVING_LIMIT:
            return Verdict(end=End.OPEN, reason=f"job {evidence.job.job_id} is {evidence.job.state}")
        return _ended(evidence)
    # Slurm says that the node which leads is out of the job, and the job says nothing any more.
    if evidence.leader_gone and evidence.silent_for >= LOST_AFTER:
        return _without_leader(evidence, evidence.job)
    if not evidence.job_ended:
        return Verdict(end=End.OPEN, reason=f"job {evidence.job.job_id} is {evidence.job.state}")
    # The program ended by itself: its own word may become visible a little later.
    by_itself = evidence.job.state in _BY_ITSELF
    if evidence.outcome is None and evidence.started and by_itself and evidence.ended_for < OUTCOME_GRACE:
        return Verdict(end=End.OPEN, reason=f"job {evidence.job.job_id} has ended: waiting for its outcome file")
    return _ended(evidence)


def _without_leader(evidence: Evidence, job: JobStatus) -> Verdict:
    """With --no-kill such a job would stay to its time limit and do nothing: it is over, and is cancelled."""
    if evidence.outcome is not None:
        return _ended(evidence)
    reason = f"{evidence.leader_gone}, which led job {job.job_id}, is out of the job and its heartbeat is silent"
    failure = Failure(kind=FailureKind.NODE_LOST, reason=reason, node=evidence.leader_gone)
    return Verdict(end=End.FAILED, reason=reason, failure=failure)


def _judge_absent(evidence: Evidence) -> Verdict:
    if evidence.outcome is not None and evidence.absent_for >= GONE_AFTER:
        return _ended(evidence)
    if evidence.absent_for < (RECORD_WITHIN if evidence.unrecorded else LOST_AFTER):
        return Verdict(end=End.OPEN, reason="the scheduler does not know the job: looking again")
    if evidence.silent_for < LOST_AFTER:
        return Verdict(end=End.OPEN, reason="the scheduler does not know the job, but its heartbeat goes on")
    failure = classify(evidence)
    return Verdict(end=End.LOST, reason=failure.reason, failure=failure)


def _ended(evidence: Evidence) -> Verdict:
    outcome = evidence.outcome
    if outcome is not None and outcome.result is AttemptResult.FINISHED:
        return Verdict(end=End.FINISHED, reason=outcome.reason or "all steps are trained")
    failure = classify(evidence)
    return Verdict(end=End.FAILED, reason=failure.reason, failure=failure)


_SLURM_KINDS = {
    "PREEMPTED": FailureKind.PREEMPTED,
    "TIMEOUT": FailureKind.TIME_LIMIT,
    "DEADLINE": FailureKind.TIME_LIMIT,
    "NODE_FAIL": FailureKind.NODE_LOST,
    "BOOT_FAIL": FailureKind.LAUNCH_FAILED,
    "LAUNCH_FAILED": FailureKind.LAUNCH_FAILED,
    "RECONFIG_FAIL": FailureKind.LAUNCH_FAILED,
    "OUT_OF_MEMORY": FailureKind.OUT_OF_MEMORY,
}
"""States in which Slurm itself names the cause: they stay what they are."""

_BY_ITSELF = frozenset({"COMPLETED", "FAILED"})
"""States that Slurm derives from the exit of the batch script."""
_TAKEN_AWAY = frozenset({"CANCELLED", "REVOKED"})
"""States that a person's scancel leaves."""
_SENDERS = kinds_with(lambda traits: traits.asked_by_slurm)
"""Why Slurm asks a job to stop."""
_STOPS = kinds_with(lambda traits: traits.asked_to_stop)
"""Why the job itself says that it had to stop."""
_SLURMS = re.compile(r"CANCELLED AT .{0,100} DUE TO ")
_SRUN_SIGNALLED, _LOST = "srun: forcing job termination", FailureKind.AGENT_LOST
_OWN_CAUSES = kinds_with(lambda traits: traits.seen_inside)
"""Causes that the job saw from inside and that Slurm's word about its end must not cover."""


def classify(evidence: Evidence) -> Failure:
    """The earliest root cause of an attempt that ended without finishing."""
    job, outcome = evidence.job, evidence.outcome
    # A person's cancel explains the end, whatever the end looked like from inside.
    if evidence.cancel_asked:
        return Failure(kind=FailureKind.CANCELLED, reason="cancelled by `orch cancel`")
    # Seen from inside, before Slurm took the job down.
    if outcome is not None and outcome.failure is not None and outcome.failure.kind in _OWN_CAUSES:
        return outcome.failure
    # Of two releases of orch, the older one may not know what the newer one refuses.
    refused = next((report for report in evidence.reports if report.end is AgentEnd.REFUSED), None)
    if refused is not None:
        return Failure(kind=FailureKind.INSTALLATION, reason=refused.reason, node=refused.name)
    # Whatever its end looks like: it was told to stop, and cancelled, while it waited for nodes.
    if evidence.gave_up:
        return Failure(kind=FailureKind.NODES_MISSING, reason=evidence.gave_up)
    # A requeued job must not train again: somebody else restarted it, and orch ended it.
    if job is not None and (job.restarts > 0 or (evidence.requeued and job.state in _TAKEN_AWAY)):
        return _requeued(evidence, job)
    # A coordinator that stood still cannot speak for itself.
    if outcome is None and (stood := _stood_still(evidence, job)) is not None:
        return stood
    # Somebody took the job away from it; whether it could still save on the way out does not ask for a restart.
    by_others = job is not None and job.state in _TAKEN_AWAY and not evidence.silenced
    if by_others and job and outcome and (outcome.result is AttemptResult.STOPPED or _stop_failed(outcome)):
        saved = _saved(evidence) if outcome.failure is None else f"; {outcome.failure.reason}"
        said = f"job {job.job_id} was cancelled, not by orch{saved}"
        return Failure(kind=FailureKind.CANCELLED, reason=said, step=outcome.step or None)
    # Its time ran out while it could not save: more time would not have helped.
    if evidence.saves_failing and job is not None and _SLURM_KINDS.get(job.state) is FailureKind.TIME_LIMIT:
        reason = f"job {job.job_id} reached its time limit: {evidence.saves_failing}"
        return Failure(kind=FailureKind.STORAGE, reason=reason)
    # Slurm names the cause.
    if job is not None and job.state in _SLURM_KINDS:
        return _by_slurm(job, outcome)
    # The coordinator lost a node before Slurm did, and by now Slurm misses it too.
    down = _down_node(job, outcome)
    if down is not None:
        return down
    # The coordinator's last word wins over COMPLETED and FAILED.
    if outcome is not None:
        return _by_outcome(evidence, outcome)
    if job is None:
        reason = f"Slurm has not known the job for {evidence.absent_for:.0f} s and its heartbeat is silent"
        also = "; its accounting does not answer" if evidence.unrecorded else ""
        return Failure(kind=FailureKind.JOB_LOST, reason=reason + also)
    return _by_logs(evidence, job)


def _stood_still(evidence: Evidence, job: JobStatus | None) -> Failure | None:
    """The end of an attempt whose coordinator fell silent: by its own node's word, by its peers', or by orch's cancel.

    Only who was seen to stand still is named; silence alone may be the network's, or the file system's.
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


def _requeued(evidence: Evidence, job: JobStatus) -> Failure:
    kind = FailureKind.NODE_LOST if evidence.started else FailureKind.LAUNCH_FAILED
    # Accounting does not tell how often it was started.
    times = f" ({job.restarts} restarts)" if job.restarts else ""
    return Failure(kind=kind, reason=f"Slurm requeued job {job.job_id}{times}; orch ended it")


def _by_slurm(job: JobStatus, outcome: AttemptOutcome | None) -> Failure:
    kind = _SLURM_KINDS[job.state]
    seen = outcome.failure if outcome else None
    said = f" ({job.reason})" if job.reason and job.reason != "None" else ""
    reason = f"Slurm ended job {job.job_id}: {job.state}{said}"
    node = job.nodes_down[0] if kind is FailureKind.NODE_LOST and job.nodes_down else None
    if seen is not None and kind in (FailureKind.NODE_LOST, FailureKind.OUT_OF_MEMORY):
        node = seen.node or node
        return replace(seen, kind=kind, node=node, reason=f"{reason}; the job saw: {seen.reason}")
    reason = f"{reason}; {MORE_MEMORY}" if kind is FailureKind.OUT_OF_MEMORY else reason
    step = outcome.step if outcome else None
    # What Slurm could not launch has not exited.
    code = None if kind is FailureKind.LAUNCH_FAILED else job.exit_code
    return Failure(kind=kind, reason=reason, node=node, step=step, exit_code=code, signal=job.signal)


def _down_node(job: JobStatus | None, outcome: AttemptOutcome | None) -> Failure | None:
    seen = outcome.failure if outcome else None
    if job is None or seen is None or seen.kind is not FailureKind.AGENT_LOST or seen.node not in job.nodes_down:
        return None
    reason = f"Slurm has node {seen.node} down; the job saw: {seen.reason}"
    return replace(seen, kind=FailureKind.NODE_LOST, reason=reason)


def _by_outcome(evidence: Evidence, outcome: AttemptOutcome) -> Failure:
    if outcome.failure is not None and outcome.failure.kind is not FailureKind.PREEMPTED:
        return outcome.failure
    if outcome.failure is None and outcome.result is not AttemptResult.STOPPED:
        return Failure(kind=FailureKind.UNKNOWN, reason=outcome.reason, step=outcome.step, exit_code=outcome.exit_code)
    saved = f"stopped{_saved(evidence)}: {outcome.reason}"
    stopped = outcome.failure or Failure(kind=FailureKind.PREEMPTED, reason=saved, step=outcome.step or None)
    word = outcome.reason.lower().replace("_", " ")
    if outcome.failure is None and ("time limit" in word or "deadline" in word):
        return replace(stopped, kind=FailureKind.TIME_LIMIT)
    return _by_sender(evidence, stopped)


def _by_sender(evidence: Evidence, stopped: Failure) -> Failure:
    """The stop of an attempt that got a signal, which is the same for a preemption, a time limit and a lost node."""
    job = evidence.job
    # Slurm's own words on every node where it ends a step.
    said = next(
        (match for match in scan(evidence.tails) if match.kind in _SENDERS and _SLURMS.search(match.line)), None
    )
    if said is not None:
        return replace(stopped, kind=said.kind, reason=f"{stopped.reason}; Slurm says: {said.line}")
    if job is not None and job.nodes_down:
        down = job.nodes_down[0]
        return replace(stopped, kind=FailureKind.NODE_LOST, node=down, reason=f"{stopped.reason}; node {down} is down")
    if evidence.near_limit:
        reason = f"{stopped.reason}; the job was near its time limit"
        return replace(stopped, kind=FailureKind.TIME_LIMIT, reason=reason)
    return stopped


def _stop_failed(outcome: AttemptOutcome) -> bool:
    """Whether ranks that were asked to stop did not save and end in time."""
    return outcome.failure is not None and outcome.failure.kind in _STOPS


def _saved(evidence: Evidence) -> str:
    """Describe the newest saved step of the attempt, which may be older than the step it had reached."""
    return f", with step {evidence.saved_step} saved" if evidence.saved_step is not None else ""


def _by_logs(evidence: Evidence, job: JobStatus) -> Failure:
    kind, reason = _from_logs(evidence, job)
    # The batch script exited before any agent started; its exit code may be unknown.
    script = kind is FailureKind.LAUNCH_FAILED and job.state in _BY_ITSELF and not evidence.started
    own = kind is not FailureKind.LAUNCH_FAILED or (script and job.state == "FAILED")
    return Failure(kind=kind, reason=reason, exit_code=job.exit_code if own else None, signal=job.signal, script=script)


def _from_logs(evidence: Evidence, job: JobStatus) -> tuple[FailureKind, str]:
    matches = scan(evidence.tails)
    # What is killed after somebody cancelled the job does not explain that.
    found = earliest(before_cancel(matches) if job.state in _TAKEN_AWAY else matches)
    ended = f"job {job.job_id} ended as {job.state} without an outcome"
    # Logs full of echoes do not explain away that somebody cancelled the job.
    if job.state in _TAKEN_AWAY and (found is None or found.role is not Role.ROOT):
        return FailureKind.CANCELLED, f"job {job.job_id} was cancelled, not by orch"
    # The agents' last word, and the disk that has no outcome, say why there is none.
    rooted = found is not None and found.role is Role.ROOT
    if job.exit_code == ExitCode.STORAGE or (evidence.disk and not rooted):
        why = evidence.saves_failing or evidence.disk or "its storage took no more, by its exit code (74)"
        return FailureKind.STORAGE, f"{ended}: {why}"
    if evidence.lost_interpreter and not evidence.started:
        cure = "put its environment back, or add cluster.python=PATH to `orch resume`"
        return FailureKind.LAUNCH_FAILED, f"{ended}: its interpreter {evidence.lost_interpreter} is gone; {cure}"
    # srun answers its own SIGTERM with SIGKILL to the step: no rank could save, and no agent has failed.
    if any(_SRUN_SIGNALLED in match.line for match in matches) and (found is None or found.kind is _LOST):
        cure = f"`scancel -s TERM {job.job_id}` and `orch cancel` let it save"
        return FailureKind.PREEMPTED, f"{ended}: srun got SIGTERM, as by `scancel --full`, and killed its step; {cure}"
    if found is not None:
        return found.kind, f"{ended}; {found.source} says: {found.line}"
    if not evidence.started:
        return FailureKind.LAUNCH_FAILED, f"{ended}, before its agents started"
    if job.state == "FAILED":
        return FailureKind.AGENT_LOST, f"{ended}, after its agents had started"
    return FailureKind.UNKNOWN, ended
