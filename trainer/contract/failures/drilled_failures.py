"""PURE: whether a failure was brought about by a drill, so that it is held against nothing and nobody."""

from collections.abc import Iterable

from trainer.contract.config_sections.drill_config import DrillEvent
from trainer.contract.failures.failure_kinds import kinds_with
from trainer.contract.failures.outcome import Failure

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
