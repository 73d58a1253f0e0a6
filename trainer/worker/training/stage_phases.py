"""The phases of a rank that computes in stages: which pass of which micro-batch it is in, and that it waits."""

from collections.abc import Sequence

from trainer.contract.ranks.progress import Phase
from trainer.worker.pipeline.activities import Activity, Call, Moment
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

    def begin_of(self, moment: Moment) -> Call:
        """A pass begins, a message, or a wait."""
        phase = _PHASES.get(moment.activity)
        return self._phases.wait_of(moment) if phase is None else self._phases.pass_of(phase, moment)

    def end_of(self, moment: Moment) -> Call | None:
        """What comes next begins with a moment of its own."""
        if moment.activity in _PHASES:
            return None
        ends = self._phases.end_of_wait()
        if moment.activity not in _SENDS:
            return ends
        sent = self._phases.sent_of(
            self._places[moment.stage], moment.activity is Activity.SEND_GRADIENT, moment.micro_batch
        )
        if ends is None:
            return sent

        def end() -> None:
            sent()
            ends()

        return end
