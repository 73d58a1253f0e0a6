"""Modules of PYTHONPATH that stand in the place of those that orch needs."""

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_NEEDED = ("click", "yaml", "rich", "omegaconf", "sqlalchemy", "alembic", "ClusterShell", "setproctitle", "torch")
"""Of other projects; an installed one on PYTHONPATH is what somebody wants."""


def shadowed() -> tuple[str, Path] | None:
    """The first module that PYTHONPATH has instead of Python's own or an installed one, and its file."""
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    for name in (*sorted(sys.stdlib_module_names), *_NEEDED):
        spec = PathFinder.find_spec(name, folders) if folders else None
        if spec is not None and spec.origin and not _installed(name, Path(spec.origin)):
            return name, Path(spec.origin)
    return None


def _installed(name: str, file: Path) -> bool:
    """Whether an installer has put it there, or it is of a whole standard library."""
    folder = file.parent.parent if file.name == "__init__.py" else file.parent
    of_it = any(folder.glob(f"{name}-*.dist-info")) or any(folder.glob(f"{name}-*.egg-info"))
    return of_it or (folder / "site.py").exists() or folder.name in ("site-packages", "dist-packages")
