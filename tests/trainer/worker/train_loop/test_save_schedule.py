"""Save schedule: fixed and automatic intervals, failed and skipped saves, expected stops."""

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from checkpointing.config import AutoConfig, CheckpointConfig
from checkpointing.errors import SaveFailed
from trainer.protocol.config import JobConfig
from trainer.worker.train_loop.loop import Loop
from trainer.worker.train_loop.save_schedule import SaveSchedule, SaveVote

HOUR = 3600.0


class Job:
    """Steps of one second on a fake clock; every rank follows rank 0's vote one step later."""

    def __init__(
        self, config: CheckpointConfig, *, mtbf: float = 24 * HOUR, stall: float = 0.5, save: float = 3.0
    ) -> None:
        self.intervals: list[tuple[int, float, str]] = []
        self.save_schedule = SaveSchedule(
            config, saved=0, mtbf=mtbf, on_change=lambda *told: self.intervals.append(told), clock=lambda: self.now
        )
        self.now, self.step, self.due, self.stall, self.save = 0.0, 0, 0.0, stall, save
        self.committed, self.failure, self.accepts, self.commits = 0, "", True, True
        self.begun: list[int] = []
        self._vote, self._pending = SaveVote.NONE, list[tuple[float, int]]()

    def run(self, steps: int) -> list[int]:
        before = len(self.begun)
        for _ in range(steps):
            self._step()
        return self.begun[before:]

    def _step(self) -> None:
        save_vote, self.now, self.step = self._vote, self.now + 1.0, self.step + 1
        while self._pending and self.now >= self._pending[0][0]:
            self.committed = self._pending.pop(0)[1]
        self.save_schedule.read_saver(self.committed, self.failure or None, [self.save] if self.committed else [])
        self._vote = self.save_schedule.save_vote(self.step, self.due)
        self.save_schedule.record_step(1.0)
        if self.save_schedule.should_save(self.step, save_vote):
            self.begun.append(self.step)
            self.save_schedule.record_save(self.step, self.accepts)
            self.save_schedule.record_stall(self.stall)
            self._vote = SaveVote.NONE  # what was wished for is in the sums that a save reads as well
            if self.accepts and self.commits:
                self._pending.append((self.now + self.save, self.step))


def test_a_fixed_interval_needs_no_save_vote() -> None:
    assert Job(CheckpointConfig(every=10)).run(35) == [10, 20, 30]
    assert Job(CheckpointConfig(every=0)).run(500) == []


def test_the_automatic_cadence_measures_its_first_save_and_then_chooses() -> None:
    job = Job(CheckpointConfig(every="auto"))
    assert job.run(1000) == [10, 304, 598, 892]  # sqrt(2 * 0.5 s * 24 h) = 294 s
    ((steps, seconds, reason),) = job.intervals
    assert (steps, seconds) == (294, 294.0)
    assert "a save costs 0.5 s, a failure occurs every 24.0 h" in reason


def test_the_automatic_cadence_follows_what_saves_cost() -> None:
    job = Job(CheckpointConfig(every="auto"), stall=0.01)
    job.run(100)
    job.stall = 2.0
    begun = job.run(4000)
    gaps = [later - earlier for earlier, later in zip(begun, begun[1:], strict=False)]
    assert gaps[0] < 50
    assert gaps[-1] == 588
    assert [told[0] for told in job.intervals] == [42, 588]


def test_the_automatic_cadence_keeps_its_bounds() -> None:
    assert Job(CheckpointConfig(every="auto", auto=AutoConfig(least=5, most=100))).run(300) == [5, 105, 205]
    assert Job(CheckpointConfig(every="auto", max_unsaved_steps=80)).run(100) == [10, 50, 90]
    assert Job(CheckpointConfig(every="auto"), save=400.0).run(900) == [10, 411, 812]  # when the one before is done


