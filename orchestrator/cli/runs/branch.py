"""`orch submit --from RUN@STEP`: a new run that begins with another run's checkpoint, its optimizer and its place in
the data.
"""

import os
from pathlib import Path
from typing import Any

from checkpointing.format.commit import parse_name
from checkpointing.storage.durable import read_json
from orchestrator.cli.checkpoints.target import Target, find_one
from orchestrator.cli.terminal.render import Screen
from orchestrator.config.compose import Composed, compose, recompose
from orchestrator.errors import CheckpointInvalid, ConfigError, Precondition
from orchestrator.registry.store import Store
from orchestrator.states import Trust
from orchestrator.submission.resume_contract import Rule, config_changes

OWN_FOLDER = ("name", "cluster.kind", "cluster.root", "workload.snapshot")
"""Keys that a run which goes on cannot change, and a new one may: it has a folder of its own."""


def branch(
    screen: Screen, store: Store, words: str, preset: str | None, overrides: tuple[str, ...]
) -> tuple[Composed, dict[str, Any]]:
    """The config of the new run, which is the other run's where no `preset` is named, and what it begins with.

    Raises NotFound, ConfigError, CheckpointInvalid, and Precondition where the checkpoint does not fit.
    """
    chosen = find_one(words, screen.warn)
    before = _config(chosen, words)
    _require_sound(store, chosen)
    composed = compose(preset, overrides, environ=os.environ) if preset else recompose(before, overrides)
    if composed.config.command:
        raise ConfigError("a run of a torchrun script loads its checkpoints itself", where=words)
    now = composed.data
    if now["data"]["text"] == before["data"]["text"] and not now["data"]["path"]:  # the same text gives the same tokens
        now = {**now, "data": {**now["data"], "path": before["data"]["path"]}}
    for change in config_changes(before, now):
        if change.term.rule is Rule.REFUSED and change.key not in OWN_FOLDER:
            raise Precondition(
                f"{change.key} cannot differ from the checkpoint's run: {change.term.why.partition(';')[0]}",
                where=f"{change.key}: {change.before} -> {change.now}",
                hint=f"leave it as it was, or begin without --from {words}",
            )
    source = f"{chosen.run or chosen.path}@{chosen.step}"
    return composed, {"checkpoint": chosen.path, "source": source, "step": chosen.step, "optimizer": True}


def _config(chosen: Target, words: str) -> dict[str, Any]:
    """The config that the checkpoint was saved with."""
    parts = parse_name(chosen.name)
    if chosen.run_dir is None or parts is None or not chosen.shared or not Path(chosen.path).is_dir():
        hint = "copy it into a shared folder, or bring it out and in with orch ckpt export and import"
        raise Precondition("this checkpoint is not in a run's folder that is visible here", where=words, hint=hint)
    config = read_json(chosen.run_dir.config_of(parts.attempt))
    assert isinstance(config, dict)
    return config


def _require_sound(store: Store, chosen: Target) -> None:
    known = store.checkpoints(chosen.run) if chosen.run else []
    if any(row.name == chosen.name and row.trust is Trust.CORRUPT for row in known):
        raise CheckpointInvalid(f"{chosen.name} is CORRUPT", where=chosen.path, hint=f"orch ckpt ls {chosen.run}")
