"""Place of a program's checkpoints: the run's folder, or without orch's agent a folder that the program names."""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

from checkpointing.config import CheckpointConfig
from checkpointing.engine.collectives.group import Failed, RankGroup
from checkpointing.engine.restore.restorer import RestoreOptions
from checkpointing.event_sink import EmitEvent
from checkpointing.format.commit import parse_name
from checkpointing.storage.backends import open_storage
from checkpointing.tiers.catalog import Catalog, Owner
from checkpointing.tiers.tier import RunTiers, resolve_tiers
from trainer.protocol.config import config_digest
from trainer.protocol.events import EventKind
from trainer.protocol.launch_token import LaunchToken, holds
from trainer.protocol.messages.ranks import RankSpec
from trainer.protocol.run_dir import RunDir
from trainer.worker.reporting.metrics import Journal
from trainer.worker.reporting.stderr_best_effort import write_stderr
from trainer.worker.workload import WorkloadError

RUN_DIR, ATTEMPT, GENERATION, NODE = "ORCH_RUN_DIR", "ORCH_ATTEMPT", "ORCH_GENERATION", "ORCH_NODE_NAME"
_REPORTED = tuple(f"checkpoint.{what}" for what in ("failed", "refused", "skipped", "retried", "doubted"))
"""Kinds of events that a program without orch's agent prints."""
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_.-]")


def _no_interval(steps: int, seconds: float, reason: str) -> None:
    """Discard a new interval between saves."""


def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class CheckpointPlace:
    """The checkpoints' owner and tiers, and the receivers of events."""

    owner: Owner
    tiers: RunTiers
    on_event: EmitEvent
    warn: Callable[[int, str], None]
    options: RestoreOptions = field(default_factory=RestoreOptions)
    config_digest: str = ""
    mtbf: float = 0.0
    on_interval: Callable[[int, float, str], None] = _no_interval
    close: Callable[[], None] = _nothing


def find_place(
    folder: str | os.PathLike[str] | None, config: CheckpointConfig, group: RankGroup, environ: Mapping[str, str]
) -> CheckpointPlace:
    """Return the place of this process's checkpoints. Collective. Raises WorkloadError without run and folder."""
    if environ.get(RUN_DIR) and environ.get(ATTEMPT, "").isdigit():
        return _place_in_run(RunDir(Path(environ[RUN_DIR])), config, group, environ)
    if folder is None:
        raise WorkloadError("orch.checkpointer: orch has not started this program: give a folder=... for checkpoints")
    return _place_in_folder(Path(folder).absolute(), config, group)


def _place_in_run(
    run: RunDir, config: CheckpointConfig, group: RankGroup, environ: Mapping[str, str]
) -> CheckpointPlace:
    number = int(environ[ATTEMPT])
    go = run.attempt(number).go
    token = LaunchToken.read(go)
    spec, inherit = _spec(run, number, group, environ), (*token.checkpoints, *token.perhaps)
    journal = Journal(run.attempt(number), spec)

    def warn(step: int, reason: str) -> None:
        if group.leads:
            journal.event(EventKind.CHECKPOINT_INCOMPLETE, step=step, reason=reason)

    return CheckpointPlace(
        owner=Owner(token.attempt, token.nonce, inherit, lambda: holds(go, token), token.over),
        tiers=RunTiers(resolve_tiers(config, run.checkpoints, run.name, spec.node_name), open_storage(run.checkpoints)),
        on_event=journal.checkpoint,
        warn=warn,
        options=RestoreOptions(optional_names=token.perhaps, corrupt=token.corrupt),
        config_digest=config_digest(run.attempt_config(number)),
        mtbf=token.mtbf,
        on_interval=journal.save_interval,
        close=journal.close,
    )  # fmt: skip


def _spec(run: RunDir, attempt: int, group: RankGroup, environ: Mapping[str, str]) -> RankSpec:
    """Return the description of this rank for its records."""

    def number(name: str, default: int) -> int:
        return int(environ.get(name, "") or default)

    return RankSpec(
        run_dir=str(run.path), attempt=attempt, generation=number(GENERATION, 1), rank=group.rank,
        local_rank=number("LOCAL_RANK", 0), world_size=group.size, local_world_size=number("LOCAL_WORLD_SIZE", 1),
        node=number("GROUP_RANK", 0), node_name=_NOT_IN_NAMES.sub("-", environ.get(NODE) or os.uname().nodename),
        cell_fd=-1, control_fd=-1, host="",
    )  # fmt: skip


def _place_in_folder(folder: Path, config: CheckpointConfig, group: RankGroup) -> CheckpointPlace:
    tiers = RunTiers.single(folder, keep=config.keep)
    found = group.from_leader(lambda: _next_owner(folder, tiers.tiers[0].catalog))
    if isinstance(found, Failed):
        raise WorkloadError(f"orch.checkpointer: {folder} cannot be used: {found.reason}")
    attempt, nonce, names, ended = found

    def report(kind: str, data: dict[str, Any]) -> None:
        if kind in _REPORTED:
            write_stderr(f"orch: {kind.replace('.', ' ')}: step {data.get('step')}: {data.get('reason')}")

    def warn(step: int, reason: str) -> None:
        if group.leads:
            write_stderr(f"orch: step {step}: {reason}")

    owner = Owner(attempt, nonce, tuple(names), lambda: True, tuple(ended))
    return CheckpointPlace(owner=owner, tiers=tiers, on_event=report, warn=warn)


def _next_owner(folder: Path, catalog: Catalog) -> list[Any]:
    """Return a new attempt number and nonce, the checkpoints in the folder, and the attempts that wrote there."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [found for name in catalog.names() if (found := parse_name(name)) is not None]
    names = [entry.name for entry in catalog.committed_entries()]
    ended = sorted({f"{one.attempt:03d}-{one.nonce}" for one in parts})
    return [max((one.attempt for one in parts), default=0) + 1, token_hex(4), names, ended]
