"""Import hook: run a function right after a program has imported a module, for example torch.

It looks at the name of each import and does nothing else until a watched one comes. Standard library, Python 3.9.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from typing import Any

FOLDER = os.path.dirname(os.path.abspath(__file__))

_watched: dict[str, list[Callable[[Any], None]]] = {}


def install() -> None:
    """Watch for torch, whose import starts everything else."""
    sys.meta_path.insert(0, _Finder())
    after_import("torch", lambda module: _load("torch_hooks").install(sys.modules[__name__]))


def after_import(name: str, act: Callable[[Any], None]) -> None:
    """Call `act` with the module once it has been imported, or now if it has been."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        _run(act, module)
    else:
        _watched.setdefault(name, []).append(act)


def load_file(name: str, path: str) -> Any:
    """Return the module in a file, loaded once per process under this name."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _load(name: str) -> Any:
    return load_file(f"orch_{name}", os.path.join(FOLDER, f"{name}.py"))


def _run(act: Callable[[Any], None], module: Any) -> None:
    try:
        act(module)
    except Exception as error:  # noqa: BLE001  # outermost edge: the program's import must succeed
        report(f"{type(error).__name__}: {error}")


def report(text: str) -> None:
    """Report an internal error in the progress cell, or on stderr if that fails."""
    with contextlib.suppress(Exception):  # outermost edge
        rank = _load("program_rank").current()
        if rank is not None:
            rank.report_error(text)
            return
    with contextlib.suppress(Exception):
        sys.stderr.write(f"orch: {text}\n")


class _Finder(MetaPathFinder):
    """Finds nothing itself; it wraps the loader that the other finders return for a watched module."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in _watched:
            return None
        acts = _watched.pop(fullname)
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find is not None and finder is not self else None
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader, acts)
                return spec
        _watched[fullname] = acts  # the program catches the ImportError, and may try again with another path
        return None


class _Loader(Loader):
    """Loader that calls functions after the real one has run the module."""

    def __init__(self, loader: Any, acts: list[Callable[[Any], None]]) -> None:
        self._loader, self._acts = loader, acts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        if getattr(module, "__spec__", None) is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        for act in self._acts:
            _run(act, module)
