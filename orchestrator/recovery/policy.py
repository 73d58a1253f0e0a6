"""What to do after an attempt has ended: the only place that decides between attempts."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from trainer.contract.config import RecoveryConfig
from trainer.contract.outcome import Failure, FailureKind


class Action(StrEnum):
    RETRY = "RETRY"
    WAIT = "WAIT"
    SUCCEED = "SUCCEED"
    FAIL = "FAIL"
    HOLD = "HOLD"
    CANCEL = "CANCEL"


@dataclass(frozen=True, kw_only=True)
class Past:
    """One ended attempt as the policy sees it, oldest first in a history."""

    number: int
    kind: FailureKind | None  # None: finished, or never judged
    started: bool  # its agents left a sign
    saved_step: int | None  # newest checkpoint it committed
    step: int | None = None  # newest step it trained


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do and why; `not_before` is seconds since the epoch, `exclude` the nodes to avoid."""

    action: Action
    reason: str
    not_before: float = 0.0
    exclude: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "action": str(self.action), "exclude": list(self.exclude)}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Decision":
        return cls(
            action=Action(fields["action"]),
            reason=fields["reason"],
            not_before=fields.get("not_before", 0.0),
            exclude=tuple(fields.get("exclude", ())),
        )


_FREE = frozenset({FailureKind.PREEMPTED, FailureKind.TIME_LIMIT})
"""Ends that are nobody's failure while steps advance."""


def decide(
    history: Sequence[Past],
    failure: Failure | None,
    recovery: RecoveryConfig,
    now: float,
    jitter: float,
    *,
    steps_known: bool = True,
    exclude: tuple[str, ...] = (),
) -> Decision:
    """Decide after the newest attempt of `history`; `failure` None says it finished.

    `history` holds the attempts that count (from the last `orch resume` on), `jitter` is a draw from [0, 1).
    `steps_known` is False for foreign scripts, whose checkpoints orch cannot see.
    """
    assert history, "a decision needs the attempt that ended"
    # All steps are trained and the last checkpoint is committed.
    if failure is None:
        return Decision(action=Action.SUCCEED, reason="all steps are trained")
    # What no retry can mend ends here, with Slurm's or the program's own words.
    final = _final(failure)
    if final is not None:
        return final
    # A loop of attempts that get nowhere burns the cluster: ask a person.
    stalled = _without_progress(history, steps_known=steps_known)
    if stalled >= recovery.no_progress:
        return Decision(
            action=Action.HOLD,
            reason=f"{stalled} attempts in a row made no new checkpoint; the last one: {failure.reason}",
        )
    if len(history) >= recovery.max_attempts:
        return Decision(action=Action.HOLD, reason=f"{len(history)} attempts (recovery.max_attempts) are used up")
    failures = sum(_costs(history, index, steps_known=steps_known) for index in range(len(history)))
    if failures >= recovery.max_failures:
        return Decision(
            action=Action.FAIL,
            reason=f"{failures} failed attempts (recovery.max_failures) are spent; the last one: {failure.reason}",
        )
    return _retry(history, failure, recovery, now, jitter, steps_known=steps_known, exclude=exclude)


def _final(failure: Failure) -> Decision | None:
    if failure.kind is FailureKind.USER_ERROR:
        return Decision(action=Action.FAIL, reason=f"the training code failed: {failure.reason}")
    if failure.kind is FailureKind.STORAGE:
        return Decision(action=Action.HOLD, reason=f"storage must be mended first: {failure.reason}")
    if failure.kind is FailureKind.SUBMIT_REJECTED:
        return Decision(action=Action.HOLD, reason=f"the job was refused: {failure.reason}")
    if failure.kind in (FailureKind.CANCELLED, FailureKind.SUBMISSION_LOST):
        return Decision(action=Action.HOLD, reason=failure.reason)
    # Both would come again at the same step, on any nodes.
    if failure.kind is FailureKind.DESYNC:
        return Decision(action=Action.HOLD, reason=f"ranks called different collectives: {failure.reason}{_DESYNC}")
    if failure.kind is FailureKind.NUMERIC:
        return Decision(action=Action.HOLD, reason=f"a rollback did not mend the loss: {failure.reason}{_NUMERIC}")
    return None


_DESYNC = "; that is a bug of the program: see that every rank takes the same way through it"
_NUMERIC = (
    "; mend the data or the code, or begin anew with other settings (train.lr, train.clip_norm) from its last good "
    "checkpoint: `orch ckpt export`, then `orch ckpt import`"
)


def after_cancel(step: int | None) -> Decision:
    """The decision once a person has cancelled the run and its job is gone."""
    saved = f"; the newest checkpoint is of step {step}" if step is not None else "; nothing was saved"
    return Decision(action=Action.CANCEL, reason=f"cancelled by `orch cancel`{saved}")


def _retry(
    history: Sequence[Past],
    failure: Failure,
    recovery: RecoveryConfig,
    now: float,
    jitter: float,
    *,
    steps_known: bool,
    exclude: tuple[str, ...],
) -> Decision:
    # The queue is pause enough after an end that costs nothing.
    if not _costs(history, len(history) - 1, steps_known=steps_known):
        return Decision(action=Action.RETRY, reason=f"goes on after {failure.kind}", not_before=now, exclude=exclude)
    row = 0
    for index in reversed(range(len(history))):
        if not _costs(history, index, steps_known=steps_known):
            break
        row += 1
        # An attempt that got somewhere begins a new row of failures.
        if _advanced(history, index, steps_known=steps_known):
            break
    pause = delay(row, recovery, jitter)
    reason = f"again after {failure.kind}, in {pause:.0f} s: {failure.reason}"
    return Decision(action=Action.RETRY, reason=reason, not_before=now + pause, exclude=exclude)


def delay(row: int, recovery: RecoveryConfig, jitter: float) -> float:
    """Seconds to wait before the restart after `row` failures in a row: doubled each time, half of it jittered."""
    full = min(recovery.backoff_max, recovery.backoff * 2.0 ** min(row - 1, 60))
    return full * (0.5 + 0.5 * jitter)


def _advanced(history: Sequence[Past], index: int, *, steps_known: bool) -> bool:
    """Whether this attempt committed a checkpoint newer than all before it."""
    attempt = history[index]
    if not steps_known:
        return attempt.started and attempt.kind in _FREE
    best = max((past.saved_step for past in history[:index] if past.saved_step is not None), default=0)
    return attempt.saved_step is not None and attempt.saved_step > best


def _without_progress(history: Sequence[Past], *, steps_known: bool) -> int:
    """Attempts at the end of the history that ran and made no new checkpoint; a lost job that never ran is no try."""
    stalled = 0
    for index in reversed(range(len(history))):
        if _advanced(history, index, steps_known=steps_known):
            break
        past = history[index]
        stalled += past.started or past.kind is not FailureKind.JOB_LOST
    return stalled


def _costs(history: Sequence[Past], index: int, *, steps_known: bool) -> bool:
    """Whether this attempt used failure budget."""
    past = history[index]
    if past.kind is None:
        return False
    return past.kind not in _FREE or not _advanced(history, index, steps_known=steps_known)
