"""The current generation and the history of the earlier ones, as the coordinator sees them."""

from dataclasses import dataclass, field
from typing import Any

from checkpointing.format.commit import parse_name
from trainer.agent.ladder.in_job_policy import FIXED_BY_RESTART
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.failures.rank_end import RankEnd
from trainer.protocol.failures.suspect_checkpoints import HARMLESS, FailedGeneration, failed_generation
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.messages.agents import ProgressReport
from trainer.protocol.skipped_batches import Skip


@dataclass(kw_only=True)
class AttemptHistory:
    """Record of the finished generations of this attempt."""

    restarts: int = 0  # since the newest progress
    rollbacks: int = 0  # since the newest progress
    saved: int = 0  # newest step of a checkpoint of this run, when the attempt began or since
    advanced: bool = False  # the running generation made progress: a checkpoint that is new to the run
    trained: bool = False  # a step was trained in this attempt or an earlier one
    mark: str = ""  # of the newest failure
    failed_generations: list[FailedGeneration] = field(default_factory=list)
    suspects: list[int] = field(default_factory=list)  # steps whose checkpoints must not be restored
    skipped: list[Skip] = field(default_factory=list)  # batches skipped by rollbacks of this attempt
    hung: list[str] = field(default_factory=list)  # nodes blamed for a hang, once per hang
    hangs: int = 0  # generations that ended in a hang
    generations: int = 0
    new_nodes: bool = True  # since the last generation; also True before the first
    fruitless_before: int = 0  # consecutive restarts that trained no new step
    furthest: int = 0  # furthest step trained by any earlier generation
    reached: int = 0  # furthest step of the running generation; 0: none
    restarted_to_save: bool = False  # a generation was started only to save and stop

    @classmethod
    def from_token(cls, token: LaunchToken) -> "AttemptHistory":
        found = [parse_name(name) for name in (*token.checkpoints, *token.perhaps)]
        newest = max((name.step for name in found if name is not None), default=0)
        return cls(trained=token.trained or newest > 0, saved=newest)

    @property
    def fruitless(self) -> int:
        """Return the number of consecutive restarts, this one included, that trained no step new to the attempt."""
        if self.reached > self.furthest:
            return 0
        return self.fruitless_before + (self.generations > 0)

    def situation_fields(self) -> dict[str, Any]:
        """Return the fields of `in_job_policy.Situation` that come from the history."""
        return {
            "trained": self.trained,
            "restarts": self.restarts,
            "rollbacks": self.rollbacks,
            "advanced": self.advanced,
            "last_mark": self.mark,
            "failed_generations": tuple(self.failed_generations),
            "suspects": tuple(self.suspects),
            "skipped": tuple(self.skipped),
            "hung": tuple(self.hung),
            "fruitless": self.fruitless,
            "restarted_to_save": self.restarted_to_save,
        }

    def record_failure(
        self, failure: Failure | None, mark: str, restored: int, suspect: int | None, skip: Skip | None = None, *,
        requested: bool = False,
    ) -> None:  # fmt: skip
        """Record the end of a generation that started from the checkpoint of step `restored`.
        `requested`: an operator's drill ended it, so the restart does not count.
        """
        if self.advanced:  # same rule as between attempts
            self.restarts = self.rollbacks = 0
        self.advanced = False
        self.mark = "" if requested else mark
        self.fruitless_before, self.furthest = self.fruitless - requested, max(self.furthest, self.reached)
        self.generations, self.reached = self.generations + 1, 0
        if failure is not None and failure.kind is FailureKind.HANG and not failure.drill:
            self.hung += failure.nodes
            self.hangs += 1
        if skip is not None:
            self.skipped.append(skip)
            self.rollbacks += 1
        one = failed_generation(failure, restored, None) if failure is not None else None
        if one is not None:
            self.failed_generations.append(one)
        if suspect is not None:
            self.suspects.append(suspect)

    def add_report(self, report: ProgressReport) -> None:
        self.trained = self.trained or report.stepped or report.restored > 0
        if report.stepped:
            self.reached = max(self.reached, report.step)
        saved = report.saved
        self.advanced, self.saved = self.advanced or saved > self.saved, max(self.saved, saved)
        if saved in self.suspects and report.restored < saved:
            # Saved again from an older checkpoint, so this step no longer holds the suspect state.
            self.suspects.remove(saved)
            self.failed_generations = [one for one in self.failed_generations if one.restored != saved]


@dataclass(kw_only=True)
class GenerationState:
    """State of one generation; times are seconds on the coordinator's monotonic clock."""

    number: int = 0
    started: float = 0.0
    ends: dict[int, RankEnd] = field(default_factory=dict)
    first_failure: float | None = None
    broken: Failure | None = None  # failure other than an exit of its ranks
    dead_ranks_analysed: bool = False  # the flight records of its dead ranks were read
    restored: int = 0  # step of the checkpoint it started from; 0: none
    stop_announced: float = 0.0  # announced stop time, on the coordinator's clock
    drill: str = ""  # kind of the newest requested drill that ends this generation

    def note(self, end: RankEnd) -> None:
        self.ends[end.rank] = end
        if not end.good and self.first_failure is None:
            self.first_failure = end.at

    def note_drill(self, kind: str) -> None:
        """Record that a fault of this kind is injected on request."""
        self.drill = self.drill if kind in HARMLESS else kind

    def fail(self, failure: Failure, now: float) -> None:
        """Record a failure other than a rank's exit; the first one counts, unless a restart cannot fix a later one."""
        # Ranks that wait for a dead peer do not move either; the peer's exit is the better evidence.
        if failure.kind is FailureKind.HANG and any(not end.good for end in self.ends.values()):
            return
        worse = (
            failure.kind not in FIXED_BY_RESTART and self.broken is not None and self.broken.kind in FIXED_BY_RESTART
        )
        if self.broken is None or worse or failure.kind is FailureKind.AGENT_LOST:
            self.broken = failure
        if self.first_failure is None:
            self.first_failure = now
