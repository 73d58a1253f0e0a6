"""What restore tests say of checkpoints: layouts, what is under way, what is proven."""

from orchestrator.cli.restore_tests import Proven, layouts_in_words, newest_proven
from orchestrator.registry.records import RestoreTest
from trainer.protocol.restore_test import Outcome

RESTORED, SUSPECT, CORRUPT = Outcome.RESTORED, Outcome.SUSPECT, Outcome.CORRUPT


def made(step: int, verdict: str, layout: str = "same", at: float = 10.0) -> RestoreTest:
    return RestoreTest(
        test=f"t-{step}-{layout}-{at}", run="r", checkpoint=f"c{step}", layout=layout, step=step, begun_at=at - 5,
        ended_at=at if verdict else None, verdict=verdict,
    )  # fmt: skip


def test_layouts_of_a_restored_checkpoint() -> None:
    good = [made(1, RESTORED, "2x4"), made(1, RESTORED, "1"), made(1, RESTORED, "same")]
    assert layouts_in_words(good) == "same, 1, 2x4"
    assert layouts_in_words([*good, made(1, "", "8")]) == "same, 1, 2x4; under way on 8"
    assert layouts_in_words([*good, made(1, CORRUPT, "1", at=20.0)]) == "CORRUPT on 1"
    assert layouts_in_words([made(1, SUSPECT, at=9.0), made(1, RESTORED, at=10.0)]) == "same"
    assert layouts_in_words([made(1, "", "same"), made(1, "", "1")]) == "under way on same, 1"
    assert layouts_in_words([made(1, RESTORED), made(1, Outcome.NOT_FINISHED, at=20.0)]) == "same"
    assert layouts_in_words([made(1, RESTORED), made(1, Outcome.NOT_COMPARABLE, at=20.0)]) == "same"
    assert layouts_in_words([made(1, Outcome.NOT_FINISHED)]) == layouts_in_words([]) == ""


def test_newest_proven_checkpoint() -> None:
    tests = [
        made(1, RESTORED, at=5.0),
        made(2, RESTORED, "1", at=6.0),
        made(2, RESTORED, at=8.0),
        made(3, ""),
    ]
    there = {"c1": 1.0, "c2": 2.0, "c3": 3.0}
    assert newest_proven(tests, there) == Proven(step=2, checkpoint="c2", layouts=("same", "1"), ended_at=8.0)
    first = newest_proven(tests, {"c1": 1.0})
    assert first is not None
    assert first.step == 1
    after_roll_back = newest_proven(tests, {"c1": 9.0, "c2": 2.0})
    assert after_roll_back is not None
    assert after_roll_back.step == 1
    assert newest_proven(tests, {}) is None
    assert newest_proven([made(1, SUSPECT)], there) is None


def test_corrupt_verdict_voids_earlier_restores() -> None:
    there = {"c1": 1.0}
    good, bad = made(1, RESTORED, at=5.0), made(1, CORRUPT, "1", at=6.0)
    assert newest_proven([good, bad], there) is None
    again = newest_proven([good, bad, made(1, RESTORED, at=7.0)], there)
    assert again is not None
    assert again.layouts == ("same",)


def test_suspect_layout_leaves_others_proven() -> None:
    found = newest_proven([made(1, RESTORED, at=5.0), made(1, SUSPECT, "1", at=6.0)], {"c1": 1.0})
    assert found is not None
    assert found.layouts == ("same",)
