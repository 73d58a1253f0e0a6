"""The login-node side: command line, registry, schedulers and controller."""

import os  # few and quick imports: Ctrl-C during them ends in a Python traceback
import sys
from importlib.machinery import ModuleSpec, PathFinder

_SISTERS = ("trainer", "checkpointing")
_BESIDE = [os.path.dirname(os.path.dirname(os.path.realpath(__file__)))]


class _Sisters:
    """Finder of orch's other packages beside this one, ahead of PYTHONPATH."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, _BESIDE) if name in _SISTERS else None


sys.meta_path.insert(0, _Sisters)
