"""Secrets of a run before its folder exists: a private file that the creator of the folder moves into it.

The file is written before the run is in the registry, so that a controller has the values even if it is faster than
the submitter or completes a dead submitter's work. The file is never copied.
"""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from orchestrator.errors import Precondition
from trainer.protocol.run_dir import RunDir
from trainer.protocol.secrets.run_secrets import RunSecrets, SecretsRefused, export_command

_BEGINNING, _END = ".secrets-", ".json"
_ABANDONED = 86400.0  # seconds after which a file counts as abandoned by a killed submitter


def _staging_path(root: Path, nonce: str) -> Path:
    return root / f"{_BEGINNING}{nonce}{_END}"


@contextmanager
def stage_secrets(root: Path, nonce: str, secrets: RunSecrets) -> Iterator[None]:
    """Stage the secrets of the run that the block records; delete them if the block fails. Raises Precondition."""
    if not secrets:
        yield
        return
    _sweep(root)
    path = _staging_path(root, nonce)
    try:
        secrets.create(path)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise Precondition(
            f"cannot write the run's secrets: {error.strerror or error}", where=str(root),
            hint="make room, or choose another folder with cluster.root=FOLDER",
        ) from error  # fmt: skip
    recorded = False
    try:
        yield
        recorded = True
    finally:
        if not recorded:
            discard(root, nonce)


def discard(root: Path, nonce: str) -> None:
    """Delete the staged secrets, if any."""
    _staging_path(root, nonce).unlink(missing_ok=True)


def adopt(folder: RunDir, nonce: str) -> None:
    """Move the secrets staged for this run into its folder; repeatable."""
    with suppress(FileNotFoundError):
        os.rename(_staging_path(folder.path.parent, nonce), folder.secrets)


def copy_to_test(order: Mapping[str, Any], names: Sequence[str], target: RunDir) -> None:
    """Copy the tested run's secrets into a restore test's folder. Raises Precondition or OSError."""
    if names:
        values = require(RunDir(Path(order["run_dir"])), names).values
        RunSecrets(values={name: values[name] for name in names}).create(target.secrets)


def require(folder: RunDir, names: Sequence[str]) -> RunSecrets:
    """Return the run's secrets. Raises Precondition if one of these names has no value."""
    try:
        found = RunSecrets.read(folder.secrets) if names else RunSecrets()
    except SecretsRefused as refused:
        raise Precondition(refused.what, hint=refused.hint) from refused
    if missing := [name for name in names if name not in found.values]:
        raise Precondition(
            f"{folder.secrets} has no value for {', '.join(missing)}", hint=f"type {export_command(missing)}"
        )
    return found


def _sweep(root: Path) -> None:
    for path in root.glob(f"{_BEGINNING}*{_END}"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > _ABANDONED:
                path.unlink()
