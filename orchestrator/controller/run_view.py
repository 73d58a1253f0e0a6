"""One run as a tick sees it."""

from dataclasses import dataclass
from pathlib import Path

from orchestrator.config.run_config import RunConfig
from orchestrator.registry.records import Attempt, Run, UserRequest
from trainer.contract.run_dir import AttemptDir, RunDir


@dataclass(frozen=True, kw_only=True)
class RunView:
    """The rows of one run, its config, and what people ask of it."""

    run: Run
    attempts: tuple[Attempt, ...]
    config: RunConfig
    cancel: UserRequest | None = None

    @property
    def last(self) -> Attempt:
        return self.attempts[-1]

    @property
    def folder(self) -> RunDir:
        return RunDir(Path(self.run.run_dir))

    @property
    def attempt_dir(self) -> AttemptDir:
        """The folder of the newest attempt."""
        return self.folder.attempt(self.last.number)
