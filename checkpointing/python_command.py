"""Commands that run orch's modules in further processes."""

import sys
from pathlib import Path

_FOLDER = Path(__file__).resolve().parents[1]


def is_mounted() -> bool:
    """Return whether these packages are a copy that is mounted in a container."""
    return (_FOLDER / "__main__.py").is_file()


def module_command(module: str, python: str = "") -> list[str]:
    """Return the command that runs this module with `python`, or with this process's Python.

    In a mounted copy of orch's packages it names the folder, because only its `__main__.py` finds them.
    """
    python = python or sys.executable
    if is_mounted():
        return [python, str(_FOLDER), "-m", module]
    return [python, "-P", "-m", module]
