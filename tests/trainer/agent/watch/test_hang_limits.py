"""How long a rank may stay where it is, on tables; the reason is what people will read."""

from typing import Any

import pytest

from trainer.agent.ladder.attempt_history import AttemptHistory
from trainer.agent.watch.hang_limits import (
    FAST,
    Limits,
    RankSample,
    ReportGaps,
    ReportSchedule,
    after_hangs,
    calm_seconds,
    format_seconds,
    report_seconds,
    seconds_still,
)
from trainer.protocol.config_sections.fault_detection_config import HangConfig
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.rank_progress.progress import SECTIONS, Phase

P99 = {"data": 0.05, "forward": 0.31, "backward": 0.9, "checkpoint": 11.0}


def still(age: float, phase: str = "forward", **fields: Any) -> RankSample:
    known = {
        "rank": 5,
        "node": "n3",
        "phase": phase,
        "step": 120,
        "first": False,
        "age": age,
        "alive": age,
        "state": "S",
    }
    return RankSample(**{**known, **fields})


LIMITS = [
    # A phase of a step: a factor over its own history, and never less than what any phase may take.
    (still(60, "data"), 8.0, "the 8.0 s that data may take"),
    (still(60, "backward"), 22.5, "the 22 s (25 times its usual 0.90 s) that backward may take"),
    (still(60, "optimizer"), 8.0, "the 8.0 s that optimizer may take"),
    # With signs of life it is counted from the last of them, up to four times as long.
    (
        still(10, "data", alive=4.0),
        14.0,
        "the 8.0 s that data may take without a sign of life (the last was 4.0 s ago)",
    ),
    (still(10, "data", alive=9.5), 8.5, "the 8.0 s that data may take"),
    (still(60, "data", alive=0.2), 32.0, "the 32 s that data may take with signs of life"),
    (still(600, "backward", alive=0.0), 90.0, "the 90 s that backward may take with signs of life"),
    # Whatever is slow by nature may be silent for two minutes, and alive for an hour.
    (still(60, "eval"), 120.0, "the 120 s that eval may take"),
    (still(60, "checkpoint"), 275.0, "the 275 s (25 times its usual 11 s) that checkpoint may take"),
    (
        still(1000, "restore", alive=1.0),
        1119.0,
        "the 120 s that restore may take without a sign of life (the last was 1.0 s ago)",
    ),
    (still(9000, "compile", alive=0.0), 3600.0, "the 3600 s that compile may take with signs of life"),
    (still(60, "forward", first=True), 120.0, "the 120 s that any part of a first step may take"),
    (
        still(1000, "forward", first=True, alive=1.0),
        1119.0,
        "the 120 s that any part of a first step may take without a sign of life (the last was 1.0 s ago)",
    ),
    (still(60, "nap"), 120.0, "the 120 s that nap may take"),
    # Waiting for a disk is a sign of life where disks are waited for.
    (still(60, "checkpoint", state="D"), 3600.0, "the 3600 s that checkpoint may wait for a disk"),
    (still(60, "data", state="D"), 120.0, "the 120 s that data may wait for a disk"),
    (
        still(100, "data", state="D", alive=60.0),
        160.0,
        "the 120 s that data may wait for a disk without a sign of life (the last was 60 s ago)",
    ),
    # A process that was halted does nothing of its own accord; one in a debugger has somebody with it.
    (still(60, "data", state="T"), 3.0, "the 3.0 s that a halted process may take"),
    (still(60, "eval", state="T", alive=1.0), 62.0, "the 3.0 s that a halted process may take"),
    (still(60, "eval", state="Z"), 3.0, "the 3.0 s that a halted process may take"),
    (still(60, "data", state="t"), 3600.0, "the 3600 s that a debugger may hold it"),
]


@pytest.mark.parametrize(("one", "seconds", "words"), LIMITS)
def test_a_limit_and_its_reason(one, seconds, words):
    allowed = Limits(HangConfig(), P99).for_rank(one)
    assert allowed.seconds == pytest.approx(seconds)
    assert allowed.words == words


def test_a_stopped_process_that_nobody_waits_for_has_the_time_of_its_phase():
    limits = Limits(HangConfig(), P99)
    assert limits.for_rank(still(60, "data", state="T"), waited_for=False).seconds == 8.0
    assert limits.for_rank(still(60, "eval", state="T"), waited_for=False).seconds == 120.0


def test_no_limit_is_above_the_longest():
    config = HangConfig(least=30, slow=50, most=40, stopped=60)
    limits = Limits(config, {phase.name.lower(): 1000.0 for phase in Phase})
    for phase in Phase:
        for state in "RSDTtZX":
            for alive in (0.0, 90.0):
                for first in (True, False):
                    one = still(90, phase.name.lower(), state=state, alive=alive, first=first)
                    assert limits.for_rank(one).seconds <= 40


