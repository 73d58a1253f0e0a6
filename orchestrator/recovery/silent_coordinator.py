"""Escalation for a running job whose coordinator is silent. Pure."""

from dataclasses import dataclass
from enum import StrEnum

from orchestrator.recovery.classify_failure import LOST_AFTER
from orchestrator.recovery.evidence import Evidence
from trainer.protocol.failures.outcome import AgentEnd

GRACE = 60.0
"""Seconds that a silent job has to react to the stop request before it is cancelled."""
ABANDONED = 120.0
"""Seconds of silence that suffice if agents have left because they lost the coordinator."""
OVERSTAY = 180.0
"""Seconds that a job may outlive its attempt's outcome; agents exit within seconds, and Slurm's KillWait is 30."""


class Escalation(StrEnum):
    """Degree of intervention."""

    NOTHING = "nothing"
    REPORT = "tell"
    REQUEST_STOP = "ask"
    CANCEL = "cancel"


@dataclass(frozen=True, kw_only=True)
class SilenceDecision:
    """Escalation step with its reason."""

    step: Escalation
    reason: str = ""


def judge_silence(evidence: Evidence, limit: float) -> SilenceDecision:
    """Decide on a running job after `limit` seconds (0: never) without a heartbeat or growth of any file."""
    # A job that is suspended, held, leaving or unknown is not expected to report.
    if not evidence.answered or evidence.job is None or evidence.job.state != "RUNNING" or evidence.job.held:
        return SilenceDecision(step=Escalation.NOTHING)
    # The attempt's outcome is recorded, but a stalled process keeps the allocation.
    if evidence.outcome is not None:
        over = evidence.overstayed >= OVERSTAY
        reason = f"its attempt has ended, and the job runs on for {evidence.overstayed:.0f} s"
        return (
            SilenceDecision(step=Escalation.CANCEL, reason=reason) if over else SilenceDecision(step=Escalation.NOTHING)
        )
    if not evidence.started or evidence.silent_for < LOST_AFTER:
        return SilenceDecision(step=Escalation.NOTHING)
    # It may be alive but unable to write its heartbeat.
    if evidence.disk:
        reason = f"its heartbeat cannot be written: {evidence.disk}"
        return SilenceDecision(step=Escalation.REPORT, reason=reason)
    left = [report for report in evidence.reports if report.end is AgentEnd.SILENT]
    bound = min(limit, ABANDONED) if left and limit else limit
    also = f", and {len(left)} agent(s) have left because of it" if left else ""
    # Files that grow, or could not be watched, may mean that a process is alive.
    if not bound or evidence.still_for < bound:
        minutes = evidence.silent_for // 60
        return SilenceDecision(step=Escalation.REPORT, reason=f"heartbeat silent for {minutes:.0f} min{also}")
    reason = (
        f"heartbeat silent for {evidence.silent_for:.0f} s, nothing was written for {evidence.still_for:.0f} s{also}"
    )
    if evidence.still_for < bound + GRACE:
        return SilenceDecision(step=Escalation.REQUEST_STOP, reason=reason)
    return SilenceDecision(step=Escalation.CANCEL, reason=reason)
