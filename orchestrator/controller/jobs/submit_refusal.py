"""A job that Slurm has refused: what kind of failure that is, and which nodes need not be avoided any more."""

from orchestrator.controller.run_view import RunView
from orchestrator.errors import ConfigError, Retryable, SubmitRejected
from orchestrator.registry.store import Store
from trainer.contract.outcome import Failure, FailureKind


def submit_refusal(
    store: Store, view: RunView, error: SubmitRejected | ConfigError, *, epoch: int, now: float
) -> Failure:
    """The failure of an attempt whose job was not taken; an exclusion of a node that is no more ends with it."""
    for node in error.unknown_nodes if isinstance(error, SubmitRejected) else ():
        why = "Slurm does not know this node any more"
        store.saw_node(node, view.run.domain, epoch=epoch, now=now, excluded_until=now, reason=why)
    reason = f"{error.what}; {error.hint}" if error.hint else error.what
    return Failure(kind=_kind(error, accepted=any(attempt.job_id for attempt in view.attempts)), reason=reason)


def _kind(error: SubmitRejected | ConfigError, *, accepted: bool) -> FailureKind:
    """`accepted`: Slurm has taken a job of this run before, with the same configuration: it was no typo."""
    retryable = error.retryable if isinstance(error, SubmitRejected) else Retryable.NEVER
    passes = retryable is Retryable.YES or (retryable is Retryable.ONCE_ACCEPTED and accepted)
    return FailureKind.SUBMIT_DEFERRED if passes else FailureKind.SUBMIT_REJECTED
