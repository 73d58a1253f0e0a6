"""The part of `orch submit` before the controller takes over. All checks precede the first write."""

import math
import os
import shlex
import socket
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any, NoReturn

from checkpointing.config import RUN
from checkpointing.storage.storage_errors import disk_words
from checkpointing.storage.trusted_path import NotPrivate, check_private, user_name, weakness
from checkpointing.tiers.tier import HINT, ResolvedTier, one_folder, resolve_tier
from orchestrator import failpoints
from orchestrator.config.compose import Composed
from orchestrator.config.run_config import RunConfig
from orchestrator.errors import ConfigError, Precondition, Retryable, SlurmUnreachable, SubmitRejected
from orchestrator.interrupts import interrupts_held
from orchestrator.registry.records import Attempt, NewRun, Run
from orchestrator.registry.run_record import write_records
from orchestrator.registry.store import Store
from orchestrator.run_dirs import staged_secrets
from orchestrator.run_dirs.job_spec import job_spec
from orchestrator.run_dirs.run_folder import check_readable_code, ensure_run_dir, refuse_within_run
from orchestrator.scheduler.available_schedulers import FACTORIES, make_instance
from orchestrator.scheduler.interface import JobSpec
from orchestrator.states import AttemptState, RunState
from orchestrator.submission import secret_values, user_code
from orchestrator.submission.run_identity import identify
from orchestrator.submission.stage_digest import fill_stage_digest
from orchestrator.submission.user_code import BoundedChild, ChildAnswer, job_environment
from orchestrator.tokenization.shard_writer import prepare_under
from orchestrator.tokenization.tokenizers import load_tokenizer
from trainer.protocol.config import WorkloadConfig
from trainer.protocol.run_dir import RunDir
from trainer.protocol.token_shards import INDEX_NAME, TokenIndex, TokensError
from trainer.protocol.user_code.code_record import CodeRecord


def refuse_shared(root: Path) -> None:
    """Raise Precondition if other users can rename the contents of the root folder or of a folder above it."""
    weak = weakness(root)
    if weak is None:
        return
    cure = f"{weak.closing()} closes it; " if weak.closing() else ""
    raise Precondition(
        f"{weak}, who could replace a run's folder: their code would run as you",
        where=str(root),
        hint=f"{cure}cluster.shared_root=true uses it anyway and keeps each run private; "
        "cluster.root=FOLDER chooses another",
    )


def check_data(folder: Path) -> None:
    """Raise Precondition for tokens that another user has prepared or can change."""
    if not folder.exists():
        return
    try:
        check_private(folder)
    except NotPrivate as error:
        raise Precondition(
            f"other users can change the tokens of data.text: {error.strerror}",
            where=str(folder),
            hint="`orch data prepare PATHS --out FOLDER` creates private tokens; data.path=FOLDER uses them",
        ) from error


ANSWER_WITHIN = 30.0
"""Time limit, in seconds, for all tiers together."""
_MODULE = "checkpointing.tiers.tier"

Finish = Callable[[Callable[[str], None]], None]


@contextmanager
def checking_tiers(config: RunConfig, environ: Mapping[str, str]) -> Iterator[Finish]:
    """Try the tiers in a child process that ends with this block.

    The yielded function waits for the answer, and raises Precondition if a tier cannot be used.
    """
    urls = [tier.path for tier in config.checkpoint.tiers if "://" in tier.path]
    _check_folders(config)
    if not urls or config.command:
        yield lambda note: None
        return
    what = f"waiting for {' and '.join(urls)}, to see whether checkpoints can be written there"
    with BoundedChild(_MODULE, {"tiers": urls}, job_environment(config, environ), what) as child:
        yield lambda note: _judge(child.answer(ANSWER_WITHIN, note))


def _judge(answer: ChildAnswer) -> None:
    tier = str(answer.found.get("trying", "its first tier"))
    if refused := answer.found.get("refused"):
        tier, reason, hint = refused
        raise _unusable(tier, reason, hint)
    if not answer.ended:
        late = f"no answer within {ANSWER_WITHIN:.0f} s"
        raise _unusable(tier, answer.died or late, HINT)


