"""Decision after an attempt: retry, hold, fail or succeed. Pure."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from orchestrator.registry.records import Attempt, Notice
from trainer.protocol.command_progress import PROGRESS_SECONDS
from trainer.protocol.config import RecoveryConfig
from trainer.protocol.events import EventKind
from trainer.protocol.failures.decision import Action, Decision
from trainer.protocol.failures.outcome import TRAITS, Budget, Failure, FailureKind
from trainer.protocol.failures.suspect_checkpoints import HARMLESS, NOT_BY_A_DRILL
from trainer.protocol.time_spans import stored_moment


def attribute_drill(
    failure: Failure | None, notices: Iterable[Notice], attempt: int, generation: int
) -> Failure | None:
    """Return the failure that ended an attempt in this generation, with the drill that caused it, if any.

    The job itself usually reports the drill, except when the coordinator's own node was hit.
    """
    if failure is None or failure.drill or failure.kind in NOT_BY_A_DRILL:
        return failure
    kinds = (
        str(notice.data.get("kind") or "")
        for notice in sorted(notices, key=lambda notice: notice.time)
        if notice.kind == EventKind.DRILL and (notice.attempt, notice.generation) == (attempt, generation)
    )
    drills = [kind for kind in kinds if kind not in HARMLESS]
    return replace(failure, drill=drills[-1]) if drills else failure


def drill_words(failure: Mapping[str, object]) -> str:
    """Return ` (drill kill-rank)` for a failure (as JSON) that a drill caused; empty for other failures."""
    return f" (drill {failure['drill']})" if failure.get("drill") else ""


@dataclass(frozen=True, kw_only=True)
class EndedAttempt:
    """Ended attempt, with its failure as the policy judges it. A history lists the oldest attempt first."""

    row: Attempt
    failure: Failure | None  # None if it finished or was never judged
    saved_after: float = 0.0  # longest time in seconds from a generation's start to a command's checkpoint; 0 if none
    first_training: bool = False  # the run has never trained
    drills_recur: bool = False  # the run's configuration requests faults, which may recur in every attempt

    @property
    def kind(self) -> FailureKind | None:
        return self.failure.kind if self.failure else None

    @property
    def end_time(self) -> float:
        return self.row.ended_at or 0.0

    @property
    def training_seconds(self) -> float:
        """Seconds from start to end. If the node's clock was behind, they count from the submission."""
        start = self.row.started_at
        return 0.0 if start is None else self.end_time - max(start, self.row.submitted_at or start)

    @property
    def script_failed(self) -> bool:
        """Whether its batch script failed in a run that has never trained, so that the script is probably wrong."""
        return self.first_training and self.failure is not None and self.failure.script

    @property
    def was_drilled(self) -> bool:
        """Whether a drill that does not recur ended it."""
        return not self.drills_recur and self.failure is not None and bool(self.failure.drill)

    @property
    def budget(self) -> Budget | None:
        """Budget that its end consumes."""
        if self.failure is None:
            return None
        return Budget.TRIES if self.script_failed else TRAITS[self.failure.kind].budget

    @property
    def is_free(self) -> bool:
        """Whether its end costs nothing while the run makes progress."""
        return self.failure is not None and TRAITS[self.failure.kind].free


SCRIPT_HINT = "; see the job's log (attempts/*/submission/*.out, *.err), cluster.python and cluster.templates"

REPEATED_STEPS_HINT = (
    "; checkpoints were saved under steps no higher than before, which counts as progress only half an hour "
    "after a start (five minutes if preempted): name checkpoints by step, or set progress.pattern"
)

LONGEST_GAP = 2 * 3600.0
"""Maximum seconds counted between two failures, because a long queue or a clock change is not an outage."""

FREE_PROGRESS = 300.0  # seconds after which a preempted or timed-out attempt counts as progress


