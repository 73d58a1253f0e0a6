"""Errors caused by missing torch or orch files, for example while an environment is rebuilt."""

import sys
import traceback
from pathlib import Path

_ROOT = Path(__file__).parents[3]
_ORCH = ("checkpointing", "orchestrator", "trainer")


def describe_missing(error: BaseException) -> str:
    """Return a message suffix that names the folders if files are missing, or "" for other errors."""
    found = isinstance(error, ImportError) and _is_of_installation(error)
    found = found or (isinstance(error, FileNotFoundError) and _find_package(error.filename) != "")
    return f"; part of the installation is missing (environment {sys.prefix}, orch in {_ROOT})" if found else ""


def _is_of_installation(error: ImportError) -> bool:
    """Return whether orch could not import a required module, or torch could not import part of itself."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    files = [frame.f_code.co_filename for frame in frames]
    importers = [name for name in files if not name.startswith("<frozen importlib") and "/importlib/" not in name]
    importer = _find_package(importers[-1]) if importers else ""
    return importer in _ORCH or (importer == "torch" and (error.name or "").partition(".")[0] == "torch")


def _find_package(file: object) -> str:
    """Return `torch` or the orch package that contains this file, or "" if neither does."""
    if not isinstance(file, str):
        return ""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    folders = {name: _ROOT / name for name in _ORCH} | ({"torch": Path(torch).parent} if torch else {})
    return next((name for name, folder in folders.items() if Path(file).is_relative_to(folder)), "")
