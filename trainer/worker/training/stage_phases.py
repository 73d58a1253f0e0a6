"""The phases of a rank that computes in stages: which pass of which micro-batch it is in, and that it waits."""

from trainer.contract.ranks.progress import Phase
from trainer.worker.pipeline.activities import WAITS, Activity, Moment
from trainer.worker.reporting.phase_tracker import PhaseTracker

_PHASES = {Activity.FORWARD: Phase.FORWARD}
"""All others that compute are of the backward pass."""


class StagePhases:
    """A watcher of a pipeline that tells the tracker; a wait for another stage is no work of this one."""

    def __init__(self, phases: PhaseTracker) -> None:
        self._phases = phases

    def begin(self, moment: Moment) -> None:
        """A pass begins, or a wait."""
        if moment.activity in WAITS:
            self._phases.pause()
        else:
            self._phases.enter(_PHASES.get(moment.activity, Phase.BACKWARD))

    def end(self, moment: Moment) -> None:
        """What comes next begins with a moment of its own."""
        if moment.activity in WAITS:
            self._phases.resume()
