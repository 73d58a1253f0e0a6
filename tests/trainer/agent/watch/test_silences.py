"""Time in which nothing was heard of a node does not count against its ranks."""

import pytest

from trainer.agent.watch.sighting import Sighting
from trainer.agent.watch.silences import Silences, still


def rank(age: float, node: str = "n1") -> Sighting:
    return Sighting(rank=3, node=node, age=age)


def heard(*times: float, longest: float = 2.0) -> Silences:
    silences = Silences(longest)
    for at in times:
        silences.heard("n1", at)
    return silences


def test_reports_in_time_are_no_silence():
    silences = heard(100.0, 100.5, 102.5, 103.0)
    assert silences.at(104.9) == {}
    assert still(rank(60), silences.at(104.9)) == 60


def test_a_silence_that_lasts():
    gaps = heard(100.0).at(130.0)
    assert gaps == {"n1": [(28.0, 0.0)]}
    assert still(rank(40), gaps) == 12  # 10 s before the last report, and what a report may take
    assert still(rank(5), gaps) == 0
    assert still(rank(40, "n2"), gaps) == 40


@pytest.mark.parametrize(
    ("age", "known"),
    [
        (60.0, 60.0 - 43.0),  # it stood still before, and all through the silence
        (30.0, 30.0 - 25.0),  # it began somewhere in the silence
        (4.0, 4.0),  # it has moved since
    ],
)
def test_a_silence_that_is_over(age, known):
    gaps = heard(100.0, 145.0, 146.5, 148.0, 150.0).at(150.0)
    assert still(rank(age), gaps) == pytest.approx(known)


def test_an_agent_that_is_always_late_does_not_hide_its_ranks():
    late = heard(*(100.0 + 2.5 * number for number in range(400)))
    assert still(rank(60), late.at(100.0 + 2.5 * 399)) == pytest.approx(60 * 0.8)


def test_longer_reports_of_a_big_job():
    assert heard(100.0, 125.0, longest=30.0).at(126.0) == {}
