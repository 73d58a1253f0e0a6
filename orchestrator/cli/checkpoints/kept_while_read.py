"""A pin on a checkpoint while a command reads it: a live run may delete a checkpoint at any moment."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from orchestrator.cli.checkpoints.target import WAYS, Target
from orchestrator.errors import NotFound

NOTE = "being read by orch, process"


@contextmanager
def kept_while_read(*targets: Target) -> Iterator[None]:
    """Pin these checkpoints within the block, unless they are pinned already.

    Raises NotFound for a checkpoint that was deleted before the pin was written. A read-only folder is read without a
    pin; a checkpoint deleted meanwhile raises NotFound, too.
    """
    from checkpointing.errors import CheckpointError

    pinned = [target for target in targets if _pin(target)]
    try:
        require_there(*(target for target in targets if target.run is not None))
        yield
    except (CheckpointError, FileNotFoundError):
        require_there(*(target for target in targets if target.run is not None))
        raise
    finally:
        for target in pinned:
            _unpin(target)


def require_there(*targets: Target) -> None:
    """Raise NotFound for a checkpoint that does not exist any more."""
    from checkpointing.tiers.catalog import Catalog

    for target in targets:
        if not Catalog(target.path.rpartition("/")[0], target.storage).is_committed(target.name):
            looks = f"`orch ckpt ls {target.run}` lists what is left; `orch ckpt pin` keeps one" if target.run else WAYS
            raise NotFound(f"{target.name} is not there any more: it is being deleted", where=target.path, hint=looks)


def _pin(target: Target) -> bool:
    """Write a pin unless the checkpoint has one; return whether it was written."""
    from checkpointing.retention import garbage
    from checkpointing.storage.backends import LocalStorage

    if target.run is None or target.run_dir is None:
        return False
    with suppress(OSError):
        storage = LocalStorage(target.run_dir.checkpoints)
        if target.name not in garbage.pinned_names(storage):
            garbage.pin(storage, target.name, f"{NOTE} {os.getpid()} on {os.uname().nodename}", time.time())
            return True
    return False


def _unpin(target: Target) -> None:
    from checkpointing.retention import garbage
    from checkpointing.storage.backends import LocalStorage

    assert target.run_dir is not None
    with suppress(OSError):
        garbage.unpin(LocalStorage(target.run_dir.checkpoints), target.name)