@pytest.mark.parametrize(
    ("p99", "seconds"),
    [
        ({}, 4.0),  # half of what any phase may take
        ({"forward": 0.3}, 4.0),
        ({"forward": 0.3, "backward": 2.0}, 6.0),
        ({"forward": 0.3, "checkpoint": 200.0}, 4.0),  # not part of every step
    ],
)
def test_when_a_closer_look_is_due(p99, seconds):
    assert Limits(HangConfig(), p99).look_after == pytest.approx(seconds)


def test_a_closer_look_is_never_due_at_once():
    assert Limits(HangConfig(least=1.0), {}).look_after == 2.0


def test_the_fast_phases_are_those_that_are_measured():
    assert {phase.name.lower() for phase in SECTIONS} == FAST


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.0, "0.00 s"), (0.314, "0.31 s"), (4.06, "4.1 s"), (12.3, "12 s"), (3600, "3600 s")]
)
def test_durations_in_words(seconds, words):
    assert format_seconds(seconds) == words


@pytest.mark.parametrize("phase", ["init", "restore", "forward"])
def test_who_spins_for_a_gpu_shows_signs_of_life_for_four_times_its_limit_only(phase):
    one = still(2000, phase, first=True, alive=0.1)
    limits = Limits(HangConfig(), {})
    assert limits.for_rank(one).seconds > 2000
    assert limits.for_rank(one, spins=True).seconds == 480.0


def test_what_was_taken_for_a_hang_may_last_longer_in_the_next_generation() -> None:
    past, config = AttemptHistory(), HangConfig()
    allowed = []
    for _ in range(3):
        allowed.append(Limits(after_hangs(config, past.hangs), P99).for_rank(still(12, "data")).seconds)
        past.record_failure(Failure(kind=FailureKind.HANG, reason="rank 5 stands in data"), "broken", 0, None)
    assert allowed == [8.0, 32.0, 128.0]
    assert Limits(after_hangs(config, 50), P99).for_rank(still(12, "data")).seconds == config.most
    drilled = Failure(kind=FailureKind.HANG, reason="stopped by a drill", drill="hang")
    past.record_failure(drilled, "broken", 0, None)
    assert past.hangs == 3


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


def told(schedule: ReportSchedule, until: float, **asked: bool) -> list[float]:
    """The times at which an agent reports that looks ten times a second, from 0 on."""
    return [at / 10 for at in range(1, int(until * 10) + 1) if schedule.due(at / 10, **asked)]


@pytest.mark.parametrize(
    ("nodes", "close", "calm"),
    [(1, 0.5, 0.5), (100, 0.5, 0.5), (500, 0.5, 2.0), (1250, 1.25, 5.0), (3000, 3.0, 5.0), (10_000, 10.0, 10.0)],
)
def test_a_coordinator_hears_a_bounded_number_of_reports(nodes: int, close: float, calm: float) -> None:
    assert (report_seconds(nodes), calm_seconds(nodes)) == (close, calm)


def test_few_nodes_report_twice_a_second_whatever_happens() -> None:
    assert len(told(ReportSchedule(1, 4, 0.0), 10)) == 20
    assert len(told(ReportSchedule(1, 4, 0.0), 10, closely=True)) == 20


def test_many_nodes_report_rarely_and_closely_where_there_is_something_to_see() -> None:
    assert len(told(ReportSchedule(7, 1250, 0.0), 20)) == 4
    assert len(told(ReportSchedule(7, 1250, 0.0), 20, closely=True)) in range(13, 20)


def test_attention_ends_by_itself() -> None:
    schedule = ReportSchedule(624, 1250, 0.0)
    schedule.attend(10.0, 0.0)
    times = told(schedule, 30)
    assert len([at for at in times if at <= 10]) >= 7
    assert len([at for at in times if at > 10]) == 4


def test_a_job_whose_agents_start_together_is_heard_all_the_time() -> None:
    agents = [ReportSchedule(node, 1250, 0.0) for node in range(1250)]
    for agent in agents:  # what all of them do at once must not bring their regular reports together
        agent.due(0.7, at_once=True)
        agent.attend(10.0, 1.0)
    times = sorted(at for agent in agents for at in told(agent, 30))
    calm = [at for at in times if at > 11.5]
    assert max(after - before for before, after in zip(calm, calm[1:], strict=False)) < 0.15
    assert 200 < len(calm) / 18.5 < 300


def test_one_report_more_at_once() -> None:
    schedule = ReportSchedule(0, 1250, 0.0)
    assert schedule.due(0.002, at_once=True)
    assert not schedule.due(0.003)
    assert schedule.due(0.004), "its regular one is not put off"


def test_a_pause_of_the_agent_is_not_made_up_for() -> None:
    schedule = ReportSchedule(624, 1250, 0.0)
    assert schedule.due(1000.0)
    assert not schedule.due(1000.1)
