"""Registry versions known to this program; a separate file, so that reading a version needs no alembic."""

from pathlib import Path

from orchestrator.errors import RegistryError

KNOWN = ("0005", "0006", "0007", "0008", "0009")
"""Revisions in `migrations/versions`, oldest first; a test compares this list with the folder."""

HEAD = KNOWN[-1]
"""Version of the tables that this program reads."""


def require_known(version: str | None, path: Path) -> None:
    """Raise RegistryError for a registry that this program can neither read nor upgrade; None means an empty one."""
    if version is None or version in KNOWN:
        return
    if version < KNOWN[0]:
        raise RegistryError(
            f"the registry has version {version or '?'}, which this orch can neither read nor upgrade "
            f"(it needs {HEAD})",
            where=str(path),
            hint="`orch db rebuild --root FOLDER-OF-RUNS` sets it aside and makes a new one from the run directories",
        )
    raise RegistryError(
        f"the registry has version {version}, which is newer than this orch knows (up to {HEAD})",
        where=str(path),
        hint="upgrade orch (pip install -U orch), or set ORCH_REGISTRY to another file",
    )


def require_head(version: str | None, path: Path) -> None:
    """Raise RegistryError for a registry that this program cannot read without an upgrade; None means an empty one."""
    require_known(version, path)
    if version not in (None, HEAD):
        raise RegistryError(
            f"the registry has the older version {version}, this orch reads {HEAD}",
            where=str(path),
            hint="`orch controller tick` upgrades it, after a backup",
        )
