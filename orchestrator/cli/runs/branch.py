"""`orch submit --from RUN@STEP`: a new run from another run's checkpoint or weights, or from imported weights."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from secrets import token_hex
from typing import Any

from checkpointing.errors import CheckpointError
from checkpointing.format.commit import Name, parse_name
from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.durable import read_json, temporary_folder
from checkpointing.storage.trusted_path import check_private
from checkpointing.verification.verdicts import known_bad
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.checkpoints import verify
from orchestrator.cli.checkpoints.target import Target, find_one, find_registered, kept_while_read, warn_if_doubted
from orchestrator.cli.terminal.render import Screen, count
from orchestrator.config.compose import Composed, compose, recompose
from orchestrator.config.run_config import ClusterConfig, RunConfig
from orchestrator.errors import CheckpointInvalid, ConfigError, NotFound, Precondition
from orchestrator.registry.records import Run
from orchestrator.registry.store import Store
from orchestrator.states import Trust
from orchestrator.submission.create_run import check_beginning, writable_root
from orchestrator.submission.resume_contract import OWN_FOLDER, Rule, config_changes, identity_changes
from orchestrator.submission.resume_request import current_identity, trained_identity
from orchestrator.submission.secret_values import with_webhook
from trainer.protocol import skipped_batches
from trainer.protocol.plain_data import build
from trainer.protocol.user_code.code_record import CodeRecord
from trainer.protocol.user_code.record_code import with_packages

_STAGING = ".imports"
"""Folder under `cluster.root` for a checkpoint whose run has no folder yet. The user's id is appended to the name."""
_SHOWN = 12
"""Maximum number of mismatches to list."""


@contextmanager
def branch(
    screen: Screen, words: str, preset: str | None, overrides: tuple[str, ...]
) -> Iterator[tuple[Composed, dict[str, Any]]]:
    """Yield the new run's config (based on the other run's if there is no `preset`) and its initial checkpoint.

    The checkpoint is pinned inside the block, because the other run may still be live and delete old checkpoints.
    Raises NotFound, ConfigError or CheckpointInvalid, and Precondition if the checkpoint does not fit.
    """
    chosen = find_one(words, screen.warn)
    with kept_while_read(chosen):
        with open_store(create=True) as store:
            found = _branch(screen, store, chosen, words, preset, overrides)
        yield found


def _branch(
    screen: Screen, store: Store, chosen: Target, words: str, preset: str | None, overrides: tuple[str, ...]
) -> tuple[Composed, dict[str, Any]]:
    before = trained_config(chosen, words)
    run = require_trusted(screen, store, chosen)
    composed = compose(preset, overrides, environ=os.environ) if preset else recompose(before, overrides)
    if not preset and before["workload"]["snapshot"]:  # the new run imports this code, then copies it again
        workload = replace(composed.config.workload, path=tuple(composed.data["workload"]["path"]))
        composed = replace(composed, config=replace(composed.config, workload=workload))
    if run is not None:
        _warn_of_differences(screen, store, run, composed.config)
    check_beginning(composed.config, words)
    now = composed.data
    if now["data"]["text"] == before["data"]["text"] and not now["data"]["path"]:  # the same text gives the same tokens
        now = {**now, "data": {**now["data"], "path": before["data"]["path"]}}
    for change in config_changes(before, now):
        if change.term.rule is Rule.REFUSED and change.key not in OWN_FOLDER:
            raise Precondition(
                f"{change.key} must match the checkpoint's run: {change.term.why.partition(';')[0]}",
                where=f"{change.key}: {change.before} -> {change.now}",
                hint=f"keep the old value, or start without --from {words}",
            )
    step, steps = chosen.step or 0, composed.config.train.steps
    if steps <= step:
        what = f"nothing is left to train: the checkpoint is at step {step}, and train.steps={steps}"
        raise Precondition(what, where="train.steps", hint=f"set train.steps={2 * step}")
    source = f"{chosen.run or chosen.path}@{chosen.step}"
    begins = {"checkpoint": chosen.path, "source": source, "step": chosen.step, "optimizer": True}
    # Settings that determine data positions are unchanged here: changes to them were refused above.
    skipped = _skipped_by_source(chosen)
    return composed, {**begins, "skipped": skipped} if skipped else begins


