"""Checkpoints that are suspect because of failures soon after they were loaded; drills do not count. Pure.

A checkpoint whose bytes verify may still hold an unusable state: saved just before the loss exploded, or corrupted by
faulty hardware. To avoid loading it forever, its predecessor is tried instead.
"""

import signal
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from trainer.contract.config_sections.fault_detection_config import DrillEvent
from trainer.contract.failures.outcome import Failure, select_kinds

NOT_BY_A_DRILL = select_kinds(lambda traits: traits.asked_to_stop)
"""Failure kinds that drills never cause."""
HARMLESS = frozenset({"slow-rank"})
"""Drills that training survives: later failures of the generation have other causes."""


def drill_behind(
    failure: Failure, ordered: str, configured: Iterable[DrillEvent], attempt: int, generation: int
) -> str:
    """Return the kind of the drill that caused `failure`, or an empty string.

    `ordered` is the drill requested of this generation, `configured` are the run's `drill.events`.
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
    """Return whether the failure matches the event's rank, and its step or the step before."""
    blamed = {failure.rank, *(one.rank for one in failure.culprits)} - {None}
    near = failure.step is None or event.step - 1 <= failure.step <= event.step
    return event.kind not in HARMLESS and near and (not blamed or event.rank in blamed)


WITHIN = 10
"""Steps after a restore within which a failure may come from the restored state."""

_OF_THE_STATE = select_kinds(lambda traits: traits.of_the_state)
"""Failures that a loaded state can cause; nodes, storage, agents and stops fail for other reasons."""


@dataclass(frozen=True, kw_only=True)
class FailedGeneration:
    """A failed generation: step of the restored checkpoint (0: not restored), last step, and mark of the failure."""

    restored: int
    step: int
    mark: str


def failed_generation(failure: Failure, restored: int | None, step: int | None) -> FailedGeneration | None:
    """Describe a failed generation; None if no checkpoint was loaded, or the loaded state cannot be the cause."""
    if not restored or failure.drill or failure.kind not in _OF_THE_STATE:
        return None
    if failure.signal is None and failure.exit_code is None and not failure.exception:
        return None  # no rank ended: a fork server, which never sees a state, died
    reached = failure.step if failure.step is not None else step
    return FailedGeneration(restored=restored, step=max(restored, reached or restored), mark=_mark(failure))


def suspect_steps(failed_generations: Iterable[FailedGeneration], known: Collection[int] = ()) -> dict[int, str]:
    """Return suspect steps with reasons, except those already `known`; `failed_generations` are oldest first."""
    failed_generations = list(failed_generations)
    found = {
        step: _reason([one for one in failed_generations if one.restored == step])
        for step in {one.restored for one in failed_generations}
    }
    return {step: reason for step, reason in sorted(found.items()) if reason and step not in known}


def _reason(failed_generations: Sequence[FailedGeneration]) -> str:
    """Return why the checkpoint restored by all of these is suspect, or an empty string."""
    seen: dict[str, FailedGeneration] = {}
    for one in failed_generations:
        if one.step - one.restored > WITHIN:
            # It was loaded and trained well for a while, so it did not cause the earlier failures.
            seen.clear()
        elif one.mark in seen:
            first = seen[one.mark]
            return f"{one.mark} twice soon after loading it, at step {first.step} and at step {one.step}"
        else:
            seen[one.mark] = one
    return ""


def _mark(failure: Failure) -> str:
    """Return the property that makes two failures count as the same."""
    if failure.signal is not None:
        return f"{failure.kind} by {_signal_name(failure.signal)}"
    if failure.exception:
        return failure.exception
    return f"exit code {failure.exit_code}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
