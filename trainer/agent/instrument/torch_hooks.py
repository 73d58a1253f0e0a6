"""Hooks in torch that report a program's steps, phases, process groups, stacks and collectives.

Installed after the program has imported torch. Standard library, Python 3.9.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

hook: Any = None
program: Any = None
"""The modules `import_hook` and `program_rank`, which `install` sets, because they are loaded by path."""

STACKS = signal.SIGRTMIN + 6
"""The agents' signal for a dump of all threads' stacks (trainer/protocol/messages/ranks.py)."""


def install(import_hook: Any) -> None:
    """Claim this rank's cell, and hook torch and the frameworks of the adapters."""
    global hook, program
    hook = import_hook
    program = hook.load_file("orch_program_rank", os.path.join(hook.FOLDER, "program_rank.py"))
    rank = program.current()
    if rank is None and not os.environ.get("ORCH_CELLS"):
        return
    if rank is not None:
        rank.found("torch")
        _dump_stacks_on_signal()
    hook.after_import("torch.optim.optimizer", _count_steps)
    hook.after_import("torch.utils.data.dataloader", _report_data)
    hook.after_import("torch.autograd", _report_backward)
    hook.after_import("torch.distributed.distributed_c10d", _report_groups)
    _install_adapters()


def _install_adapters() -> None:
    path = os.path.join(os.path.dirname(hook.FOLDER), "adapters", "registry.py")
    if not os.path.exists(path):
        return
    registry = hook.load_file("orch_adapter_registry", path)

    def install_one(name: str, module: Any) -> None:
        rank = program.current()
        if rank is not None:
            rank.found(name)
            registry.install(name, module, rank)

    for row in registry.ROWS:
        for module in row.modules:
            hook.after_import(module, functools.partial(install_one, row.name))


def _dump_stacks_on_signal() -> None:
    """Write all threads' stacks into the agent's file when the agent asks for them."""
    files = os.environ.get("ORCH_STACKS", "").split(",")
    place = program._local_rank()
    if place < len(files) and files[place]:
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # evidence only: the agent has other stacks
            descriptor = os.open(files[place], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            faulthandler.register(STACKS, file=descriptor, all_threads=True, chain=False)


class StepCounter:
    """Steps of a program, from the steps of its optimizers.

    A GAN, alternating policies and optimizers for single parameters step several optimizers per step of the program,
    and the one that steps most often counts.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._most = self._refused = 0

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        rank = program.current()
        if rank is not None:
            rank.enter("optimizer")

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        rank = program.current()
        if rank is None and self._refused != os.getpid():
            rank = program.join(-1)
        if rank is None:
            self._refused = os.getpid()
            return
        key = id(optimizer)
        count = self._counts.get(key)
        count = _finished_steps(optimizer) if count is None else count + 1
        self._counts[key] = count
        self._most = max(self._most, count)
        rank.optimizer_step(self._most)


def _finished_steps(optimizer: Any) -> int:
    """Return the steps that an optimizer has counted in its state, which a checkpoint restores; at least 1."""
    with contextlib.suppress(Exception):  # an optimizer of the program may keep anything in its state
        for state in optimizer.state.values():
            step = state.get("step")
            if isinstance(step, (int, float)) or getattr(getattr(step, "device", None), "type", "") == "cpu":
                return max(1, int(step))
            break
    return 1


def _count_steps(module: Any) -> None:
    counter = StepCounter()
    module.register_optimizer_step_pre_hook(counter.before)
    module.register_optimizer_step_post_hook(counter.after)


def _report_data(module: Any) -> None:
    """Report the time that the program waits for the next batch as the phase data."""
    iterator = module._BaseDataLoaderIter
    following = iterator.__next__

    @functools.wraps(following)
    def take_batch(self: Any) -> Any:
        rank = program.current()
        if rank is None:
            return following(self)
        rank.enter("data")
        try:
            return following(self)
        finally:
            rank.leave("data")

    iterator.__next__ = take_batch


def _report_backward(module: Any) -> None:
    backward = module.backward

    @functools.wraps(backward)
    def run_backward(*args: Any, **kwargs: Any) -> Any:
        rank = program.current()
        if rank is None:
            return backward(*args, **kwargs)
        rank.enter("backward")
        try:
            return backward(*args, **kwargs)
        finally:
            rank.leave("backward")

    module.backward = run_backward


def _report_groups(module: Any) -> None:
    """Report the rank of the process group, serve its flight records, and list its groups."""
    init, new_group = module.init_process_group, module.new_group

    @functools.wraps(init)
    def init_and_join(*args: Any, **kwargs: Any) -> Any:
        found = init(*args, **kwargs)
        hook._run(lambda _: _join(module), module)
        return found

    @functools.wraps(new_group)
    def make_group(*args: Any, **kwargs: Any) -> Any:
        found = new_group(*args, **kwargs)
        hook._run(lambda _: _write_groups(module), module)
        return found

    for name, wrapped in (("init_process_group", init_and_join), ("new_group", make_group)):
        original: Callable[..., Any] = getattr(module, name)
        for holder in (module, sys.modules.get("torch.distributed")):
            if holder is not None and getattr(holder, name, original) is original:
                setattr(holder, name, wrapped)


_servers: list[Any] = []


def _join(module: Any) -> None:
    rank = program.join(module.get_rank())
    if rank is None:
        return
    rank.found("torch.distributed")
    path = _flight_path()
    if path and not _servers:
        _servers.append(_serve_flights(path))
    _write_groups(module)


def _flight_path() -> str:
    paths, place = os.environ.get("ORCH_FLIGHTS", "").split(","), program._local_rank()
    return paths[place] if place < len(paths) else ""


def _serve_flights(path: str) -> Any:
    """Start torch's server, which answers the agent even while Python's lock is held."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    with _stderr_silenced():
        return sys.modules["torch._C._distributed_c10d"]._WorkerServer(path, -1)


@contextlib.contextmanager
def _stderr_silenced() -> Iterator[None]:
    """Suppress the C++ message about the start of the server."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


def _write_groups(module: Any) -> None:
    """Write the ranks of each process group, which gloo's flight records lack."""
    path = _flight_path()
    if not path or program.current() is None:
        return
    groups = {
        name: {"name": name, "desc": group.group_desc, "runs": _runs(module.get_process_group_ranks(group))}
        for group, name in module._world.pg_names.items()
    }
    temporary = f"{path}.groups.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as stream:
        json.dump(groups, stream)
    os.replace(temporary, f"{path}.groups")


def _runs(ranks: list[int]) -> list[list[int]]:
    """Return ascending ranks as runs [first, last, step], as the agent decodes them."""
    found: list[list[int]] = []
    for rank in sorted(ranks):
        if found and (found[-1][0] == found[-1][1] or rank - found[-1][1] == found[-1][2]):
            found[-1][2] = rank - found[-1][1]
            found[-1][1] = rank
        else:
            found.append([rank, rank, 1])
    return found
