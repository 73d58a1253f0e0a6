"""What the coordinator knows of the generation that runs."""

from dataclasses import dataclass, field

from trainer.agent.blame import RankEnd
from trainer.agent.suspects import Fall, fall
from trainer.contract.outcome import Failure, FailureKind


@dataclass(kw_only=True)
class Past:
    """What the generations of this attempt that are over leave to the next ones."""

    restarts: int = 0
    trained: bool = False  # a step of this attempt
    mark: str = ""  # of the newest failure
    falls: list[Fall] = field(default_factory=list)
    suspects: list[int] = field(default_factory=list)  # steps whose checkpoints are to be left out

    def fell(self, failure: Failure | None, mark: str, restored: int, suspect: int | None) -> None:
        """A generation that began from the checkpoint of step `restored` is over."""
        self.mark = mark
        one = fall(failure, restored, None) if failure is not None else None
        if one is not None:
            self.falls.append(one)
        if suspect is not None:
            self.suspects.append(suspect)


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
