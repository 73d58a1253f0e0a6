"""PURE: the failure of an attempt whose job was not taken, with the command that cures it."""

import re

from orchestrator.errors import ConfigError, Retryable, SubmitRejected
from orchestrator.registry.records import Run
from trainer.contract.failures.outcome import Failure, FailureKind

_KEY = re.compile(r"[a-z_]+(\.[a-z_-]+)+", re.ASCII)


def refused(run: Run, error: SubmitRejected | ConfigError, also: str = "", *, accepted: bool) -> Failure:
    """`also`: worth knowing besides; `accepted`: Slurm has taken a job of this run before, with this configuration."""
    retryable = error.retryable if isinstance(error, SubmitRejected) else Retryable.NEVER
    # What was accepted before was no typo.
    passes = retryable is Retryable.YES or (retryable is Retryable.ONCE_ACCEPTED and accepted)
    cure = "" if passes or "restore_test" in run.identity else f"orch resume {run.name} {_change(error)}"
    return Failure(
        kind=FailureKind.SUBMIT_DEFERRED if passes else FailureKind.SUBMIT_REJECTED,
        reason="; ".join(filter(None, (error.what, error.hint, also, cure))),
    )


def _change(error: SubmitRejected | ConfigError) -> str:
    """What to type behind `orch resume RUN`."""
    if isinstance(error, SubmitRejected):
        return error.change or "KEY=VALUE"
    key = error.where if _KEY.fullmatch(error.where) else "KEY"
    return error.hint if error.hint.startswith(f"{key}=") and " " not in error.hint else f"{key}=VALUE"