def test_a_save_that_never_ends_is_not_waited_for_for_ever() -> None:
    job = Job(CheckpointConfig(every="auto", auto=AutoConfig(most=200)))
    job.commits = False
    assert job.run(500) == [10, 210, 410]


@pytest.mark.parametrize("every", [100, "auto"])
def test_a_failed_save_is_tried_again_soon(every: Any) -> None:
    job = Job(CheckpointConfig(every=every, auto=AutoConfig(least=100)))
    job.commits = False
    assert job.run(102) == [100]
    job.failure = "disk full"
    job.run(1)
    assert job.run(14) == [110]  # a tenth of the interval later
    assert job.run(25) == [130]  # then twice that
    job.commits, job.failure = True, ""
    assert job.run(50) == [170]
    assert job.run(20) == ([200] if every == 100 else [])


def test_a_skipped_save_is_tried_again_soon() -> None:
    job = Job(CheckpointConfig(every=100))
    job.accepts = False
    assert job.run(115) == [100, 110]
    job.accepts = True
    assert job.run(20) == [130]
    assert job.run(60) == []


def test_no_save_is_begun_shortly_before_a_stop_that_saves() -> None:
    job = Job(CheckpointConfig(every=10), save=15.0)
    job.run(28)
    job.due = job.now + 40
    assert job.run(22) == [30, 40, 50]
    assert job.run(17) == []  # 60 would not be committed before the stop
    job.due = job.now + 1000  # the job got more time
    assert job.run(20) == [70, 80]


def test_the_automatic_cadence_leaves_out_what_does_not_pay_before_a_stop() -> None:
    job = Job(CheckpointConfig(every="auto"))
    job.run(11)
    job.due = 304 + 140.0  # less than half an interval after the next save
    assert job.run(400) == []
    again = Job(CheckpointConfig(every="auto"))
    again.run(11)
    again.due = 304 + 160.0
    assert again.run(400) == [304]


def test_what_came_from_memory_and_is_on_no_disk_is_saved_at_once() -> None:
    for saved, save_vote in ((500, SaveVote.SAVE), (640, SaveVote.NONE)):
        config = CheckpointConfig(every="auto", auto=AutoConfig(least=100))
        save_schedule = SaveSchedule(config, saved=saved, mtbf=HOUR, on_change=lambda *_: None, clock=lambda: 0.0)
        save_schedule.read_saver(saved, None, [])
        assert save_schedule.save_vote(641, 0.0) is save_vote


def test_one_save_that_hung_is_no_measure_of_the_next_ones() -> None:
    save_schedule = SaveSchedule(CheckpointConfig(), saved=0, mtbf=HOUR, on_change=lambda *_: None, clock=lambda: 0.0)
    save_schedule.read_saver(1, None, [3.0] * 9 + [3 * HOUR, 5.0])
    assert save_schedule.save_seconds == 5.0
    save_schedule.read_saver(1, None, [3.0, 90.0])
    assert save_schedule.save_seconds == 90.0, "too few to know what is usual"


def test_steps_that_only_memory_holds_count_as_unsaved() -> None:
    now, saver = (
        SimpleNamespace(step=640, loss=1.0, software_digest=""),
        SimpleNamespace(lasting=None, committed_step=500, failure="disk full"),
    )
    phases = SimpleNamespace(begin_wait=None)
    services = SimpleNamespace(saver=saver, cell=None, test_until=0, phases=phases, drill=None)
    config = JobConfig(checkpoint=CheckpointConfig(max_unsaved_steps=200))
    objects = SimpleNamespace(
        workload=None, layout=SimpleNamespace(sizes={"tp": 1, "pp": 1}, world_size=1), model=nn.Linear(1, 1)
    )
    loop: Any = Loop(config, objects, now, services)  # type: ignore[arg-type]
    loop._check_saved(700)
    with pytest.raises(SaveFailed, match="201 steps are in no committed checkpoint; the newest is of step 500"):
        loop._check_saved(701)


