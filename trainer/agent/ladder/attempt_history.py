"""Record of an attempt's finished generations."""

from dataclasses import dataclass, field

from checkpointing.format.commit import parse_name
from trainer.protocol.failures.outcome import Failure, FailureKind
from trainer.protocol.failures.suspect_checkpoints import FailedGeneration, failed_generation
from trainer.protocol.launch_token import LaunchToken
from trainer.protocol.messages.agents import ProgressReport
from trainer.protocol.skipped_batches import Skip


@dataclass(kw_only=True)
class AttemptHistory:
    """Record of the finished generations of this attempt."""

    restarts: int = 0  # since the last progress
    rollbacks: int = 0  # since the last progress
    saved: int = 0  # step of the run's newest checkpoint
    advanced: bool = False  # the running generation made progress: it saved a checkpoint that is new to the run
    trained: bool = False  # a step was trained in this attempt or an earlier one
    mark: str = ""  # signature of the latest failure
    failed_generations: list[FailedGeneration] = field(default_factory=list)
    suspects: list[int] = field(default_factory=list)  # steps whose checkpoints must not be restored
    skipped: list[Skip] = field(default_factory=list)  # batches skipped by rollbacks of this attempt
    hung: list[str] = field(default_factory=list)  # nodes blamed for a hang, listed once per hang
    bad_loss: int = -1  # highest step at which the loss of a user's program became unusable; -1: none
    hangs: int = 0  # generations that ended in a hang
    generations: int = 0
    new_nodes: bool = True  # nodes have joined since the last generation; also True before the first
    earlier_futile: int = 0  # consecutive restarts that trained no new step
    furthest: int = 0  # furthest step trained by any earlier generation
    reached: int = 0  # furthest step of the running generation; 0 if none
    restarted_to_save: bool = False  # a generation was started only to save and stop

    @classmethod
    def from_token(cls, token: LaunchToken) -> "AttemptHistory":
        found = [parse_name(name) for name in (*token.checkpoints, *token.perhaps)]
        newest = max((name.step for name in found if name is not None), default=0)
        return cls(trained=token.trained or newest > 0, saved=newest)

    @property
    def futile_restarts(self) -> int:
        """Return the number of consecutive restarts, including this one, that did not reach a new step."""
        if self.reached > self.furthest:
            return 0
        return self.earlier_futile + (self.generations > 0)

    @property
    def restarts_used(self) -> int:
        return 0 if self.advanced else self.restarts

    @property
    def rollbacks_used(self) -> int:
        return 0 if self.advanced else self.rollbacks

    def record_failure(
        self, failure: Failure | None, mark: str, restored: int, suspect: int | None, skip: Skip | None = None, *,
        requested: bool = False,
    ) -> None:  # fmt: skip
        """Record the end of a generation that started from the checkpoint of step `restored`.
        `requested` means that an operator's drill ended it, so the restart does not count.
        """
        self.restarts, self.rollbacks, self.advanced = self.restarts_used, self.rollbacks_used, False
        self.mark = "" if requested else mark
        self.earlier_futile, self.furthest = (
            self.futile_restarts - requested,
            max(self.furthest, self.reached),
        )
        self.generations, self.reached = self.generations + 1, 0
        if failure is not None and failure.kind is FailureKind.HANG and not failure.drill:
            self.hung += failure.nodes
            self.hangs += 1
        if failure is not None and failure.kind is FailureKind.NUMERIC and not failure.drill:
            self.bad_loss = max(self.bad_loss, failure.step or 0)
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
            # This step was saved again, starting from an older checkpoint, so the suspect state is gone.
            self.suspects.remove(saved)
            self.failed_generations = [one for one in self.failed_generations if one.restored != saved]
