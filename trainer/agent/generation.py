"""What the coordinator knows of the generation that runs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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

    def heard(self, report: Mapping[str, Any]) -> None:
        """What a node tells of its ranks: a step of theirs, a checkpoint of theirs."""
        self.trained = self.trained or bool(report.get("stepped"))
        saved = int(report.get("saved", 0))
        if saved in self.suspects and int(report.get("restored", 0)) < saved:
            # Trained again and saved again: what has this step now is another state, newer than the doubted one.
            self.suspects.remove(saved)
            self.falls = [one for one in self.falls if one.restored != saved]


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
