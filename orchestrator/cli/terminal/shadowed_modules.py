"""Modules on PYTHONPATH that shadow modules needed by orch."""

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_NEEDED = ("click", "yaml", "rich", "omegaconf", "sqlalchemy", "alembic", "ClusterShell", "setproctitle", "torch")
"""Third-party modules; an installed one on PYTHONPATH is taken to be intended."""


def find_shadowed_module() -> tuple[str, Path] | None:
    """Return the first module on PYTHONPATH that shadows Python's own or an installed one, and its file."""
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    for name in (*sorted(sys.stdlib_module_names), *_NEEDED):
        spec = PathFinder.find_spec(name, folders) if folders else None
        if spec is not None and spec.origin and not _is_installed(name, Path(spec.origin)):
            return name, Path(spec.origin)
    return None


def _is_installed(name: str, file: Path) -> bool:
    """Return whether the module was put there by an installer, or belongs to a whole standard library."""
    folder = file.parent.parent if file.name == "__init__.py" else file.parent
    of_it = any(folder.glob(f"{name}-*.dist-info")) or any(folder.glob(f"{name}-*.egg-info"))
    return of_it or (folder / "site.py").exists() or folder.name in ("site-packages", "dist-packages")
