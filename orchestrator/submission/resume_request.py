"""Changes to a run on resume, checked against the contract before the first write."""

import os
import shlex
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpointing.config import RUN
from orchestrator.config.compose import Composed, recompose
from orchestrator.config.run_config import RunConfig
from orchestrator.errors import ConfigError, Precondition
from orchestrator.registry.records import REPLACED_VARIABLES, Run
from orchestrator.registry.store import Store
from orchestrator.scheduler.available_schedulers import FACTORIES, kinds, make_instance
from orchestrator.scheduler.job_environment import Submitter, package_root
from orchestrator.states import RunState
from orchestrator.submission import user_code
from orchestrator.submission.create_run import (
    check_script,
    check_tier_folders,
    check_with_scheduler,
    data_identity,
    prepare_data,
    read_index,
)
from orchestrator.submission.resume_contract import (
    DATA_PATH,
    DATA_TEXT,
    HARMLESS,
    USER_CODE,
    Change,
    Rule,
    check_keys,
    config_changes,
    describe_change,
    find_rule,
    identity_changes,
    refuse,
    relax_without_checkpoints,
    require,
    why_packages_unknown,
)
from orchestrator.submission.run_identity import client, code, environment
from orchestrator.submission.secret_values import renew, without_webhook
from orchestrator.submission.stage_digest import fill_stage_digest
from trainer.protocol.failures.outcome import select_kinds
from trainer.protocol.plain_data import build
from trainer.protocol.run_dir import RunDir
from trainer.protocol.token_shards import INDEX_NAME
from trainer.protocol.user_code.code_record import CodeRecord
from trainer.protocol.user_code.record_code import read_again, read_packages_again

_FIXED_BY_CODE = select_kinds(lambda traits: traits.fixed_by_code)


def keeps_nothing(store: Store, run: Run, config: Mapping[str, Any]) -> bool:
    """Return whether the run would start over at step 0; `config` is its resolved config.

    It starts over if it has no checkpoint, did not start from one, and skips no batches (skips depend on the position
    in the data). A user's command, or a tier elsewhere, may have saved data that orch cannot see.
    """
    if config.get("command") or store.checkpoints(run.name) or run.identity.get("imported"):
        return False
    tiers = config.get("checkpoint", {}).get("tiers") or []
    if any(tier["path"] != RUN for tier in tiers):
        return not run.step
    folder = RunDir(Path(run.run_dir))
    skips = any(attempt.skipped_batches.exists() for attempt in folder.all_attempts())
    return not skips and not any(folder.checkpoints.glob("step-*"))


def awaits_fixed_code(store: Store, run: Run) -> bool:
    """Return whether the run has failed or is held because of an error that its user may have fixed in the code."""
    failure = store.attempts(run.name)[-1].failure
    stopped = run.state in (RunState.FAILED, RunState.HELD)
    return stopped and failure is not None and failure["kind"] in _FIXED_BY_CODE


def resume_request(
    store: Store, run: Run, overrides: Sequence[str], accepted: Collection[str],
    note: Callable[[str], None] = lambda words: None,
) -> dict[str, Any]:  # fmt: skip
    """Store a new config, and return the arguments for the resume request: the config and a new identity.

    Secrets in this shell replace older values in the run's file.

    Code that was fixed after a failure is accepted and reported to `note`.

    Raises ConfigError, Precondition if the contract refuses, and SubmitRejected if Slurm does. Typed overrides count as
    accepted.
    """
    check_keys(accepted)
    data = store.config(run.config_digest)
    changes: list[Change] = []
    webhooks: dict[str, str] = {}
    starts_over = keeps_nothing(store, run, data)
    if overrides:
        # Keys added by a newer orch are not changes by the user.
        before, now = recompose(data, [], checked=False), _apply_overrides(data, overrides, starts_over)
        if not now.config.workload.snapshot:
            _check_code(run, now.config, starts_over)
        _check_tiers(before.config, now.config, RunDir(Path(run.run_dir)))
        config = now.config
        data, webhooks = without_webhook(now.data)
        fill_stage_digest(data, before.data)
        if starts_over and before.data["data"]["text"] != data["data"]["text"]:
            prepare_data(config, data, RunDir(Path(run.run_dir)).path.parent)
        changes = config_changes(before.data, data)
    else:
        made = build(RunConfig, data)
        assert isinstance(made, RunConfig)
        config = made
    identity = current_identity(run, config) | _client_here(run)
    other_data = any(change.key == DATA_PATH for change in changes)
    if other_data:
        identity |= _read_data_identity(data["data"]["path"])
        changes = _unless_only_moved(changes, run, identity)
    elif config.data.path and Path(config.data.path, INDEX_NAME).exists():  # otherwise the job reports missing data
        read_index(config.data.path)
    # If the run has not trained, no result depends on the differences.
    has_trained = bool(config.command or (run.step and not starts_over) or store.checkpoints(run.name))
    differs = _differences(run, identity, note if has_trained else lambda words: None)
    compared = differs if has_trained else []
    changes = relax_without_checkpoints(changes) if starts_over else changes
    typed = shlex.join(["orch", "resume", run.name, *overrides, *(f"--accept={key}" for key in accepted)])
    refuse([*changes, *compared])
    _require_more_steps(run, config, changes, accepted)
    fixed = [one for one in compared if one.key == USER_CODE and awaits_fixed_code(store, run)]
    require([*changes, *compared], {one.key for one in (*changes, *fixed)} | set(accepted), typed)
    for one in fixed:
        note(f"{run.name} continues with fixed code: {describe_change(one)}")
    if any(change.key.startswith("cluster.") for change in changes):
        _check_job(run, config)
    asked = _renew_secrets(run, config, webhooks, note)
    if changes:  # `base`: the run may change before this request is answered
        asked |= {"config": store.put_config(data), "base": run.config_digest}
    return asked | ({"identity": identity} if differs or other_data else {})