def _check_folders(config: RunConfig) -> None:
    """Raise Precondition for a shared folder that cannot be created; node-local folders may exist only on nodes."""
    for tier in config.checkpoint.tiers:
        if tier.path == RUN or "://" in tier.path or not tier.shared or config.command:
            continue
        folder = Path(tier.path).expanduser()
        if not folder.is_absolute():  # below the run's folder, which does not exist yet
            continue
        there = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
        if not there.is_dir():
            raise _unusable(tier.path, f"{there} is not a folder", "use a folder, or omit the tier")
        if not os.access(there, os.W_OK | os.X_OK, effective_ids=True):
            raise _unusable(tier.path, f"{there} is not writable", "use a folder of your own, or set `shared: false`")


def check_tier_folders(config: RunConfig, folder: RunDir, known: Collection[str] = ()) -> None:
    """Raise ConfigError for shared tiers that use the same folder, are inside another run's, or are another user's.

    Tiers with a path in `known` were accepted before; their folders are not checked.
    """
    local = [tier for tier in config.checkpoint.tiers if tier.shared and "://" not in tier.path and not config.command]
    places = [resolve_tier(tier, folder.checkpoints, folder.name, "this-machine") for tier in local]
    refuse_one_folder(places)
    for tier, place in zip(local, places, strict=True):
        if tier.path in (RUN, *known):
            continue
        refuse_within_run(Path(place.path).resolve(), "checkpoint.tiers", folder.path.resolve())
        if why := _foreign_folder(Path(place.path)):
            raise ConfigError(
                f"{place.path} {why}: {folder.name} cannot keep checkpoints there",
                where="checkpoint.tiers",
                hint="give the tier another path" if known else "set name=OTHER, or give the tier another path",
            )


def refuse_one_folder(places: Sequence[ResolvedTier]) -> None:
    """Raise ConfigError if a link or mount puts two tiers in one folder, where the smaller `keep` would win."""
    if found := one_folder(places):
        raise ConfigError(
            f"two tiers have the same folder: {found[0]} and {found[1]}",
            where="checkpoint.tiers",
            hint="omit one of them",
        )


def _foreign_folder(folder: Path) -> str:
    """Return why a run cannot use its folder in a tier, or "" if it can or the folder does not exist."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if found.st_uid != os.geteuid():
        return f"already exists and belongs to {user_name(found.st_uid)}"
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        return "already exists, but you cannot read and write it"
    return ""


def _unusable(tier: str, reason: str, hint: str) -> Precondition:
    return Precondition(f"checkpoint.tiers: {tier} cannot be used: {reason}", where="nothing was submitted", hint=hint)


Warn = Callable[[str], None]
"""Callback for Slurm's objections to a job that it may still accept."""


_BY_NODES = "node configuration is not available"


def first_job(config: RunConfig, kind: str, name: str = "") -> JobSpec:
    """Return the job for a first attempt, with placeholders for its number and nonce."""
    name = name or f"{config.name}-N"
    root = Path(config.cluster.root).expanduser().absolute()
    run = Run(
        name=name, state=RunState.CREATED, reason="", cluster=kind, run_dir=str(root / name), config_digest="",
        total_steps=0 if config.command else config.train.steps,
    )  # fmt: skip
    attempt = Attempt(run=name, number=1, state=AttemptState.INTENT, nonce="0" * 8, job_name=f"orch-{name}-1-00000000")
    return job_spec(run, attempt, config)


def check_script(config: RunConfig, kind: str) -> None:
    """Raise ConfigError for a job whose script cannot be written, or SubmitRejected if this machine cannot run it."""
    FACTORIES[kind].check(first_job(config, kind))


def check_with_scheduler(config: RunConfig, kind: str, warn: Warn) -> None:
    """Raise SubmitRejected, with the scheduler's message and a remedy, for a job it would never accept or start.

    A missing answer is not a refusal. Refusals that are temporary, or explained by nodes being down, go to `warn`.
    """
    from orchestrator.scheduler.slurm.node_capacity import known_nodes, shortfall

    spec, refusal = first_job(config, kind), FACTORIES[kind].refusal
    refused = refusal(spec) if refusal is not None else None
    if refused is None:
        return
    passes = refused.retryable is Retryable.YES
    if not passes and _BY_NODES in refused.what.lower():
        # sbatch accepts such a job if its nodes are only down, or if the site lets jobs wait forever.
        passes = True
        with suppress(SlurmUnreachable):
            passes = shortfall(spec.resources, known_nodes()) is None
    if passes:
        warn(f"{refused.what}; it is submitted anyway, and may have to wait")
        return
    hints = [refused.hint, f"type {refused.change}" if refused.change else ""]
    raise SubmitRejected(refused.what, where="nothing was submitted", hint=": ".join(filter(None, hints)))


