"""PURE: results of restore tests by checkpoint: the layouts each was restored on, and the newest proven one."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from orchestrator.config.restore_tests_config import SAME
from orchestrator.registry.records import RestoreTest
from orchestrator.states import Trust
from trainer.protocol.restore_test import UNDECIDED, Outcome

BY_A_TEST = "restore test "
"""Prefix of a trust's reason that comes from a restore test, and of the note of a pin that a restore test holds."""


@dataclass(frozen=True, kw_only=True)
class Proven:
    """A checkpoint that restore tests restored on `layouts`, most recently at `ended_at`."""

    step: int
    checkpoint: str
    layouts: tuple[str, ...]
    ended_at: float


def by_checkpoint(tests: Iterable[RestoreTest]) -> dict[str, list[RestoreTest]]:
    """Group the tests by the name of their checkpoint."""
    found: dict[str, list[RestoreTest]] = {}
    for test in tests:
        found.setdefault(test.checkpoint, []).append(test)
    return found


def newest_by_layout(tests: Iterable[RestoreTest]) -> dict[str, RestoreTest]:
    """Return, from the tests of one checkpoint, the newest test with a verdict on each layout."""
    finished = [test for test in tests if test.ended_at is not None and test.verdict not in UNDECIDED]
    newest = {test.layout: test for test in sorted(finished, key=_end_time)}
    return dict(sorted(newest.items(), key=lambda item: (item[0] != SAME, len(item[0]), item[0])))


def layouts_in_words(tests: Iterable[RestoreTest]) -> str:
    """Describe the tests of one checkpoint: `same, 1` if restored on both, else the failures; then running tests."""
    known = list(tests)
    newest = newest_by_layout(known)
    bad = [f"{test.verdict} on {layout}" for layout, test in newest.items() if test.verdict != Outcome.RESTORED]
    under_way = [test.layout for test in known if test.ended_at is None]
    words = [", ".join(bad or newest), f"under way on {', '.join(under_way)}" if under_way else ""]
    return "; ".join(word for word in words if word)


def reason_beside_tests(trust: str, reason: str) -> str:
    """Return the reason of a checkpoint's trust for display beside its restore tests, without repeating them."""
    if not reason.startswith(BY_A_TEST):
        return reason
    return "" if trust == Trust.RESTORED else reason.partition(": ")[2]


def newest_proven(tests: Iterable[RestoreTest], there: Mapping[str, float]) -> Proven | None:
    """Return the newest checkpoint that a test restored. `there` maps restorable checkpoints to their commit times."""
    proven = [_proven(group) for name, group in by_checkpoint(tests).items() if name in there]
    return max((one for one in proven if one), key=lambda one: (there[one.checkpoint], one.step), default=None)


def _proven(tests: list[RestoreTest]) -> Proven | None:
    """Return the layouts that one checkpoint is proven on. CORRUPT on any layout voids all earlier restores."""
    newest = newest_by_layout(tests).values()
    corrupt_at = max((_end_time(test) for test in newest if test.verdict == Outcome.CORRUPT), default=0.0)
    good = [test for test in newest if test.verdict == Outcome.RESTORED and _end_time(test) > corrupt_at]
    if not good:
        return None
    return Proven(
        step=good[0].step, checkpoint=good[0].checkpoint, layouts=tuple(test.layout for test in good),
        ended_at=max(map(_end_time, good)),
    )  # fmt: skip


def _end_time(test: RestoreTest) -> float:
    return test.ended_at or 0.0
