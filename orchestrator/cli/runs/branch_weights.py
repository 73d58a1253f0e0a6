"""`orch submit --from RUN@STEP --weights-only`: a new run that begins at step 0 with the weights of a checkpoint."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from orchestrator.cli.access.registry import open_store
from orchestrator.cli.checkpoints.import_weights import bring, staged
from orchestrator.cli.checkpoints.kept_while_read import kept_while_read
from orchestrator.cli.checkpoints.target import Target, find_one
from orchestrator.cli.runs.branch import config_of, require_trusted
from orchestrator.cli.terminal.render import Screen, count
from orchestrator.config.compose import Composed, compose, recompose
from orchestrator.submission.create_run import check_beginning


@contextmanager
def branch_weights(
    screen: Screen, words: str, preset: str | None, overrides: tuple[str, ...], *, write: bool
) -> Iterator[tuple[Composed, dict[str, Any]]]:
    """The config of the new run, and what it begins with: a checkpoint that is there inside, if `write`.

    Only the model has to fit: optimizer, place in the data and generators are new. Raises NotFound, ConfigError,
    CheckpointInvalid, Precondition.
    """
    chosen = find_one(words, screen.warn)
    if preset:
        composed = compose(preset, overrides, environ=os.environ)
    else:
        composed = recompose(config_of(chosen, words), overrides)
    check_beginning(composed.config, words)
    with open_store() as store:
        require_trusted(screen, store, chosen)
    label = f"{chosen.run or chosen.path}@{chosen.step}"
    with staged(composed.config.cluster) if write else nullcontext() as staging:
        found = bring(
            screen, composed.config, staging, source=lambda: _weights(chosen), where=label, weights_only=True
        )  # fmt: skip
        for note in found["notes"]:
            screen.note(f"  {note}")
        screen.note(f"the weights of {label} fit: {count(found['tensors'])} tensors")
        yield composed, {key: found[key] for key in ("checkpoint", "source", "step", "optimizer")}


@contextmanager
def _weights(chosen: Target) -> Iterator[Any]:
    from checkpointing.engine.interchange.exporter import SealedCheckpoint  # torch
    from trainer.worker.interchange.checkpoint_export import weights_of

    with kept_while_read(chosen), SealedCheckpoint(chosen.storage, chosen.name) as sealed:
        yield weights_of(sealed, Path(chosen.path))
