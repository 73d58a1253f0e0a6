"""The login-node side: command line, registry, schedulers and controller."""

import os  # few, fast imports: Ctrl-C during them prints a Python traceback
import sys
from importlib.machinery import ModuleSpec, PathFinder

_SIBLINGS = ("trainer", "checkpointing")
_SEARCH_PATH = [os.path.dirname(os.path.dirname(os.path.realpath(__file__)))]


class _SiblingFinder:
    """Import finder for orch's sibling packages next to this one, ahead of PYTHONPATH."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, _SEARCH_PATH) if name in _SIBLINGS else None


sys.meta_path.insert(0, _SiblingFinder)