Progress = Callable[[int, int], None]
"""Callback with bytes tokenized and total bytes."""

BUILT_IN = WorkloadConfig().target


@dataclass(frozen=True, kw_only=True)
class RunOrigin:
    """Inputs of a new run in addition to its configuration."""

    imported: dict[str, Any] | None = None
    """Checkpoint that the run starts from."""
    code: CodeRecord | None = None
    """Code record obtained by importing the workload."""
    tags: tuple[str, ...] = ()
    predecessor: str = ""
    """Run after whose success the run starts."""
    predecessor_created_at: float = 0.0
    """As in `Run`."""
    sweep: dict[str, Any] = field(default_factory=dict)
    """`SweepMember` as JSON."""
    priority: int = 0
    """Rank among the user's own waiting runs."""


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
    """Check the config, prepare the data, record the run and its first attempt's intent, and create its folder.

    `on_recorded` is called with the run as soon as it is in the registry; until then Ctrl-C is delayed.

    If this process is killed, there is no run, or one that the next controller pass finishes. An error after the row
    is written leaves a run that the next pass cancels. Raises ConfigError, SubmitRejected (by this machine),
    Precondition, RegistryError.
    """
    config, origin = composed.config, origin or RunOrigin()
    kind = _kind(cluster or config.cluster.kind)
    refuse_within_run(Path(config.cluster.root).expanduser().resolve(), "cluster.root")
    root = writable_root(config.cluster.root, shared=config.cluster.shared_root)
    user_code.check(config)
    if config.workload.snapshot:
        check_readable_code(Path(place).expanduser() for place in config.workload.path)
    check_script(config, kind)
    check_tier_folders(config, RunDir(root / store.free_name(config.name, root)))
    given = secret_values.separate_secrets(composed, os.environ)
    data = given.data
    fill_stage_digest(data)
    index = prepare_data(config, data, root, progress)
    recorded = {name: value for name, value in os.environ.items() if name not in config.env_from}
    seen = data_identity(data["data"]["path"], index) if index is not None else {}
    identity = identify(config, kind, data=seen, environ=recorded, imported=origin.code)
    identity |= {"host": socket.gethostname()} | ({} if origin.imported is None else {"imported": origin.imported})
    identity |= {"priority": origin.priority} if origin.priority else {}
    digest = store.put_config(data)
    new = NewRun(
        slug=config.name, cluster=kind, root=root, config_digest=digest,
        total_steps=0 if config.command else config.train.steps, identity=given.redact(identity),
        scheduler=make_instance(kind)(), tags=origin.tags, predecessor=origin.predecessor,
        predecessor_created_at=origin.predecessor_created_at, sweep=origin.sweep,
    )  # fmt: skip
    nonce = token_hex(4)
    with interrupts_held():
        with staged_secrets.stage_secrets(root, nonce, given.secrets):
            run, attempt = store.create_run(new, now=now, nonce=nonce)
        on_recorded(run)
    failpoints.reach("after_create")
    try:
        ensure_run_dir(run, attempt, data)
    except Precondition as error:
        staged_secrets.discard(root, nonce)
        _take_back(store, run, error, now)
    write_records(store, [run.name])  # if Slurm does not answer, the next write may be hours away
    return run, attempt


def check_beginning(config: RunConfig, where: str) -> None:
    """Raise ConfigError if the run cannot start from a checkpoint in its own folder."""
    if config.command:
        raise ConfigError("a torchrun script loads its own weights", where=where, hint="give a workload, not a command")
    tiers = [tier.path for tier in config.checkpoint.tiers]
    if tiers and RUN not in tiers:
        raise ConfigError(
            "checkpoint.tiers has no `run`: the run would not find its initial checkpoint",
            where=where, hint="add a tier with path `run`",
        )  # fmt: skip


def _take_back(store: Store, run: Run, error: Precondition, now: float) -> NoReturn:
    """Request cancellation of a refused run, so that it is not launched later; only a controller may cancel a run."""
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
            hint="run it on a login node, load Slurm's module, or use --cluster local",
        )
    return kind


