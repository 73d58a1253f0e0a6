"""Time in which nothing was heard of a node does not count against its ranks."""

import pytest

from trainer.agent.watch.hang_limits import RankSample, ReportGaps, seconds_still


def rank(age: float, node: str = "n1") -> RankSample:
    return RankSample(rank=3, node=node, age=age)


def add_report(*times: float, longest: float = 2.0) -> ReportGaps:
    report_gaps = ReportGaps(longest)
    for at in times:
        report_gaps.add_report("n1", at)
    return report_gaps


def test_reports_in_time_are_no_silence():
    report_gaps = add_report(100.0, 100.5, 102.5, 103.0)
    assert report_gaps.at(104.9) == {}
    assert seconds_still(rank(60), report_gaps.at(104.9)) == 60


def test_a_silence_that_lasts():
    gaps = add_report(100.0).at(130.0)
    assert gaps == {"n1": [(28.0, 0.0)]}
    assert seconds_still(rank(40), gaps) == 12  # 10 s before the last report, and what a report may take
    assert seconds_still(rank(5), gaps) == 0
    assert seconds_still(rank(40, "n2"), gaps) == 40


@pytest.mark.parametrize(
    ("age", "known"),
    [
        (60.0, 60.0 - 43.0),  # it stood still before, and all through the silence
        (30.0, 30.0 - 25.0),  # it began somewhere in the silence
        (4.0, 4.0),  # it has moved since
    ],
)
def test_a_silence_that_is_over(age, known):
    gaps = add_report(100.0, 145.0, 146.5, 148.0, 150.0).at(150.0)
    assert seconds_still(rank(age), gaps) == pytest.approx(known)


def test_an_agent_that_is_always_late_does_not_hide_its_ranks():
    late = add_report(*(100.0 + 2.5 * number for number in range(400)))
    assert seconds_still(rank(60), late.at(100.0 + 2.5 * 399)) == pytest.approx(60 * 0.8)


def test_longer_reports_of_a_big_job():
    assert add_report(100.0, 125.0, longest=30.0).at(126.0) == {}


def test_who_was_asked_to_report_more_often_is_silent_sooner():
    report_gaps = add_report(100.0, longest=15.0)
    assert report_gaps.at(112.0) == {}
    report_gaps.ask(105.0)
    assert report_gaps.at(112.0) == {"n1": [(10.0, 0.0)]}, "nothing is known since its last report"
    report_gaps.add_report("n1", 112.0)
    assert report_gaps.at(112.0) == {"n1": [(5.0, 0.0)]}, "it reported as it should before it was asked"
    assert report_gaps.at(120.0)["n1"][0] == (13.0, 8.0)
    report_gaps.ask(None)
    assert report_gaps.at(125.0) == {"n1": [(18.0, 13.0)]}, "what was silence stays one"