def _renew_secrets(
    run: Run, config: RunConfig, webhooks: dict[str, str], note: Callable[[str], None]
) -> dict[str, Any]:  # fmt: skip
    """Store this shell's secrets, and return the names of the changed ones for the request."""
    folder = RunDir(Path(run.run_dir))
    secrets, replaced = renew(folder, config, os.environ, webhooks)
    if secrets is not None:
        secrets.replace(folder.secrets)
    for name in replaced:
        note(f"{run.name} continues with the new value of {name} from this shell")
    return {REPLACED_VARIABLES: replaced} if replaced else {}


def _differences(run: Run, identity: dict[str, Any], note: Callable[[str], None]) -> list[Change]:
    trained = trained_identity(run)
    if unknown := why_packages_unknown(trained, identity):
        note(f"the packages that {run.name} trained with could not be compared: {unknown}")
    return identity_changes(trained, identity)


def _apply_overrides(data: dict[str, Any], overrides: Sequence[str], starts_over: bool) -> Composed:
    """Return the config with overrides; refused changes are reported before values that do not fit."""
    if not starts_over:
        there, now = recompose(data, [], checked=False).data, recompose(data, overrides, checked=False).data
        refuse([one for one in config_changes(there, now) if one.key not in (DATA_PATH, DATA_TEXT)])
    return recompose(data, overrides, may_change=lambda key: starts_over or find_rule(key) is not Rule.REFUSED)


def _check_code(run: Run, config: RunConfig, starts_over: bool) -> None:
    """Raise ConfigError for code that a job cannot import."""
    try:
        user_code.check(config, Path(run.identity.get("submit_dir") or Path.cwd()))
    except ConfigError as error:
        if error.hint.startswith("did you mean") and not starts_over and not config.command:
            error.hint = "put the file back: workload.target cannot change in a run that has trained"
        raise


def _read_data_identity(path: str) -> dict[str, Any]:
    return {"data": data_identity(path, read_index(path))} if path else {}


def _unless_only_moved(changes: list[Change], run: Run, identity: dict[str, Any]) -> list[Change]:
    """Mark a new data path as harmless if the tokens there are the same."""
    before, now = run.identity.get("data") or {}, identity.get("data") or {}
    if not before.get("fingerprint") or before["fingerprint"] != now.get("fingerprint"):
        return changes
    return [replace(one, term=HARMLESS) if one.key == DATA_PATH else one for one in changes]


def _check_tiers(before: RunConfig, now: RunConfig, folder: RunDir) -> None:
    """Raise Precondition for a removed tier: the run would not find its checkpoints there, and would start over.

    Raises ConfigError for an unusable new tier.
    """
    kept = {tier.path for tier in now.checkpoint.tiers} or {RUN}
    for path in [tier.path for tier in before.checkpoint.tiers] or [RUN]:
        if path not in kept:
            raise Precondition(
                f"checkpoint.tiers lacks {path}, where the run has checkpoints",
                where="checkpoint.tiers",
                hint=f"leave {{path: {path}}} in the list; others may be added",
            )
    if now.checkpoint.tiers != before.checkpoint.tiers:
        check_tier_folders(now, folder, [RUN, *(tier.path for tier in before.checkpoint.tiers)])


