"""When agents report: rarely in a large job whose ranks move, closely while the coordinator may have to judge."""

import pytest

from trainer.agent.watch.hang_limits import ReportSchedule, calm_seconds, report_seconds


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