def _skipped_by_source(chosen: Target) -> list[dict[str, Any]]:
    """Return the batches that the checkpoint's run has skipped. Raises Precondition if their list cannot be read."""
    assert chosen.run_dir is not None
    try:
        return [asdict(skip) for skip in skipped_batches.read_all(chosen.run_dir)]
    except (OSError, ValueError) as error:
        raise Precondition(
            f"the list of batches that the checkpoint's run has skipped cannot be read: {error}",
            where=str(chosen.run_dir.path),
            hint="restore the file, or remove it to train on all batches",
        ) from error


def trained_config(chosen: Target, words: str) -> dict[str, Any]:
    """Return the config the checkpoint was saved with. Its code path points to the code's copy, if there is one."""
    file = chosen.run_config_file
    if chosen.run_dir is None or file is None or not chosen.shared or not Path(chosen.path).is_dir():
        hint = "copy it into a shared folder, or use `orch ckpt export`, then `orch ckpt import`"
        raise Precondition("this checkpoint is not in a run folder that this host can see", where=words, hint=hint)
    config = with_webhook(recompose(_saved_config(chosen, file), []).data, chosen.run_dir)
    workload = config["workload"]
    if workload["snapshot"]:
        workload["path"] = [str(chosen.run_dir.code / str(index)) for index in range(len(workload["path"]))]
    return config


def _saved_config(chosen: Target, file: Path) -> dict[str, Any]:
    """Read the config from the run's folder, or from the registry if the file is missing or damaged."""
    try:
        return dict(read_json(file))
    except (OSError, ValueError, TypeError) as error:
        lost = Precondition(
            f"the configuration that {chosen.name} was saved with cannot be read: {error}", where=str(file),
            hint="restore the file; this home's registry does not have that configuration",
        )  # fmt: skip
        parts = parse_name(chosen.name)
        if chosen.run is None or parts is None:
            raise lost from error
        try:
            with open_store(readonly=True) as store:
                return store.config(store.attempt(chosen.run, parts.attempt).base_digest)
        except NotFound:
            raise lost from error


def require_trusted(screen: Screen, store: Store, chosen: Target) -> Run | None:
    """Refuse a damaged checkpoint and warn about a suspect one. Return its run if this registry has it."""
    if chosen.run_dir is None:
        return None
    place = LocalStorage(Path(chosen.path).parent)
    found = known_bad(LocalStorage(chosen.run_dir.checkpoints), str(Path(chosen.path).parent), place).get(chosen.name)
    if found is not None:
        raise CheckpointInvalid(
            f"{chosen.name} is INVALID: {found}", where=chosen.path, hint=f"orch ckpt ls {chosen.run_dir.name}"
        )
    run, row = find_registered(store, chosen)
    if row is not None and row.trust is Trust.CORRUPT:
        raise CheckpointInvalid(f"{chosen.name} is CORRUPT", where=chosen.path, hint=f"orch ckpt ls {row.run}")
    warn_if_doubted(screen.warn, row)
    return run


def _warn_of_differences(screen: Screen, store: Store, run: Run, config: RunConfig) -> None:
    """Warn about code or software that differs from what the run was trained with."""
    now = current_identity(run, build(RunConfig, store.config(run.config_digest)))
    if not config.cluster.python and (record := CodeRecord.from_identity(now)) is not None:
        # The new run uses this interpreter's packages, whatever the other run used.
        now["code"]["files"] = with_packages(record, config, {}).to_json()
    for change in identity_changes(trained_identity(run), now):
        if change.term.rule is not Rule.HARMLESS:
            screen.warn("differs", f"{change.key} differs from what {run.name} was trained with: {change.term.why}")