def _check_job(run: Run, config: RunConfig) -> None:
    """Raise ConfigError if the job's script cannot be written, or SubmitRejected with Slurm's message if it refuses.

    Slurm is not asked if the run's own scheduler cannot be reached from here.
    """
    if FACTORIES[run.cluster].script is not None:
        check_script(config, run.cluster)
    if run.cluster not in kinds() or make_instance(run.cluster)() != run.scheduler:
        return
    check_script(config, run.cluster)
    check_with_scheduler(config, run.cluster, lambda _: None)


def _client_here(run: Run) -> dict[str, Any]:
    """Return this shell's Slurm client settings if they reach the run's Slurm, which may have moved."""
    reached = make_instance(run.cluster)() if FACTORIES[run.cluster].named_by_environment else ""
    return client(run.cluster) if reached and run.scheduler in ("", reached) else {}


def trained_identity(run: Run) -> dict[str, Any]:
    """Return the run's identity with the code and packages recorded by its newest attempt."""
    for attempt in reversed(RunDir(Path(run.run_dir)).all_attempts()):
        if (trained := CodeRecord.read(attempt.code)) is not None:
            return {**run.identity, "code": {**(run.identity.get("code") or {}), "files": trained.to_json()}}
    return run.identity


def current_identity(run: Run, config: RunConfig) -> dict[str, Any]:
    """Return the current code and environment, without the parts that this interpreter cannot determine.

    Packages are read from the folders in which the newest attempt found them, whichever interpreter it used.
    """
    now: dict[str, Any] = {"code": code(config, Path(run.identity.get("submit_dir", "")))}
    trained = trained_identity(run)
    before = CodeRecord.from_identity(trained)
    if before is not None:
        now["code"]["files"] = _code_now(before, CodeRecord.from_identity(now), run).to_json()
    if Submitter.from_identity(run.identity).python == sys.executable and not config.cluster.python:
        here = environment(run.cluster)
        shown = {name: value for name, value in here["variables"].items() if name not in config.env_from}
        now["env"] = {**here, "variables": shown}
        if "job" in run.identity:  # the next attempts run the code compared here, not the submitter's
            now["job"] = {**run.identity["job"], "package_root": package_root()}
    else:
        now["code"]["orch"] = run.identity.get("code", {}).get("orch")
    if config.workload.snapshot:  # the job trains from the copy created at submission
        now["code"] |= {key: trained.get("code", {}).get(key) for key in ("user", "files")}
        if before is not None:
            now["code"]["files"] = read_packages_again(before).to_json()
    return now


def _code_now(before: CodeRecord, named: CodeRecord | None, run: Run) -> CodeRecord:
    """Read the trained files again. A module that has moved is replaced by the file that would be imported now."""
    again = read_again(before)
    if named is None or Submitter.from_identity(run.identity).python != sys.executable:
        return again
    absent = (*again.absent, *(name for name in named.absent if name not in again.files))
    return replace(again, files={**again.files, **named.files}, absent=tuple(sorted(set(absent) - set(named.files))))


def _require_more_steps(run: Run, config: RunConfig, changes: Collection[Change], accepted: Collection[str]) -> None:
    finished = run.state is RunState.SUCCEEDED
    if config.train.steps > (run.total_steps if finished else run.step) and not (finished and config.command):
        return
    if finished:
        words = " ".join([f"train.steps={2 * run.total_steps}", *(f"--accept {key}" for key in accepted)])
        more = f"`orch resume {run.name} {words}` continues from there"
        hint = f"`orch show {run.name}` shows how its program ended" if config.command else more
        asked = any(change.key == "train.steps" for change in changes)
        fewer = f" all {run.total_steps} steps, and train.steps={config.train.steps} is not higher" if asked else ""
        raise Precondition(f"{run.name} is SUCCEEDED: it has finished{fewer}", where=run.reason, hint=hint)
    if any(change.key == "train.steps" for change in changes):
        raise Precondition(
            f"train.steps={config.train.steps}: the run has already trained that many",
            where=f"{run.name} is at step {run.step}",
            hint=f"train.steps={run.step + 1} or more, or orch submit --from {run.name}@STEP",
        )
