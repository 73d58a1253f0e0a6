"""Finder of the package `orch` for a program in whose environment orch is not installed.

It is the last finder, so a program's own modules win. Standard library, Python 3.9.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

PACKAGE, ITS_PACKAGES = "orch", ("trainer", "checkpointing")
"""The package, and those that it needs, which are found only after it."""
_ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))


class OrchFinder(MetaPathFinder):
    """Finds orch's packages beside the agent."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if path is None and (fullname == PACKAGE or (fullname in ITS_PACKAGES and PACKAGE in sys.modules)):
            return PathFinder.find_spec(fullname, [_ROOT])
        return None


def install() -> None:
    """Make `import orch` work in this program."""
    sys.meta_path.append(OrchFinder())
