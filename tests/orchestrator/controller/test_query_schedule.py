"""When a controller queries its scheduler."""

from random import Random

import pytest

from orchestrator.controller.query_schedule import BURST, QuerySchedule, Signs

QUIET = 30.0


class Passes:
    """A controller's passes, one a second, on a clock of its own."""

    def __init__(self, seed: int = 1) -> None:
        self.now, self.queries = 1000.0, list[float]()
        self.schedule = QuerySchedule(lambda: self.now, Random(seed), quiet=QUIET)
        self.took, self.calls, self.answers = 0.05, 1, True

    def go(self, seconds: float, signs: Signs) -> int:
        """Make passes for some time; return the number of queries."""
        before, end = len(self.queries), self.now + seconds
        while self.now < end:
            if self.schedule.is_due(signs):
                self.queries.append(self.now)
                self.now += self.took
                self.schedule.note_query(took=self.took, calls=self.calls, answered=self.answers)
            self.now += 1.0
        return len(self.queries) - before

    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.queries, self.queries[1:], strict=False)]


@pytest.mark.parametrize("calls", [1, 3])
def test_while_nothing_changes_there_are_at_most_two_calls_a_minute(calls: int) -> None:
    passes = Passes()
    passes.go(60, Signs())
    passes.queries.clear()
    passes.calls = calls
    passes.go(3600, Signs())
    assert max(calls * 60 / gap for gap in passes.gaps()[1:]) <= 2.0
    assert len(set(passes.gaps())) > 1, "jitter"


def test_an_event_is_followed_by_a_query_at_once() -> None:
    passes = Passes()
    passes.go(100, Signs(events="runs"))
    assert passes.go(2, Signs(events="has ended")) == 1
    assert passes.go(20, Signs(events="has ended")) == 0


def test_an_action_is_followed_by_another_look() -> None:
    passes = Passes()
    passes.go(100, Signs())
    passes.schedule.note_action()
    assert passes.go(2, Signs()) == 1


def test_unsettled_jobs_are_looked_at_less_and_less_often() -> None:
    passes = Passes()
    passes.go(200, Signs(events="a", unsettled=True))
    gaps = passes.gaps()
    assert gaps[0] < 3
    assert 15 <= gaps[-1] < 18
    assert all(after >= before - 0.5 for before, after in zip(gaps, gaps[1:], strict=False))


def test_a_slow_scheduler_is_left_alone_for_a_multiple_of_its_time() -> None:
    passes = Passes()
    passes.took = 6.0
    passes.go(400, Signs(unsettled=True))
    assert min(passes.gaps()) >= 60.0


def test_a_silent_scheduler_is_asked_less_and_less_often_and_soon_after_it_is_back() -> None:
    passes = Passes()
    passes.answers = False
    passes.go(600, Signs(unsettled=True))
    gaps = passes.gaps()
    assert 5 <= gaps[0] < 9
    assert 60 <= gaps[-1] < 75
    passes.answers = True
    passes.go(80, Signs(unsettled=True))
    passes.queries.clear()
    passes.go(60, Signs(unsettled=True))
    assert len(passes.queries) >= 3


def test_many_events_cannot_exceed_the_budget() -> None:
    passes = Passes()
    for number in range(1200):
        passes.go(1.0, Signs(events=number, unsettled=True))
    assert len(passes.queries) <= BURST + 21 * 12
    assert passes.schedule.seconds_left() > 0


def test_the_controllers_of_many_users_do_not_ask_at_the_same_second() -> None:
    together = [Passes(seed) for seed in range(200)]
    for passes in together:
        passes.go(1800, Signs())
    last = [int(passes.queries[-1]) for passes in together]
    assert max(map(last.count, last)) < 30


def test_local_jobs_are_looked_up_in_every_pass() -> None:
    schedule = QuerySchedule(lambda: 0.0, Random(1), quiet=0.0)
    schedule.note_query(took=9.0, calls=1, answered=False)
    assert schedule.is_due(Signs())
