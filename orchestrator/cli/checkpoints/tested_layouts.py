"""PURE: what restore tests say of a run's checkpoints: on which layouts each was restored, and which is proven."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.config.restore_tests_config import SAME
from orchestrator.registry.records import RestoreTest
from orchestrator.states import Trust
from trainer.contract.restore_test import UNDECIDED, Outcome

BY_A_TEST = "restore test "
"""How the reason of a trust begins that a restore test has found, and the note of a pin that one holds."""


@dataclass(frozen=True, kw_only=True)
class Proven:
    """A checkpoint that restore tests have restored on `layouts`, the last time at `ended_at`."""

    step: int
    checkpoint: str
    layouts: tuple[str, ...]
    ended_at: float


def by_checkpoint(tests: Iterable[RestoreTest]) -> dict[str, list[RestoreTest]]:
    """The tests of each checkpoint, by its name."""
    found: dict[str, list[RestoreTest]] = {}
    for test in tests:
        found.setdefault(test.checkpoint, []).append(test)
    return found


def newest_by_layout(tests: Iterable[RestoreTest]) -> dict[str, RestoreTest]:
    """Return the newest test with a verdict on each layout, among the tests of one checkpoint."""
    finished = [test for test in tests if test.ended_at is not None and test.verdict not in UNDECIDED]
    newest = {test.layout: test for test in sorted(finished, key=_ended)}
    return dict(sorted(newest.items(), key=lambda item: (item[0] != SAME, len(item[0]), item[0])))


def layouts_in_words(tests: Iterable[RestoreTest]) -> str:
    """Of one checkpoint: `same, 1` where it was restored on both, or what was found, and what is under way."""
    known = list(tests)
    newest = newest_by_layout(known)
    bad = [f"{test.verdict} on {layout}" for layout, test in newest.items() if test.verdict != Outcome.RESTORED]
    under_way = [test.layout for test in known if test.ended_at is None]
    words = [", ".join(bad or newest), f"under way on {', '.join(under_way)}" if under_way else ""]
    return "; ".join(word for word in words if word)


def reason_beside_tests(trust: str, reason: str) -> str:
    """Why a checkpoint is trusted so, where people see its restore tests beside it."""
    if not reason.startswith(BY_A_TEST):
        return reason
    return "" if trust == Trust.RESTORED else reason.partition(": ")[2]


def newest_proven(tests: Iterable[RestoreTest], there: Mapping[str, float]) -> Proven | None:
    """The newest checkpoint that was restored by a test; `there`: when those that can be restored were committed."""
    proven = [_proven(group) for name, group in by_checkpoint(tests).items() if name in there]
    return max((one for one in proven if one), key=lambda one: (there[one.checkpoint], one.step), default=None)


def _proven(tests: list[RestoreTest]) -> Proven | None:
    """What stands of one checkpoint: what was found corrupt on one layout is proven on none, until it is restored."""
    newest = newest_by_layout(tests).values()
    corrupt_at = max((_ended(test) for test in newest if test.verdict == Outcome.CORRUPT), default=0.0)
    good = [test for test in newest if test.verdict == Outcome.RESTORED and _ended(test) > corrupt_at]
    if not good:
        return None
    return Proven(
        step=good[0].step, checkpoint=good[0].checkpoint, layouts=tuple(test.layout for test in good),
        ended_at=max(map(_ended, good)),
    )  # fmt: skip


def _ended(test: RestoreTest) -> float:
    return test.ended_at or 0.0
