"""Progress lines of rank 0: readable interval, correct after a restart."""

from typing import Any

from trainer.worker.reporting.phase_tracker import ProgressLog


class Desk:
    def __init__(self, every: int | str, *, total: int = 1000, tokens: float | None = 100.0) -> None:
        self.now, self.lines = 50.0, list[str]()
        self.log = ProgressLog(
            every, total, tokens, write=self.lines.append, clock=lambda: self.now, wall=lambda: 1e9 + self.now
        )

    def train(self, first: int, last: int, seconds: float, **own: Any) -> None:
        for step in range(first, last + 1):
            self.now += seconds
            self.log.step(step, loss=2.0 + 1 / step, lr=3e-4, own=own)

    def said(self) -> list[str]:
        said, self.lines[:] = [line.partition("  ")[2] for line in self.lines], []
        return said


def test_steps_of_ten_milliseconds_do_not_fill_the_log() -> None:
    desk = Desk("10s")
    desk.train(1, 999, 0.01)
    assert desk.said() == ["step 1/1000  loss 3.0000  lr 0.0003"]
    desk.train(1000, 1000, 0.01)
    assert desk.said() == ["step 1000/1000  loss 2.0010  lr 0.0003  0.01 s/step  10000 tokens/s"]


def test_slow_steps_have_a_line_each_and_the_time_that_is_left() -> None:
    desk = Desk("10s", total=100)
    desk.train(1, 3, 30.0, accuracy=0.91)
    assert desk.said()[1:] == [
        "step 2/100  loss 2.5000  lr 0.0003  accuracy 0.91  30 s/step  3 tokens/s  ETA 49m00s",
        "step 3/100  loss 2.3333  lr 0.0003  accuracy 0.91  30 s/step  3 tokens/s  ETA 48m30s",
    ]


def test_a_number_is_one_of_steps() -> None:
    desk = Desk(50, tokens=None)
    desk.train(1, 120, 1.0)
    assert [line.split()[1] for line in desk.said()] == ["1/1000", "50/1000", "100/1000"]


def test_a_restart_says_where_it_goes_on() -> None:
    desk = Desk("10s")
    desk.log.begin(0)
    assert desk.said() == []
    again = Desk("10s")
    again.log.begin(20)
    again.train(21, 40, 1.0)
    first, second, third = again.said()
    assert first == "resumed from step 20: later steps logged above are trained again"
    assert second.startswith("step 21/1000")
    assert "ETA" not in second, "the first step compiles"
    assert third.startswith("step 31/1000")
    assert "1 s/step" in third


def test_a_validation_has_its_line_and_its_time_is_none_of_the_steps() -> None:
    desk = Desk("10s")
    desk.train(1, 1, 1.0)
    desk.now += 600.0
    desk.log.record_validation(1, 600.0, {"val_loss": 2.25, "hits": 12345678.0})
    assert desk.said()[1] == "validation after step 1:  val_loss 2.25  hits 1.23457e+07  (600.0 s)"
    desk.train(2, 11, 1.0)
    assert "1 s/step" in desk.said()[0]


def test_nothing_is_written_where_nothing_is_wanted() -> None:
    desk = Desk(0)
    desk.log.begin(20)
    desk.train(21, 30, 60.0)
    desk.log.record_validation(30, 1.0, {"val_loss": 1.0})
    assert desk.lines == []
