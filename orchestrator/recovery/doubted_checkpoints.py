"""Trust changes after a failed attempt: which checkpoints become SUSPECT, and which are cleared. Pure."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from checkpointing.config import MEMORY
from orchestrator.registry.records import Attempt, Checkpoint, Generation, RestoreTest
from orchestrator.states import Trust, may_move
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.failures.suspect_checkpoints import FailedGeneration, failed_generation, suspect_steps
from trainer.protocol.restore_test import UNDECIDED, Outcome

_LOADABLE = frozenset({Trust.COMMITTED, Trust.VERIFIED, Trust.RESTORED, Trust.SUSPECT})

TrustChange = tuple[Checkpoint, Trust, str]  # checkpoint, its new trust, and the reason


def trust_changes(
    attempts: Sequence[Attempt], generations: Sequence[Generation], checkpoints: Sequence[Checkpoint],
    newest: Failure | None, tests: Iterable[RestoreTest] = (),
) -> list[TrustChange]:  # fmt: skip
    """Return the trust changes after the last of `attempts`, which ended with the failure `newest`.

    A failure that the program caused makes no checkpoint suspect, and clears those that its earlier occurrences made
    suspect. The program is the cause if the failure is a program error, or if every loadable checkpoint became suspect.
    """
    past = _Past.from_ends(_ends(attempts, generations, newest), attempts[-1].number)
    rows = [row for row in checkpoints if row.name not in _found_bad(tests)]
    cleared = _caused_by_program(newest, past, [row.step for row in rows if row.trust in _LOADABLE])
    found = {step: why for step, why in suspect_steps(past.failed, since=past.since).items() if step not in cleared}
    changes = [(row, Trust.SUSPECT, found[row.step]) for row in checkpoints if row.step in found]
    if newest is not None:
        why = f"the cause is the program, not the checkpoint: {newest.reason}"
        suspect = [row for row in rows if row.step in cleared and row.trust is Trust.SUSPECT]
        # A restore from memory does not read the bytes on disk.
        on_disk = {generation.resumed_from for generation in generations if generation.tier != MEMORY}
        changes += [(row, Trust.RESTORED if row.step in on_disk else Trust.COMMITTED, why) for row in suspect]
    # A checkpoint of the same step that was saved after the start of the failed generation holds a different state.
    return [
        (row, trust, why)
        for row, trust, why in changes
        if row.committed_at <= past.began[row.step] and may_move(row.trust, trust)
    ]


@dataclass
class _Past:
    """Failed generations that loaded a checkpoint, oldest first, and the start of the last such generation per step."""

    failed: list[FailedGeneration] = field(default_factory=list)
    since: int = 0  # index of the newest attempt's first generation
    began: dict[int, float] = field(default_factory=dict)

    @classmethod
    def from_ends(cls, ends: Iterable[tuple[Generation, Failure]], newest: int) -> "_Past":
        past = cls()
        for generation, failure in ends:
            one = failed_generation(failure, generation.resumed_from, generation.last_step)
            if one is None:
                continue
            past.failed.append(one)
            past.began[one.restored] = generation.started_at
            past.since += generation.attempt != newest
        return past


def _caused_by_program(newest: Failure | None, past: _Past, loadable: Collection[int]) -> frozenset[int]:
    """Return the steps of the checkpoints that failures like the newest made suspect, if the program is the cause."""
    if newest is None or newest.drill:
        return frozenset()
    last = FailedGeneration.from_failure(newest, 0, newest.step or 0)
    doubted = frozenset(suspect_steps(failed for failed in past.failed if failed.is_like(last)))
    everywhere = len(doubted) > 1 and doubted.issuperset(loadable)
    return doubted if everywhere or newest.kind is FailureKind.USER_ERROR else frozenset()


def _found_bad(tests: Iterable[RestoreTest]) -> set[str]:
    """Return the checkpoints that their last conclusive restore test found bad. Only another test clears them."""
    ended = sorted((test.ended_at, test.checkpoint, test.verdict) for test in tests if test.ended_at is not None)
    last = {checkpoint: verdict for _, checkpoint, verdict in ended if verdict not in UNDECIDED}
    return {checkpoint for checkpoint, verdict in last.items() if verdict != Outcome.RESTORED}


def _ends(
    attempts: Sequence[Attempt], generations: Sequence[Generation], newest: Failure | None
) -> list[tuple[Generation, Failure]]:
    """Return the generations that failed, oldest first; an attempt's last generation fails with the attempt."""
    found = []
    for attempt in attempts:
        mine = [item for item in generations if item.attempt == attempt.number]
        for generation in mine:
            failure = Failure.from_json(generation.failure) if generation.failure else None
            if failure is None and generation is mine[-1]:
                earlier = Failure.from_json(attempt.failure) if attempt.failure else None
                failure = newest if attempt is attempts[-1] else earlier
            if failure is not None:
                found.append((generation, failure))
    return found
