"""`orch submit`, up to the point where the controller takes over: everything is checked before anything is written."""

import math
import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import Any, NoReturn

from checkpointing.config import RUN
from orchestrator.config.compose import Composed
from orchestrator.config.run_config import RunConfig
from orchestrator.controller import failpoints
from orchestrator.controller.run_dirs import staged_secrets
from orchestrator.controller.run_dirs.run_folder import ensure_run_dir
from orchestrator.errors import ConfigError, Precondition
from orchestrator.interrupts import interrupts_held
from orchestrator.registry.operations.run_record import write_records
from orchestrator.registry.records import Attempt, NewRun, Run
from orchestrator.registry.store import Store
from orchestrator.scheduler.available_schedulers import instance_of
from orchestrator.submission import secret_values, user_code
from orchestrator.submission.job_check import check_script
from orchestrator.submission.root_check import check_data, data_folder, refuse_shared
from orchestrator.submission.run_identity import identify
from trainer.contract.config import WorkloadConfig
from trainer.contract.token_shards import INDEX_NAME, Index, TokensError, prepare_under
from trainer.contract.user_code.code_record import CodeRecord

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all while text is tokenized."""

BUILT_IN = WorkloadConfig().target


@dataclass(frozen=True, kw_only=True)
class RunOrigin:
    """Inputs of a new run besides its configuration."""

    imported: dict[str, Any] | None = None
    """The checkpoint that the run begins with."""
    code: CodeRecord | None = None
    """Record of the code, from importing the workload."""
    tags: tuple[str, ...] = ()


def create_run(
    store: Store,
    composed: Composed,
    *,
    cluster: str | None,
    now: float,
    progress: Progress | None = None,
    origin: RunOrigin | None = None,
    on_recorded: Callable[[Run], None] = lambda run: None,
) -> tuple[Run, Attempt]:
    """Check, prepare data, write the run and the intent of its first attempt, make its folder.

    `on_recorded` is called with the run as soon as it is in the registry; Ctrl-C never comes in between.

    A kill in between leaves nothing, or a run that the next pass of a controller finishes; a refusal after the row
    is there leaves a run that the next pass cancels.
    Raises ConfigError, SubmitRejected (of this machine), Precondition, RegistryError.
    """
    config, origin = composed.config, origin or RunOrigin()
    kind = _kind(cluster or config.cluster.kind)
    root = writable_root(config.cluster.root, shared=config.cluster.shared_root)
    user_code.check(config)
    check_script(config, kind)
    given = secret_values.submitted(composed, os.environ)
    data = given.data
    index = prepare_data(config, data, root, progress)
    recorded = {name: value for name, value in os.environ.items() if name not in config.env_from}
    seen = data_identity(data["data"]["path"], index) if index is not None else {}
    identity = identify(config, kind, data=seen, environ=recorded, imported=origin.code)
    identity |= {"host": socket.gethostname()} | ({} if origin.imported is None else {"imported": origin.imported})
    digest = store.put_config(data)
    new = NewRun(
        slug=config.name,
        cluster=kind,
        root=root,
        config_digest=digest,
        total_steps=0 if config.command else config.train.steps,
        identity=given.redacted(identity),
        scheduler=instance_of(kind)(),
        tags=origin.tags,
    )
    nonce = token_hex(4)
    with interrupts_held():
        with staged_secrets.staged(root, nonce, given.secrets):
            run, attempt = store.create_run(new, now=now, nonce=nonce)
        on_recorded(run)
    failpoints.reach("after_create")
    try:
        ensure_run_dir(run, attempt, data)
    except Precondition as error:
        staged_secrets.discard(root, nonce)
        _take_back(store, run, error, now)
    write_records(store, [run.name])  # a silent Slurm: nobody writes for hours that no job was submitted
    return run, attempt


def check_beginning(config: RunConfig, where: str) -> None:
    """Raises ConfigError for a run that could not begin with a checkpoint in its own folder."""
    if config.command:
        raise ConfigError(
            "a run of a torchrun script loads its weights itself", where=where, hint="give a workload, not a command"
        )
    tiers = [tier.path for tier in config.checkpoint.tiers]
    if tiers and RUN not in tiers:
        raise ConfigError(
            "checkpoint.tiers has no `run`: the run would not see the checkpoint that it is to begin with",
            where=where, hint="add a tier with path `run`",
        )  # fmt: skip


def _take_back(store: Store, run: Run, error: Precondition, now: float) -> NoReturn:
    """Nobody may launch later what was refused now: only a controller may say that a run is cancelled, so ask it."""
    store.add_user_request(run.name, "cancel", {"now": True}, now)
    hint = f"{error.hint}; then submit again ({run.name} will not be launched)"
    raise Precondition(error.what, where=error.where, hint=hint) from error


def _kind(wanted: str) -> str:
    from orchestrator.scheduler.available_schedulers import kinds, resolve

    kind = resolve(wanted)
    if kind not in kinds():
        raise Precondition(
            "there is no Slurm on this machine: sbatch is not found",
            where="PATH",
            hint="type it on a login node, load Slurm's module, or use --cluster local",
        )
    return kind


def writable_root(text: str, *, shared: bool) -> Path:
    """The folder of all runs, made when it is missing; raises Precondition when nothing can be written there.

    `shared`: others may write it as well; without that it is refused.
    """
    root = Path(text).expanduser().absolute()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as stream:
            stream.write(b"orch")
            stream.flush()
    except OSError as error:
        raise Precondition(
            f"the folder of runs cannot be written: {error.strerror or error}",
            where=str(root),
            hint="cluster.root=FOLDER chooses another; on a cluster it must be on the shared file system",
        ) from error
    if not shared:
        refuse_shared(root)
    return root


def prepare_data(config: RunConfig, data: dict[str, Any], root: Path, progress: Progress | None = None) -> Index | None:
    """Tokenize `data.text` below the root and fill `data.path` in; check what the run is going to read."""
    if config.data.text:
        folder, index = _tokenized(config, root, progress)
        data["data"]["path"] = str(folder)
    elif config.data.path:
        index = read_index(config.data.path)
    else:
        return None
    if not config.command and config.workload.target == BUILT_IN:
        _check_fit(config, index, data["data"]["path"])
    return index


def _tokenized(config: RunConfig, root: Path, progress: Progress | None) -> tuple[Path, Index]:
    place = data_folder(root, config)
    check_data(place, config)
    try:
        folder, index = prepare_under(config.data.text, place, progress)
    except TokensError as error:
        raise ConfigError(f"data.text: {error}", where="data.text", hint="files, folders, or python-stdlib") from error
    except OSError as error:
        raise Precondition(
            f"the tokens of data.text cannot be written: {error.strerror or error}",
            where=str(place),
            hint="make room, or choose another folder with cluster.root=FOLDER",
        ) from error
    for each in (place, folder):
        check_data(each, config)
    return folder, index


def read_index(path: str) -> Index:
    """Return the index of a folder of tokens; raises ConfigError, also for shards changed after it was written."""
    folder = Path(path).expanduser()
    try:
        index = Index.read(folder)
        changed = index.shards_changed_lately(folder)
    except TokensError as error:
        hint = "`orch data prepare PATHS --out DIR` makes such a folder"
        raise ConfigError(f"data.path: {error}", where=path, hint=hint) from error
    except OSError as error:
        raise ConfigError(f"data.path: a token shard cannot be read: {error}", where=path) from error
    if changed:
        raise ConfigError(
            f"data.path: {', '.join(changed)} changed after {INDEX_NAME} was written: not the data that it describes",
            where=path,
            hint="put the files back, or remove the folder and make it again: `orch data prepare PATHS --out DIR`",
        )
    return index


def _check_fit(config: RunConfig, index: Index, path: str) -> None:
    if index.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}, but the data has {index.vocab_size} kinds of tokens",
            where=path,
            hint=f"type model.vocab_size={index.vocab_size}",
        )
    if index.tokens <= config.train.seq_len:
        unit = math.lcm(config.parallel.tp, config.train.loss_chunks)
        longest = (index.tokens - 1) // unit * unit
        raise ConfigError(
            f"train.seq_len={config.train.seq_len}, but the data has only {index.tokens} tokens",
            where=path,
            hint=f"type train.seq_len={longest}, or give more text" if longest else "give more text",
        )
    batches = ((index.tokens - 1) // config.train.seq_len - 1) // config.train.batch_size
    if config.validation.batches > batches:
        raise ConfigError(
            f"validation.batches={config.validation.batches} holds out more than the data's {index.tokens} tokens",
            where=path,
            hint=f"type validation.batches={batches}, or give more text",
        )


def data_identity(path: str, index: Index) -> dict[str, Any]:
    """What a run remembers of its data."""
    return {"path": path, "fingerprint": index.fingerprint, "tokens": index.tokens, "shards": len(index.shards)}
