"""The login-node side: command line, registry, schedulers and the controller."""

import os  # few imports and quick ones: Ctrl-C while they are read ends in Python's own words
import sys
from importlib.machinery import ModuleSpec, PathFinder

_SISTERS = ("trainer", "checkpointing")
_BESIDE = [os.path.dirname(os.path.dirname(os.path.realpath(__file__)))]


class _Sisters:
    """Finds orch's other packages beside this one; a folder of PYTHONPATH would come first otherwise."""

    @staticmethod
    def find_spec(name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, _BESIDE) if name in _SISTERS else None


sys.meta_path.insert(0, _Sisters)