def decide(
    history: Sequence[EndedAttempt], recovery: RecoveryConfig, now: float, jitter: float, *, run: str,
    steps_known: bool = True, exclude: tuple[str, ...] = (),
) -> Decision:  # fmt: skip
    """Decide after the newest attempt of `history`.

    `history` holds the attempts that count (since the last `orch resume`), `jitter` is a random number in [0, 1).
    `steps_known` is False for a command whose checkpoints orch cannot see. `run` names the run in commands.
    """
    assert history, "a decision needs the attempt that ended"
    last, failure = history[-1], history[-1].failure
    # All steps are trained and the last checkpoint is committed.
    if failure is None:
        return Decision(action=Action.SUCCEED, reason="all steps are trained")
    has_progress = _has_progress(history, len(history) - 1, steps_known=steps_known)
    # A retry cannot fix this: without progress, the next job is unlikely to need less memory.
    out_of_memory = failure.kind is FailureKind.OUT_OF_MEMORY and not has_progress and not last.was_drilled
    if TRAITS[failure.kind].budget is Budget.PERSON or out_of_memory:
        return _final(failure, history, run)
    # A deliberate end proves nothing, and after a free end the time in the queue is pause enough.
    if reason := _immediate_retry_reason(last, failure, has_progress):
        return Decision(action=Action.RETRY, reason=reason, not_before=now, exclude=exclude)
    # One node may have misread the data; a second job with the same result is evidence about the bytes.
    if [past.failure.exception for past in history[-2:] if past.failure] == [NONE_INTACT, NONE_INTACT]:
        return Decision(action=Action.HOLD, reason=_NONE_INTACT.format(reason=failure.reason, run=run))
    row = _without_progress(history, steps_known=steps_known)
    repeats_steps = any(past.saved_after for past in row[1:]) and steps_known
    hint = SCRIPT_HINT if last.script_failed else REPEATED_STEPS_HINT if repeats_steps else ""
    newest = f"the last one: {failure.reason}{hint}"
    # A program that fails repeatedly wastes the cluster.
    tries = [past for past in row if past.budget is Budget.TRIES]
    if len(tries) >= recovery.max_failures and last.budget is Budget.TRIES:
        spent = f"{_summarize_failures(tries)} without a new checkpoint: recovery.max_failures is spent"
        return Decision(action=Action.FAIL, reason=f"{spent}; {newest}")
    # An outage is measured by the clock; a few failures with long queues between them do not form one.
    outage = [past for past in row if past.budget is Budget.TIME]
    if len(outage) >= recovery.max_failures and now >= _gives_up(outage, recovery):
        spent = f"{_describe_outage(outage, now)} without a new checkpoint: recovery.no_progress_hours is spent"
        return Decision(action=Action.HOLD, reason=f"{spent}; {newest}")
    start = now + backoff_seconds(len(row), recovery, jitter)
    if last.budget is Budget.TRIES:
        reason = f"{_summarize_failures(tries)} without a new checkpoint (try {len(tries)} of {recovery.max_failures})"
    else:
        end = stored_moment(_gives_up(outage, recovery))
        reason = f"{_describe_outage(outage, now)}; holds after {end} unless a checkpoint is saved"
    reason += f"; next try at {stored_moment(start)}; {newest}"
    return Decision(action=Action.RETRY, reason=reason, not_before=start, exclude=exclude)


def _immediate_retry_reason(last: EndedAttempt, failure: Failure, has_progress: bool) -> str:
    """Return why the run continues immediately after an end that is not a failure; empty for any other end."""
    if TRAITS[failure.kind].budget is Budget.NOTHING:
        return f"continues with fewer nodes: {failure.reason}"
    if last.was_drilled:
        return f"continues after a drill, which uses no budget: {failure.reason}"
    return f"continues after {failure.kind}" if TRAITS[failure.kind].free and has_progress else ""


_NEVER_SAVED = (
    "the loss became unusable: {reason}; the run has saved no checkpoint: fix the data or the code, or start again "
    "with other settings (optimizer.lr, optimizer.clip_norm): `orch resume {run} KEY=VALUE`"
)
"""Message for a loss that diverged in a run without a checkpoint to restart from."""
NONE_INTACT = "NothingIntact"  # raised by a rank that found every checkpoint damaged (`checkpointing.errors`)
_NONE_INTACT = (
    "no checkpoint is intact: {reason}; `orch ckpt ls {run}` lists them: replace one with an intact copy, or start "
    "again from another run's: `orch submit --from OTHER@STEP`"
)


