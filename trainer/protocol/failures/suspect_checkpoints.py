"""Checkpoints that are suspect because of failures soon after they were loaded. Drills do not count.

A checkpoint whose bytes verify may still hold an unusable state: saved just before the loss exploded, or corrupted by
faulty hardware. To avoid loading it forever, its predecessor is tried instead. A failure counts only if the state
can have caused it: it came after a step was trained from that state, it happened twice, and it is not one that a person
must fix in the program.
"""

import builtins
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from trainer.protocol.config_sections.fault_detection_config import DrillEvent
from trainer.protocol.failures.failure_patterns import VARYING
from trainer.protocol.failures.outcome import Failure, select_kinds
from trainer.protocol.failures.rank_end import signal_name

NOT_BY_A_DRILL = select_kinds(lambda traits: traits.asked_to_stop)
"""Failure kinds that drills never cause."""
HARMLESS = frozenset({"slow-rank"})
"""Drills that training survives: later failures of the generation have other causes."""


def drill_behind(
    failure: Failure, ordered: str, configured: Iterable[DrillEvent], attempt: int, generation: int
) -> str:
    """Return the kind of the drill that caused `failure`, or an empty string.

    `ordered` is the drill requested in this generation; `configured` are the run's `drill.events`.
    """
    if failure.kind in NOT_BY_A_DRILL:
        return ""
    if ordered:
        return ordered
    for event in configured:
        if event.attempt in (0, attempt) and event.generation in (0, generation) and _fits(event, failure):
            return event.kind
    return ""


def _fits(event: DrillEvent, failure: Failure) -> bool:
    """Return whether the failure matches the event's rank, and its step or the previous step."""
    blamed = {failure.rank, *(one.rank for one in failure.culprits)} - {None}
    near = failure.step is None or event.step - 1 <= failure.step <= event.step
    return event.kind not in HARMLESS and near and (not blamed or event.rank in blamed)


WITHIN = 10
"""Steps after a restore within which a failure may come from the restored state."""

_OF_THE_STATE = select_kinds(lambda traits: traits.of_the_state)
"""Failures that a loaded state can cause, unlike node, storage and agent failures and stops."""


@dataclass(frozen=True, kw_only=True)
class FailedGeneration:
    """A failed generation: step of the restored checkpoint (0: not restored), last step, and the failure."""

    restored: int
    step: int
    mark: str  # signal, exception or exit code
    message: str = ""  # the exception's message, without the parts that vary

    @classmethod
    def from_failure(cls, failure: Failure, restored: int, step: int) -> "FailedGeneration":
        message = VARYING.sub("#", failure.message or "")
        return cls(restored=restored, step=step, mark=_mark(failure), message=message)

    def is_like(self, other: "FailedGeneration") -> bool:
        """Return whether both are the same failure, with the same message or at the same step."""
        return self.mark == other.mark and (self.message == other.message or self.step == other.step)


def failed_generation(failure: Failure, restored: int | None, step: int | None) -> FailedGeneration | None:
    """Describe a failed generation, or return None if a loaded state cannot be the cause.

    `step` is the last step if the failure has none. Loading verifies every byte, so a failure before the first step
    is not evidence against the state. Neither is an error of the operating system, such as a missing data file.
    """
    if not restored or failure.drill or failure.kind not in _OF_THE_STATE or _is_os_error(failure.exception):
        return None
    if failure.signal is None and failure.exit_code is None and not failure.exception:
        return None  # no rank ended: a fork server, which never sees a state, died
    reached = failure.step if failure.step is not None else step
    if reached is None or reached <= restored:
        return None
    return FailedGeneration.from_failure(failure, restored, reached)


def _is_os_error(exception: str | None) -> bool:
    kind = getattr(builtins, exception or "", None)
    return isinstance(kind, type) and issubclass(kind, OSError)


def suspect_steps(
    failed_generations: Iterable[FailedGeneration], known: Collection[int] = (), *, since: int = 0
) -> dict[int, str]:
    """Return the steps that became suspect, with reasons, except those already `known`.

    `failed_generations` are oldest first; those before index `since` raise suspicion only together with a later one.
    """
    past = list(failed_generations)
    found: dict[int, str] = {}
    for index in range(since, len(past)):
        if reason := _reason(past[index], past[:index]):
            found.setdefault(past[index].restored, reason)
    return {step: reason for step, reason in sorted(found.items()) if step not in known}


def _reason(newest: FailedGeneration, earlier: Sequence[FailedGeneration]) -> str:
    """Return why the checkpoint restored by the newest failed generation is suspect, or an empty string."""
    for one in (newest, *(one for one in reversed(earlier) if one.restored == newest.restored)):
        if one.step - one.restored > WITHIN:
            return ""  # it was loaded and trained well for a while, so it did not cause the earlier failures
        if one is not newest and one.is_like(newest):
            at = f"at step {one.step} and at step {newest.step}"
            return f"{newest.mark} twice soon after loading it, {at}"
    return ""


def _mark(failure: Failure) -> str:
    """Return what two failures must share to count as the same failure."""
    if failure.signal is not None:
        return f"{failure.kind} by {signal_name(failure.signal)}"
    if failure.exception:
        return failure.exception
    return f"exit code {failure.exit_code}"
