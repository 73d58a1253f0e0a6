"""PURE: which checkpoints of a run are to be doubted after an attempt: the coordinator's rule, over all attempts."""

from collections.abc import Sequence

from orchestrator.registry.records import Attempt, Checkpoint, Generation
from orchestrator.states import Trust, may_move
from trainer.contract.failures.outcome import Failure
from trainer.contract.failures.suspect_checkpoints import FailedGeneration, failed_generation, suspect_steps


def newly_suspect(
    attempts: Sequence[Attempt], generations: Sequence[Generation], checkpoints: Sequence[Checkpoint],
    newest: Failure | None,
) -> list[tuple[Checkpoint, str]]:  # fmt: skip
    """Checkpoints to be SUSPECT from now on, with the reason; `newest` is the failure of the last of `attempts`.

    One of the same step that was saved after the generation that fell from it had begun is another state.
    """
    failed_generations: list[FailedGeneration] = []
    began: dict[int, float] = {}
    for generation, failure in _ends(attempts, generations, newest):
        one = failed_generation(failure, generation.resumed_from, generation.last_step)
        if one is not None:
            failed_generations.append(one)
            began[one.restored] = generation.started_at
    found = suspect_steps(failed_generations)
    return [
        (item, found[item.step])
        for item in checkpoints
        if item.step in found and item.committed_at <= began[item.step] and may_move(item.trust, Trust.SUSPECT)
    ]


def _ends(
    attempts: Sequence[Attempt], generations: Sequence[Generation], newest: Failure | None
) -> list[tuple[Generation, Failure]]:
    """Generations that failed, oldest first; the last one of an attempt fell with the attempt."""
    found = []
    for attempt in attempts:
        mine = [item for item in generations if item.attempt == attempt.number]
        for generation in mine:
            failure = Failure.from_json(generation.failure) if generation.failure else None
            if failure is None and generation is mine[-1]:
                failure = newest if attempt is attempts[-1] else _failure(attempt)
            if failure is not None:
                found.append((generation, failure))
    return found


def _failure(attempt: Attempt) -> Failure | None:
    return Failure.from_json(attempt.failure) if attempt.failure else None
