"""Reports of a pipeline stage to the phase tracker."""

from typing import Any

import pytest

from trainer.protocol.rank_progress.progress import Activity, Phase, StageActivity
from trainer.worker.train_loop.passes import StagePhases


class Tracker:
    def __init__(self, *, waits: bool = True) -> None:
        self.called: list[Any] = []
        self._waits = waits

    def _call(self, *what: Any) -> Any:
        return lambda: self.called.append(what)

    def pass_callback(self, phase: Phase, moment: StageActivity) -> Any:
        return self._call("pass", phase, moment)

    def wait_callback(self, moment: StageActivity) -> Any:
        return self._call("wait", moment)

    def wait_end_callback(self) -> Any:
        return self._call("end") if self._waits else None

    def sent_callback(self, place: int, is_gradient: bool, micro_batch: int) -> Any:
        return self._call("sent", place, is_gradient, micro_batch)


def told(tracker: Tracker, moment: StageActivity) -> list[Any]:
    phases = StagePhases(tracker, [2, 5])  # type: ignore[arg-type]
    begin, end = phases.begin_callback(moment), phases.end_callback(moment)
    begin()
    if end is not None:
        end()
    return tracker.called


@pytest.mark.parametrize(
    ("activity", "phase"),
    [
        (Activity.FORWARD, Phase.FORWARD), (Activity.BACKWARD, Phase.BACKWARD),
        (Activity.INPUT_GRADIENT, Phase.BACKWARD), (Activity.WEIGHT_GRADIENT, Phase.BACKWARD),
    ],
)  # fmt: skip
def test_a_pass_is_of_its_phase_and_ends_with_what_comes_next(activity: Activity, phase: Phase) -> None:
    moment = StageActivity(activity, 5, 3)
    assert told(Tracker(), moment) == [("pass", phase, moment)]


@pytest.mark.parametrize("activity", [Activity.WAIT_FOR_ACTIVATION, Activity.WAIT_FOR_GRADIENT, Activity.REDUCE])
def test_a_wait_is_no_work(activity: Activity) -> None:
    moment = StageActivity(activity, 2, 3)
    assert told(Tracker(), moment) == [("wait", moment), ("end",)]
    assert told(Tracker(waits=False), moment) == [("wait", moment)]


@pytest.mark.parametrize(
    ("activity", "is_gradient"), [(Activity.SEND_ACTIVATION, False), (Activity.SEND_GRADIENT, True)]
)
def test_what_was_sent_counts_at_the_place_of_its_stage(activity: Activity, is_gradient: bool) -> None:
    moment = StageActivity(activity, 5, 3)
    sent = ("sent", 1, is_gradient, 3)
    assert told(Tracker(), moment) == [("wait", moment), sent, ("end",)]
    assert told(Tracker(waits=False), moment) == [("wait", moment), sent]
