"""Whether other users could put something in place of a run's folder, and what to type about it."""

import os
from pathlib import Path

from checkpointing.storage.trusted_path import NotPrivate, check_private, weakness
from orchestrator.config.run_config import RunConfig
from orchestrator.errors import Precondition


def refuse_shared(root: Path) -> None:
    """Raises Precondition for a folder of runs in which, or above which, others can rename what is there."""
    weak = weakness(root)
    if weak is None:
        return
    cure = f"{weak.closing()} closes it; " if weak.closing() else ""
    raise Precondition(
        f"{weak}, who could put a folder of theirs in place of a run's: its code would run as you",
        where=str(root),
        hint=f"{cure}cluster.shared_root=true uses it all the same and keeps each run private; "
        "cluster.root=FOLDER chooses another",
    )


def data_folder(root: Path, config: RunConfig) -> Path:
    """Where tokens of `data.text` lie: each user has an own folder below a shared root."""
    return root / (f".data-{os.geteuid()}" if config.cluster.shared_root else ".data")


def check_data(folder: Path, config: RunConfig) -> None:
    """Raises Precondition for tokens in a shared root that somebody else has prepared, or may change."""
    if not config.cluster.shared_root or not folder.exists():
        return
    try:
        check_private(folder)
    except NotPrivate as error:
        raise Precondition(
            f"the tokens of data.text are not yours alone: {error.strerror}",
            where=str(folder),
            hint="`orch data prepare PATHS --out FOLDER` makes tokens of your own; data.path=FOLDER uses them",
        ) from error
