"""Make a run's first checkpoint from imported weights, checked against the model and written beside the runs."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

from checkpointing.errors import CheckpointError
from checkpointing.format.commit import Name
from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.durable import temporary_folder
from checkpointing.storage.trusted_path import check_private
from orchestrator.cli.checkpoints import verify
from orchestrator.cli.terminal.render import Screen
from orchestrator.config.run_config import ClusterConfig
from orchestrator.errors import CheckpointInvalid, ConfigError

STAGING = ".imports"
"""Name, before the user's id, of the folder below `cluster.root` for a checkpoint whose run has no folder yet."""
SHOWN = 12
"""Maximum number of mismatches listed one by one."""


@contextmanager
def staging_folder(cluster: ClusterConfig) -> Iterator[Path]:
    """Yield a folder for the new checkpoint, until it moves into its run's folder."""
    from orchestrator.submission.create_run import writable_root

    place = writable_root(cluster.root, shared=cluster.shared_root) / f"{STAGING}-{os.geteuid()}"
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(place)
    with temporary_folder(place, "import", mode=0o700) as folder:
        yield folder


def bring(
    screen: Screen, config: Any, staging: Path | None, *,
    source: Callable[[], AbstractContextManager[Any]], where: str, weights_only: bool,
) -> dict[str, Any]:  # fmt: skip
    """Check that the weights of `source` fit the workload of `config`, and write the checkpoint to `staging`, if given.

    Returns a summary. Raises ConfigError if they do not fit or the user's code fails, CheckpointInvalid if unreadable.
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

    lines = [what for what, _ in complaints[:SHOWN]]
    lines += [f"and {len(complaints) - SHOWN} more"] if len(complaints) > SHOWN else []
    changes = " ".join(overrides(complaints))
    hint = f"add {changes}" if changes else "choose a configuration for the given model"
    return ConfigError("the weights do not fit: " + "; ".join(lines), where=where, hint=hint)


def _write_imported(screen: Screen, staging: Path, step: int, tensors: dict[str, Any], extra: dict[str, Any]) -> str:
    from checkpointing.engine.interchange.importer import write_checkpoint

    # Attempt 0: before any attempt that trains, so the first one inherits it.
    name = Name(step=step, attempt=0, nonce=token_hex(4))
    world = {"ranks": 1, "imported": True}
    with screen.bar("importing") as meter:
        write_checkpoint(LocalStorage(staging), name, tensors, extra=extra, world=world, progress=meter)
    return str(staging / str(name))
