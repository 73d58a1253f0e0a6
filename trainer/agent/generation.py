"""What the coordinator knows of the generation that runs."""

from dataclasses import dataclass, field

from trainer.agent.blame import RankEnd
from trainer.contract.outcome import Failure, FailureKind


@dataclass(kw_only=True)
class Generation:
    """One generation: its ends so far, and when and how it first failed (seconds on the coordinator's clock)."""

    number: int = 0
    started: float = 0.0
    ends: dict[int, RankEnd] = field(default_factory=dict)
    first_failure: float | None = None
    broken: Failure | None = None

    def note(self, end: RankEnd) -> None:
        """A rank has ended."""
        self.ends[end.rank] = end
        if not end.good and self.first_failure is None:
            self.first_failure = end.at

    def fail(self, failure: Failure, now: float) -> None:
        """The machinery failed; the first such failure counts, unless an agent is lost."""
        if self.broken is None or failure.kind is FailureKind.AGENT_LOST:
            self.broken = failure
        if self.first_failure is None:
            self.first_failure = now