@contextmanager
def branch_weights(
    screen: Screen, words: str, preset: str | None, overrides: tuple[str, ...], *, write: bool
) -> Iterator[tuple[Composed, dict[str, Any]]]:
    """Yield the new run's config and initial weights. With `write`, a checkpoint of them exists inside the block.

    The weights must fit the model. The optimizer, data position and random generators start afresh. Raises NotFound,
    ConfigError, CheckpointInvalid or Precondition.
    """
    chosen = find_one(words, screen.warn)
    if preset:
        composed = compose(preset, overrides, environ=os.environ)
    else:
        composed = recompose(trained_config(chosen, words), overrides)
    check_beginning(composed.config, words)
    with open_store(create=True) as store:
        require_trusted(screen, store, chosen)
    label = f"{chosen.run or chosen.path}@{chosen.step}"
    with staging_folder(composed.config.cluster) if write else nullcontext() as staging:
        found = bring(
            screen, composed.config, staging, source=lambda: _weights(chosen), where=label, weights_only=True
        )  # fmt: skip
        for note in found["notes"]:
            screen.note(f"  {note}")
        screen.note(f"the weights of {label} fit: {count(found['tensors'])} tensors")
        yield composed, {key: found[key] for key in ("checkpoint", "source", "step", "optimizer")}


@contextmanager
def _weights(chosen: Target) -> Iterator[Any]:
    from checkpointing.engine.interchange.exporter import open_for_export  # imports torch
    from trainer.models.checkpoint_export import weights_source

    with kept_while_read(chosen), open_for_export(chosen.storage, chosen.name) as sealed:
        yield weights_source(sealed, Path(chosen.path))


@contextmanager
def staging_folder(cluster: ClusterConfig) -> Iterator[Path]:
    """Yield a temporary folder for the new checkpoint, which later moves into its run's folder."""
    place = writable_root(cluster.root, shared=cluster.shared_root) / f"{_STAGING}-{os.geteuid()}"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(place)
    with temporary_folder(place, "import", mode=0o700) as folder:
        yield folder


def bring(
    screen: Screen, config: Any, staging: Path | None, *,
    source: Callable[[], AbstractContextManager[Any]], where: str, weights_only: bool,
) -> dict[str, Any]:  # fmt: skip
    """Check that the weights from `source` fit `config`'s workload, and write the checkpoint to `staging`, if given.

    Returns a summary. Raises ConfigError if the weights do not fit or the user's code fails, and CheckpointInvalid if
    they cannot be read.
    """
    verify.prepare()
    from trainer.models import weights_import
    from trainer.worker.workload import WorkloadError

    try:
        with source() as opened:
            found = weights_import.plan_import(opened, config, weights_only=weights_only)
            if found.complaints:
                raise _does_not_fit(where, found.complaints)
            step, extra = weights_import.facts(opened, found)
            made = None if staging is None else _write_imported(screen, staging, step, found.tensors, extra)
    except CheckpointError as error:
        hint = "name safetensors files, or a file made with torch.save(model.state_dict(), FILE)"
        raise CheckpointInvalid(f"nothing was imported: {error}", where=where, hint=hint) from error
    except WorkloadError as error:
        raise ConfigError(str(error), where=config.workload.target) from error
    proved = sum(item.expected_fingerprint is not None for item in found.tensors.values())
    return {
        "source": where, "step": step, "optimizer": found.optimizer, "tensors": len(found.tensors),
        "compared": proved, "notes": found.notes, "checkpoint": made,
    }  # fmt: skip


def _does_not_fit(where: str, complaints: list[tuple[str, str]]) -> ConfigError:
    from trainer.models.weights_import import overrides

    lines = [what for what, _ in complaints[:_SHOWN]]
    lines += [f"and {len(complaints) - _SHOWN} more"] if len(complaints) > _SHOWN else []
    changes = " ".join(overrides(complaints))
    hint = f"add {changes}" if changes else "choose a configuration that matches the model"
    return ConfigError("the weights do not fit: " + "; ".join(lines), where=where, hint=hint)


def _write_imported(screen: Screen, staging: Path, step: int, tensors: dict[str, Any], extra: dict[str, Any]) -> str:
    from checkpointing.engine.interchange.importer import write_checkpoint

    # Attempt 0 precedes every attempt that trains, so the first of those inherits this checkpoint.
    name = Name(step=step, attempt=0, nonce=token_hex(4))
    world = {"ranks": 1, "imported": True}
    with screen.bar("importing") as meter:
        write_checkpoint(LocalStorage(staging), name, tensors, extra=extra, world=world, progress=meter)
    return str(staging / str(name))
