"""One run as a tick sees it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from orchestrator.config.run_config import RunConfig
from orchestrator.errors import NotFound, RegistryError
from orchestrator.registry.records import Attempt, Run, UserRequest
from orchestrator.registry.store import Store
from trainer.contract.run_dir import AttemptDir, RunDir


def stored_config(store: Store, digest: str) -> dict[str, Any]:
    """A config of the registry; ValueError for a damaged one, which is one run's trouble alone."""
    try:
        return store.config(digest)
    except (RegistryError, NotFound) as error:
        raise ValueError(error.what) from error


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

    @cached_property
    def folder(self) -> RunDir:
        return RunDir(Path(self.run.run_dir))

    @cached_property
    def attempt_dir(self) -> AttemptDir:
        """The folder of the newest attempt."""
        return self.folder.attempt(self.last.number)
