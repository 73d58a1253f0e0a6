"""Import hook: run a function right after a program has imported a module, for example torch.

It looks at the name of each import and does nothing else until a watched one comes. Standard library, Python 3.9.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from typing import Any, TypeVar, cast

FOLDER = os.path.dirname(os.path.abspath(__file__))
Function = TypeVar("Function", bound=Callable[..., Any])

_watched: dict[str, list[Callable[[Any], None]]] = {}


def install() -> None:
    """Watch for torch, whose import starts everything else."""
    sys.meta_path.insert(0, _Finder())
    after_import("torch", lambda _: load("torch_hooks").install(sys.modules[__name__]))


def after_import(name: str, act: Callable[[Any], None]) -> None:
    """Call `act` with the module once it has been imported, or now if it has been."""
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        guard(act)(module)
    else:
        _watched.setdefault(name, []).append(act)


def load(name: str) -> Any:
    """Return a module of this folder, loaded once per process as `orch_NAME`."""
    return load_file(f"orch_{name}", os.path.join(FOLDER, f"{name}.py"))


def load_file(name: str, path: str) -> Any:
    """Return the module in a file, loaded once per process under this name."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:  # outermost edge: a module that failed is not kept
        del sys.modules[name]
        raise
    return module


def guard(function: Function) -> Function:
    """Return the function without its errors: an internal error disables the instrumentation and is reported."""

    @functools.wraps(function)
    def run_guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # outermost edge: the program goes on
            if is_from_signal_handler(error):
                raise
            report(f"{type(error).__name__}: {error}")
            return None

    return cast(Function, run_guarded)


def is_from_signal_handler(error: BaseException) -> bool:
    """Return whether the program's signal handler raised this error while our code ran."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {getattr(getattr(handler, "__func__", handler), "__code__", None) for handler in handlers} - {None}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def report(text: str) -> None:
    """Report an internal error in the progress cell, or on stderr if that fails. Never raises."""
    with contextlib.suppress(Exception):  # outermost edge
        rank = sys.modules["orch_program_rank"].known()
        if rank is not None:
            rank.report_error(text)
            return
    with contextlib.suppress(Exception):
        if sys.modules["multiprocessing.process"].parent_process() is not None:
            return  # a worker of the program: its parent reports the same
    with contextlib.suppress(Exception):
        sys.stderr.write(f"orch: this program is not instrumented: {text}\n")


class _Finder(MetaPathFinder):
    """Finds nothing itself; it wraps the loader that the other finders return for a watched module."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname not in _watched:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find is not None and finder is not self else None
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _WatchedLoader(spec.loader, fullname)
                return spec
        return None


class _WatchedLoader(Loader):
    """Loader that calls functions after the real one has run the module."""

    def __init__(self, loader: Any, name: str) -> None:
        self._loader, self._name = loader, name

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        if getattr(module, "__spec__", None) is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        # After a failed import, the program may try again.
        for act in _watched.pop(self._name, []):
            guard(act)(module)
