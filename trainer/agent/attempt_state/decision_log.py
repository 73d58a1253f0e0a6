"""What a decision leaves in events and files before it is carried out."""

from trainer.agent.ladder.in_job_policy import Decision
from trainer.agent.ladder.rollback import record_skip
from trainer.contract.events import EventKind, EventLog
from trainer.contract.run_dir import AttemptDir


async def log_decision(decision: Decision, attempt: AttemptDir, events: EventLog) -> None:
    """Write down what was decided; a batch that is left out is on disk when this returns, if the disk answers."""
    events.write(EventKind.DECISION, action=decision.action.name.lower(), reason=decision.reason)
    if decision.suspect is not None:
        events.write(EventKind.CHECKPOINT_SUSPECT, step=decision.suspect, reason=decision.reason)
    if decision.skip is not None:
        await record_skip(decision.skip, attempt, events)