def writable_root(text: str, *, shared: bool) -> Path:
    """Return the folder of all runs, created if missing. Raises Precondition if it is not writable.

    If `shared`, accept a folder that other users can write to.
    """
    root = Path(text).expanduser().absolute()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=root) as stream:
            stream.write(b"orch")
            stream.flush()
    except OSError as error:
        raise Precondition(
            f"the folder for runs is not writable: {error.strerror or error}",
            where=str(root),
            hint="cluster.root=FOLDER chooses another; on a cluster it must be on the shared file system",
        ) from error
    if not shared:
        refuse_shared(root)
    return root


def prepare_data(
    config: RunConfig, data: dict[str, Any], root: Path, progress: Progress | None = None
) -> TokenIndex | None:
    """Tokenize `data.text` below the root and set `data.path`, then check the data that the run will read."""
    if config.data.text:
        folder, index = _tokenize_text(config, root, progress)
        data["data"]["path"] = str(folder)
    elif config.data.path:
        index = read_index(config.data.path)
    else:
        return None
    if not config.command and config.workload.target == BUILT_IN:
        _check_fit(config, index, data["data"]["path"])
    return index


def _tokenize_text(config: RunConfig, root: Path, progress: Progress | None) -> tuple[Path, TokenIndex]:
    place = root / f".data-{os.geteuid()}"  # other users may have their own in the same root
    check_data(place)
    try:
        tokenizer = load_tokenizer(config.data.tokenizer)
        folder, index = prepare_under(config.data.text, place, progress, tokenizer=tokenizer)
    except TokensError as error:
        raise ConfigError(f"data.text: {error}", where="data.text", hint="files, folders, or python-stdlib") from error
    except OSError as error:
        cure = "make room" if disk_words(error.errno) else f"`chmod u+rwX {shlex.quote(str(place))}`"
        raise Precondition(
            f"the tokens of data.text cannot be written: {error.strerror or error}",
            where=str(place),
            hint=f"{cure}, or choose another folder with cluster.root=FOLDER",
        ) from error
    for each in (place, folder):
        check_data(each)
    return folder, index


def read_index(path: str) -> TokenIndex:
    """Return a token folder's index. Raises ConfigError if it is unreadable or a shard changed after it was written."""
    folder = Path(path).expanduser()
    try:
        index = TokenIndex.read(folder)
        changed = index.shards_changed_lately(folder)
    except TokensError as error:
        hint = "`orch data prepare PATHS --out DIR` creates such a folder"
        raise ConfigError(f"data.path: {error}", where=path, hint=hint) from error
    except OSError as error:
        raise ConfigError(f"data.path: a token shard cannot be read: {error}", where=path) from error
    if changed:
        raise ConfigError(
            f"data.path: {', '.join(changed)} changed after {INDEX_NAME} was written",
            where=path,
            hint="put the files back, or remove the folder and create it again: `orch data prepare PATHS --out DIR`",
        )
    return index


def _check_fit(config: RunConfig, index: TokenIndex, path: str) -> None:
    if index.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size}, but the data's vocabulary has {index.vocab_size} tokens",
            where=path,
            hint=f"set model.vocab_size={index.vocab_size}",
        )
    if index.tokens <= config.train.seq_len:
        unit = math.lcm(config.parallel.tp, config.train.loss_chunks)
        longest = (index.tokens - 1) // unit * unit
        raise ConfigError(
            f"train.seq_len={config.train.seq_len}, but the data has only {index.tokens} tokens",
            where=path,
            hint=f"set train.seq_len={longest}, or provide more text" if longest else "provide more text",
        )
    batches = ((index.tokens - 1) // config.train.seq_len - 1) // config.train.batch_size
    if config.validation.batches > batches:
        raise ConfigError(
            f"validation.batches={config.validation.batches} holds out more than the data's {index.tokens} tokens",
            where=path,
            hint=f"set validation.batches={batches}, or provide more text",
        )


def data_identity(path: str, index: TokenIndex) -> dict[str, Any]:
    """Return a run identity's entry for the data."""
    return {"path": path, "fingerprint": index.fingerprint, "tokens": index.tokens, "shards": len(index.shards)}