def _final(failure: Failure, history: Sequence[EndedAttempt], run: str) -> Decision:
    traits = TRAITS[failure.kind]
    action, words = Action.FAIL if traits.ends_run else Action.HOLD, traits.final
    saved = any(past.row.saved_step is not None for past in history)
    if failure.kind is FailureKind.NUMERIC and not saved and history[0].row.number == 1:
        words = _NEVER_SAVED
    return Decision(action=action, reason=words.format(reason=failure.reason, run=run))


def after_cancel(step: int | None, missing: str = "") -> Decision:
    """Return the decision for a cancelled run without a job; `missing`: why its checkpoint is not visible."""
    saved = f"; the newest checkpoint has step {step}" if step is not None else "; no checkpoint is known"
    saved = f"; the newest checkpoint had step {step}, and {missing}" if missing else saved
    return Decision(action=Action.CANCEL, reason=f"cancelled by `orch cancel`{saved}")


def backoff_seconds(row: int, recovery: RecoveryConfig, jitter: float) -> float:
    """Return the pause in seconds after `row` failures in a row: doubled each time, and half of it jittered."""
    full = min(recovery.backoff_max, recovery.backoff * 2.0 ** min(row - 1, 60))
    return full * (0.5 + 0.5 * jitter)


def _gives_up(outage: Sequence[EndedAttempt], recovery: RecoveryConfig) -> float:
    """Return the time at which an outage has lasted too long, not counting long queues and clock changes."""
    gaps = [later.end_time - earlier.end_time for earlier, later in pairwise(outage)]
    counted = sum(min(max(0.0, gap), LONGEST_GAP) for gap in gaps)
    whole = outage[-1].end_time - outage[0].end_time  # smaller if the clock was set back and forward again in between
    lasted = min(counted, whole) if whole > 0 else counted
    return outage[-1].end_time + recovery.no_progress_hours * 3600 - lasted


def _summarize_failures(row: Sequence[EndedAttempt]) -> str:
    """Return e.g. `launch failed 4 times, node lost once`."""
    kinds = Counter(str(past.kind).replace("_", " ") for past in row)
    return ", ".join(f"{kind} {'once' if times == 1 else f'{times} times'}" for kind, times in kinds.items())


def _describe_outage(outage: Sequence[EndedAttempt], now: float) -> str:
    """Return the failures and how long they took: `launch failed 4 times in 12 min`."""
    lasted = now - min(past.end_time for past in outage)
    minutes = f"{lasted / 60:.0f} min" if lasted < 7200 else f"{lasted / 3600:.1f} h"
    span = f" in {lasted:.0f} s" if lasted < 120 else f" in {minutes}"
    return _summarize_failures(outage) + ("" if len(outage) == 1 else span)


def _has_progress(history: Sequence[EndedAttempt], index: int, *, steps_known: bool) -> bool:
    """Return whether this attempt made progress, judged by its newest checkpoint, its time or its steps."""
    attempt, row, earlier = history[index], history[index].row, [past.row for past in history[:index]]
    enough = FREE_PROGRESS if attempt.is_free else PROGRESS_SECONDS
    if not steps_known:
        return attempt.training_seconds >= enough and (row.started_at is not None or row.generations > 0)
    if row.saved_step is not None and row.saved_step > max((past.saved_step or 0 for past in earlier), default=0):
        return True
    # Checkpoint names that restart or rotate show no step. The program's reported step counts, else time, as above.
    trained_on = row.last_step is not None and row.last_step > max((past.last_step or 0 for past in earlier), default=0)
    return attempt.saved_after >= enough or (attempt.saved_after > 0 and trained_on)


def _without_progress(history: Sequence[EndedAttempt], *, steps_known: bool) -> list[EndedAttempt]:
    """Return the failures since the last progress, including the end of the attempt that made it."""
    row: list[EndedAttempt] = []
    for index in reversed(range(len(history))):
        past, advanced = history[index], _has_progress(history, index, steps_known=steps_known)
        counts = past.budget not in (None, Budget.NOTHING) and not past.was_drilled
        if counts and not (advanced and past.is_free):
            row.append(past)
        if advanced:
            break
    return row[::-1]
