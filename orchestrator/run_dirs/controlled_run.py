"""One run, as used by a controller pass."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from orchestrator.config.run_config import RunConfig
from orchestrator.errors import NotFound, RegistryError
from orchestrator.registry.records import Attempt, Run, UserRequest
from orchestrator.registry.store import Store
from trainer.protocol.plain_data import build
from trainer.protocol.run_dir import AttemptDir, RunDir


def stored_config(store: Store, digest: str) -> dict[str, Any]:
    """Return a config from the registry. Raises ValueError if it is damaged, which affects only its run."""
    try:
        return store.config(digest)
    except (RegistryError, NotFound) as error:
        raise ValueError(error.what) from error


class RunConfigs:
    """The registry's configs by digest, each parsed only once. Raises ValueError as `stored_config` does."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, RunConfig] = {}

    def __call__(self, digest: str) -> RunConfig:
        if digest not in self._known:
            self._known[digest] = build(RunConfig, stored_config(self._store, digest))
        return self._known[digest]


@dataclass(frozen=True, kw_only=True)
class ControlledRun:
    """Rows of one run, its config, and a pending cancel request."""

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
        """Folder of the newest attempt."""
        return self.folder.attempt(self.last.number)
