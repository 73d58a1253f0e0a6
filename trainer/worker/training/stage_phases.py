"""The phases of a rank that computes in stages: which pass of which micro-batch it is in, and that it waits."""

from collections.abc import Sequence

from trainer.contract.ranks.progress import Phase
from trainer.worker.pipeline.activities import Activity, Moment
from trainer.worker.reporting.phase_tracker import PhaseTracker

_PHASES = {
    Activity.FORWARD: Phase.FORWARD,
    Activity.BACKWARD: Phase.BACKWARD,
    Activity.INPUT_GRADIENT: Phase.BACKWARD,
    Activity.WEIGHT_GRADIENT: Phase.BACKWARD,
}
_SENDS = (Activity.SEND_ACTIVATION, Activity.SEND_GRADIENT)


class StagePhases:
    """A watcher of a pipeline that tells the tracker; a wait for another stage is no work of this one."""

    def __init__(self, phases: PhaseTracker, stages: Sequence[int]) -> None:
        """`stages`: those of this rank, in the order of the model."""
        self._phases, self._places = phases, {stage: place for place, stage in enumerate(stages)}

    def begin(self, moment: Moment) -> None:
        """A pass begins, a message, or a wait; in an evaluation all of them belong to that."""
        phase = None if self._phases.evaluates else _PHASES.get(moment.activity)
        if phase is not None:
            self._phases.enter(phase, moment)
        else:
            self._phases.begin_moment(moment)

    def end(self, moment: Moment) -> None:
        """What comes next begins with a moment of its own."""
        if moment.activity in _SENDS and not self._phases.evaluates:
            is_gradient = moment.activity is Activity.SEND_GRADIENT
            self._phases.record_sent(self._places[moment.stage], is_gradient, moment.micro_batch)
        if moment.activity not in _PHASES:
            self._phases.end_moment()
