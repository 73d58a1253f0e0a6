"""What a person changes of a run that goes on: checked against the contract before anything is written."""

import sys
from collections.abc import Collection, Sequence
from typing import Any

from orchestrator.config.compose import recompose
from orchestrator.config.run_config import RunConfig
from orchestrator.errors import Precondition
from orchestrator.registry.records import Run
from orchestrator.registry.store import Store
from orchestrator.scheduler.job_environment import Submitter
from orchestrator.states import RunState
from orchestrator.submission import user_code
from orchestrator.submission.resume_contract import Change, check_keys, config_changes, identity_changes, require
from orchestrator.submission.run_identity import code, environment
from trainer.contract.config import build


def resume_request(store: Store, run: Run, overrides: Sequence[str], accepted: Collection[str]) -> dict[str, Any]:
    """What the controller is asked with, besides to resume: a new config, which is stored, and a new identity.

    Raises ConfigError, and Precondition where the contract refuses. What is typed is accepted.
    """
    check_keys(accepted)
    data = store.config(run.config_digest)
    changes: list[Change] = []
    if overrides:
        # Keys that a newer orch has added are no change of anybody's.
        before, now = recompose(data, []), recompose(data, overrides)
        user_code.check(now.config)
        config, changes, data = now.config, config_changes(before.data, now.data), now.data
    else:
        made = build(RunConfig, data)
        assert isinstance(made, RunConfig)
        config = made
    identity = _identity(run, config)
    differs = identity_changes(run.identity, identity)
    require([*changes, *differs], {change.key for change in changes} | set(accepted))
    _require_more_steps(run, config)
    asked: dict[str, Any] = {"config": store.put_config(data)} if changes else {}
    return asked | ({"identity": identity} if differs else {})


def _identity(run: Run, config: RunConfig) -> dict[str, Any]:
    """Code and environment as they are now, as far as this interpreter is the one that jobs of the run have."""
    now: dict[str, Any] = {"code": code(config)}
    if Submitter.of(run.identity).python == sys.executable:
        now["env"] = environment(run.cluster)
    else:
        now["code"]["orch"] = run.identity.get("code", {}).get("orch")
    if config.workload.snapshot:  # the job trains from the copy that was made when the run was submitted
        now["code"]["user"] = run.identity.get("code", {}).get("user")
    return now


def _require_more_steps(run: Run, config: RunConfig) -> None:
    if run.state is not RunState.SUCCEEDED or (config.train.steps > run.total_steps and not config.command):
        return
    hint = "" if config.command else f"orch resume {run.name} train.steps={2 * run.total_steps} goes on from there"
    raise Precondition(f"{run.name} is SUCCEEDED: it has finished", where=run.reason, hint=hint)