@pytest.mark.parametrize("quiet", [[], [1.0]])
def test_steps_beside_a_save_are_the_measure_until_others_are_known(quiet: list[float]) -> None:
    job = Job(CheckpointConfig(every="auto"))
    for seconds in quiet:
        job.save_schedule.record_step(seconds)
    job.save_schedule.record_save(1, True)
    job.save_schedule.record_stall(0.5)
    job.save_schedule.record_step(2.0)
    job.save_schedule.read_saver(1, None, [3.0])
    ((steps, seconds, _),) = job.intervals
    assert (steps, seconds) == ((294, 294.0) if quiet else (147, 294.0))


@pytest.mark.parametrize(("saves", "found"), [(7, 100.0), (8, 2.0)])
def test_one_save_that_hung_is_no_measure_once_enough_are_known(saves: int, found: float) -> None:
    schedule = Job(CheckpointConfig()).save_schedule
    schedule.read_saver(0, None, [2.0] * (saves - 1) + [100.0])
    assert schedule.save_seconds == found
    schedule.read_saver(0, None, [2.0] * (saves - 1) + [16.0])
    assert schedule.save_seconds == 16.0, "eight times as long as usual is still slow"
    schedule.read_saver(0, None, [2.0] * (saves - 1) + [17.0])
    assert schedule.save_seconds == (17.0 if saves == 7 else 2.0)


def test_usual_is_the_median() -> None:
    schedule = Job(CheckpointConfig()).save_schedule
    assert schedule.save_seconds == 0.0
    schedule.read_saver(0, None, [1.0] * 2 + [2.0] * 5 + [16.0])
    assert schedule.save_seconds == 16.0


@pytest.mark.parametrize(("beside", "steps"), [(False, 294), (True, 147)])
def test_an_interval_is_planned_with_the_median_of_steps_and_stalls(beside: bool, steps: int) -> None:
    job = Job(CheckpointConfig(every="auto"))
    schedule, second = job.save_schedule, 1 + beside
    for number, (seconds, stall) in enumerate([(0.5, 0.1), (1.0, 0.5), (9.0, 9.0), (9.0, 9.0)]):
        schedule.record_save(number, beside)
        schedule.record_stall(stall)
        schedule.record_step(seconds * second)
    schedule.read_saver(3, None, [])
    ((found, seconds, _),) = job.intervals
    assert (found, seconds) == (steps, 294.0), "sqrt(2 * 0.5 s * 24 h)"
    assert schedule.tried_step == 3


@pytest.mark.parametrize(
    ("every", "due", "vote"),
    [("auto", 4.9, SaveVote.HOLD_BACK), ("auto", 5.0, SaveVote.NONE), (10, 0.4, SaveVote.NONE)],
    ids=["within half", "at half", "by steps"],  # those of votes would be their values, which a planted bug changes
)
def test_saves_are_held_back_for_half_an_interval_before_a_stop(every: Any, due: float, vote: SaveVote) -> None:
    schedule = Job(CheckpointConfig(every=every)).save_schedule  # an automatic interval begins with ten steps
    for seconds in (0.5, 1.0, 9.0, 9.0):
        schedule.record_step(seconds)
    assert schedule.save_vote(1, due) is vote


@pytest.mark.parametrize(("quiet", "busy", "slowdown"), [(8, 8, 1.5), (7, 8, 0.0), (8, 7, 0.0)])
def test_steps_beside_a_save_are_compared_once_enough_are_known(quiet: int, busy: int, slowdown: float) -> None:
    schedule = Job(CheckpointConfig()).save_schedule
    schedule.read_saver(0, None, [3.0])
    for _ in range(quiet):
        schedule.record_step(1.0)
    schedule.record_save(1, True)
    for _ in range(busy):
        schedule.record_step(2.0)
    assert schedule._slowdown(1.0) == slowdown
    assert schedule._slowdown(5.0) == 0.0, "steps beside a save that take less time cost nothing"
