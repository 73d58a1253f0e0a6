"""What a run that stands still has kept of its training, and whether it stands still because of its own program."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpointing.config import RUN
from orchestrator.registry.records import Run
from orchestrator.registry.store import Store
from orchestrator.states import RunState
from trainer.contract.failures.failure_kinds import kinds_with
from trainer.contract.run_dir import RunDir

_FIXED_BY_A_PERSON = kinds_with(lambda traits: traits.of_the_program or traits.comes_back)


def keeps_nothing(store: Store, run: Run, config: Mapping[str, Any]) -> bool:
    """Whether the run begins at step 0 as if it were new; `config` is its resolved one.

    It has no checkpoint and has begun with none, and skips no batch, which it would do by its place in the data. A
    program of the user's own may have kept what orch does not see, and so may a tier elsewhere.
    """
    if config.get("command") or store.checkpoints(run.name) or run.identity.get("imported"):
        return False
    tiers = config.get("checkpoint", {}).get("tiers") or []
    if any(tier["path"] != RUN for tier in tiers):
        return not run.step
    folder = RunDir(Path(run.run_dir))
    skips = any(attempt.skipped.exists() for attempt in folder.all_attempts())
    return not skips and not any(folder.checkpoints.glob("step-*"))


def awaits_fixed_code(store: Store, run: Run) -> bool:
    """Whether it failed, or is held, because of its own program, which a person was asked to fix."""
    failure = store.attempts(run.name)[-1].failure
    return run.state is RunState.FAILED or (
        run.state is RunState.HELD and failure is not None and failure["kind"] in _FIXED_BY_A_PERSON
    )
