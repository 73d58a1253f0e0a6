"""What the coordinator knows of the current generation, and of those before it."""

from dataclasses import dataclass, field
from typing import Any

from checkpointing.format.commit import parse_name
from trainer.agent.ladder.in_job_policy import FIXED_BY_RESTART
from trainer.agent.watch.root_cause import RankEnd
from trainer.contract.failures.outcome import Failure, FailureKind
from trainer.contract.failures.suspect_checkpoints import HARMLESS, FailedGeneration, failed_generation
from trainer.contract.launch_token import LaunchToken
from trainer.contract.messages.agents import ProgressReport
from trainer.contract.skipped_batches import Skip


@dataclass(kw_only=True)
class AttemptHistory:
    """What is kept of the generations of this attempt that are over."""

    restarts: int = 0  # since the newest progress
    rollbacks: int = 0  # the same
    saved: int = 0  # newest step of a checkpoint of this run, when the attempt began or since
    advanced: bool = False  # the running generation made progress: a checkpoint that is new to the run
    trained: bool = False  # a step of this attempt, or of one before it
    mark: str = ""  # of the newest failure
    failed_generations: list[FailedGeneration] = field(default_factory=list)
    suspects: list[int] = field(default_factory=list)  # steps whose checkpoints are not restored
    skipped: list[Skip] = field(default_factory=list)  # batches that rollbacks of this attempt have skipped
    hung: list[str] = field(default_factory=list)  # nodes blamed for a hang, once for each hang
    hangs: int = 0  # generations that ended with one
    generations: int = 0
    new_nodes: bool = True  # since the last generation, or because there was none
    fruitless_before: int = 0  # restarts in a row that trained no new step
    furthest: int = 0  # step that any generation before this one has trained
    reached: int = 0  # the same of this one; 0: none
    again: bool = False  # a generation was started only to save and stop

    @classmethod
    def of(cls, token: LaunchToken) -> "AttemptHistory":
        """The history at the start of an attempt."""
        found = [parse_name(name) for name in (*token.checkpoints, *token.perhaps)]
        newest = max((name.step for name in found if name is not None), default=0)
        return cls(trained=token.trained or newest > 0, saved=newest)

    @property
    def fruitless(self) -> int:
        """Restarts in a row, the running one included, that have trained no step that is new to the attempt."""
        if self.reached > self.furthest:
            return 0
        return self.fruitless_before + (self.generations > 0)

    def situation_fields(self) -> dict[str, Any]:
        """The fields of `in_job_policy.Situation` that come from the history."""
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
            "again": self.again,
        }

    def record_failure(
        self, failure: Failure | None, mark: str, restored: int, suspect: int | None, skip: Skip | None = None, *,
        requested: bool = False,
    ) -> None:  # fmt: skip
        """A generation that began from the checkpoint of step `restored` is over.

        `requested`: a drill that somebody requested ended it, so that its restart does not count.
        """
        if self.advanced:  # as it does between attempts
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
        """Take in a node's progress report."""
        self.trained = self.trained or report.stepped or report.restored > 0
        if report.stepped:
            self.reached = max(self.reached, report.step)
        saved = report.saved
        self.advanced, self.saved = self.advanced or saved > self.saved, max(self.saved, saved)
        if saved in self.suspects and report.restored < saved:
            # Saved anew from an older checkpoint: the state of this step is not the one that was doubted.
            self.suspects.remove(saved)
            self.failed_generations = [one for one in self.failed_generations if one.restored != saved]


@dataclass(kw_only=True)
class Generation:
    """One generation; times are on the coordinator's monotonic clock, in seconds."""

    number: int = 0
    started: float = 0.0
    ends: dict[int, RankEnd] = field(default_factory=dict)
    first_failure: float | None = None
    broken: Failure | None = None  # what failed it besides the exits of its ranks
    dead_ranks_analysed: bool = False  # its dead ranks' flight records were read
    restored: int = 0  # step of the checkpoint that it began from; 0: none
    stop_announced: float = 0.0  # when its ranks were told to expect a stop, on the coordinator's clock
    drill: str = ""  # kind of the newest drill that was requested of it and ends it

    def note(self, end: RankEnd) -> None:
        """A rank has ended."""
        self.ends[end.rank] = end
        if not end.good and self.first_failure is None:
            self.first_failure = end.at

    def note_drill(self, kind: str) -> None:
        """A fault of this kind is injected on request."""
        self.drill = self.drill if kind in HARMLESS else kind

    def fail(self, failure: Failure, now: float) -> None:
        """Something other than a rank failed; the first failure counts, unless no restart fixes a later one."""
        # Ranks that wait for a dead peer do not move either: the exit of that peer says more.
        if failure.kind is FailureKind.HANG and any(not end.good for end in self.ends.values()):
            return
        worse = (
            failure.kind not in FIXED_BY_RESTART and self.broken is not None and self.broken.kind in FIXED_BY_RESTART
        )
        if self.broken is None or worse or failure.kind is FailureKind.AGENT_LOST:
            self.broken = failure
        if self.first_failure is None:
            self.first_failure = now
