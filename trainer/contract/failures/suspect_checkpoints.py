"""Checkpoints that failures soon after a load make suspect; drills do not count. Pure.

A checkpoint whose bytes verify may still hold a state that cannot go on: saved a moment before the loss exploded, or
with a fault of the hardware in it. Loading it again for ever would be a loop; its predecessor is tried instead.
"""

import signal
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from trainer.contract.config_sections.fault_detection_config import DrillEvent
from trainer.contract.failures.outcome import Failure, kinds_with

NOT_BY_A_DRILL = kinds_with(lambda traits: traits.asked_to_stop)
"""Ends that no drill brings about."""
HARMLESS = frozenset({"slow-rank"})
"""Drills after which training goes on: what fails later in that generation has causes of its own."""


def drill_behind(
    failure: Failure, ordered: str, configured: Iterable[DrillEvent], attempt: int, generation: int
) -> str:
    """The kind of the drill that brought `failure` about; empty: none did.

    `ordered` is the drill that was requested of this generation, `configured` are the run's `drill.events`.
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
    """Whether the failure is that of the rank, and of the step or the one before it, in which the event strikes."""
    blamed = {failure.rank, *(one.rank for one in failure.culprits)} - {None}
    near = failure.step is None or event.step - 1 <= failure.step <= event.step
    return event.kind not in HARMLESS and near and (not blamed or event.rank in blamed)


WITHIN = 10
"""Steps after a restore within which a failure may come from what was loaded."""

_OF_THE_STATE = kinds_with(lambda traits: traits.of_the_state)
"""Failures that a loaded state can cause; nodes, storage, agents and stops have causes of their own."""


@dataclass(frozen=True, kw_only=True)
class FailedGeneration:
    """A generation that failed: the step of the checkpoint it began from (0: none), its last step, and of what."""

    restored: int
    step: int
    mark: str


def failed_generation(failure: Failure, restored: int | None, step: int | None) -> FailedGeneration | None:
    """How a generation fell; None when no checkpoint was loaded, or what was loaded cannot be the reason."""
    if not restored or failure.drill or failure.kind not in _OF_THE_STATE:
        return None
    if failure.signal is None and failure.exit_code is None and not failure.exception:
        return None  # no rank's end: a fork server died, which never sees a state
    reached = failure.step if failure.step is not None else step
    return FailedGeneration(restored=restored, step=max(restored, reached or restored), mark=_mark(failure))


def suspect_steps(failed_generations: Iterable[FailedGeneration], known: Collection[int] = ()) -> dict[int, str]:
    """Steps to be doubted, but for those that are `known` to be, each with the reason; `falls` are oldest first."""
    failed_generations = list(failed_generations)
    found = {
        step: _reason([one for one in failed_generations if one.restored == step])
        for step in {one.restored for one in failed_generations}
    }
    return {step: reason for step, reason in sorted(found.items()) if reason and step not in known}


def _reason(failed_generations: Sequence[FailedGeneration]) -> str:
    """Why the checkpoint from which all of these began is to be doubted; empty when it is not."""
    seen: dict[str, FailedGeneration] = {}
    for one in failed_generations:
        if one.step - one.restored > WITHIN:
            # It was loaded and went on well for a while: what came before was not its fault.
            seen.clear()
        elif one.mark in seen:
            first = seen[one.mark]
            return f"{one.mark} twice soon after loading it, at step {first.step} and at step {one.step}"
        else:
            seen[one.mark] = one
    return ""


def _mark(failure: Failure) -> str:
    """What two failures have in common when they are the same."""
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
