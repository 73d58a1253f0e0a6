"""PURE: failures that a drill brought about: a person asked for them, so they are held against nothing."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from orchestrator.registry.records import Notice
from trainer.contract.events import EventKind
from trainer.contract.failures.drilled_failures import HARMLESS, NOT_BY_A_DRILL
from trainer.contract.failures.outcome import Failure


def attributed(failure: Failure | None, notices: Iterable[Notice], attempt: int, generation: int) -> Failure | None:
    """The failure that ended an attempt in this generation, with the drill that brought it about, if one did.

    The job itself says so of most; nobody is left to say it when the coordinator's own node was hit.
    """
    if failure is None or failure.drill or failure.kind in NOT_BY_A_DRILL:
        return failure
    kinds = (
        str(one.data.get("kind") or "")
        for one in sorted(notices, key=lambda one: one.time)
        if one.kind == EventKind.DRILL and (one.attempt, one.generation) == (attempt, generation)
    )
    drills = [kind for kind in kinds if kind not in HARMLESS]
    return replace(failure, drill=drills[-1]) if drills else failure


def drill_words(failure: Mapping[str, object]) -> str:
    """What follows the reason of a drilled failure (as JSON): ` (drill kill-rank)`; empty for any other."""
    drill = failure.get("drill")
    return f" (drill {drill})" if drill else ""
