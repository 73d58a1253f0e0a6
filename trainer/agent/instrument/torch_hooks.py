"""Hooks in torch that report a program's steps and phases, and the adapters of its frameworks.

Installed after the program has imported torch. `torch.compile` traces hooks, so they do nothing there.
Standard library, Python 3.9.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import functools
import os
import signal
import sys
import weakref
from collections.abc import Callable
from typing import Any

hook: Any = None
program: Any = None
layout: Any = None
groups: Any = None
restored_state: Any = None
"""The modules `import_hook`, `program_rank`, `cell_writer`, `process_groups` and `restored_state`, loaded by path."""

STACKS = signal.SIGRTMIN + 6
"""The agents' signal for a dump of all threads' stacks (trainer/protocol/messages/ranks.py)."""
_HIGH = 700
"""Lowest descriptor for the stacks. Programs that close all descriptors get low numbers again for their own files."""


def install(import_hook: Any) -> None:
    """Become a rank if the launcher says so, and hook torch and the frameworks of the adapters."""
    global hook, program, layout, groups, restored_state
    hook = import_hook
    program, layout, groups = (hook.load(name) for name in ("program_rank", "cell_writer", "process_groups"))
    restored_state = hook.load("restored_state")
    program.when_claimed(_begin)
    program.current()
    hook.after_import("torch.optim.optimizer", _count_steps)
    hook.after_import("torch.utils.data.dataloader", _report_data)
    hook.after_import("torch.autograd", _report_backward)
    hook.after_import("torch.nn.modules.module", _report_evaluation)
    hook.after_import("torch._dynamo.callback", _report_compilations)
    hook.after_import("torch.distributed.distributed_c10d", functools.partial(groups.install, hook, program))
    _install_adapters()


def _begin(rank: Any) -> None:
    rank.found("torch")
    state = restored_state.RestoredState(restored_state.expected_state(rank.local_rank), rank.report_restore)
    rank.describe_state, rank.note_optimizer = state.describe, hook.guard(state.note)
    rank.compare_next = state.begin_training
    files = os.environ.get("ORCH_STACKS", "").split(",")
    if rank.local_rank < len(files) and files[rank.local_rank]:
        with contextlib.suppress(OSError, ValueError, RuntimeError):  # evidence only: the agent has other stacks
            _dump_stacks_on_signal(files[rank.local_rank])


def _dump_stacks_on_signal(path: str) -> None:
    """Write all threads' stacks into the agent's file when the agent asks for them."""
    low = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        descriptor = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, max(3, min(_HIGH, os.sysconf("SC_OPEN_MAX") - 8)))
    finally:
        os.close(low)
    faulthandler.register(STACKS, file=descriptor, all_threads=True, chain=False)


def _install_adapters() -> None:
    registry = hook.load_file(
        "orch_adapter_registry", os.path.join(os.path.dirname(hook.FOLDER), "adapters", "registry.py")
    )
    for row in registry.ROWS:
        for name in row.modules:
            hook.after_import(name, functools.partial(_install_adapter, registry, row.name))


def _install_adapter(registry: Any, name: str, module: Any) -> None:
    def install_adapter(rank: Any) -> None:
        rank.found(name)
        registry.install(name, module, rank)

    program.when_claimed(install_adapter)


def _observe(original: Callable[..., Any], during: int, after: int) -> Any:
    """Return the function, reported as the phase `during`."""
    is_compiling, know = _is_compiling(), program.known

    @functools.wraps(original)
    def call_in_phase(*args: Any, **kwargs: Any) -> Any:
        rank = None if is_compiling() else know()
        if rank is None:
            return original(*args, **kwargs)
        rank.move_to(during)
        try:
            return original(*args, **kwargs)
        finally:
            rank.move_to(after)

    return call_in_phase


def _is_compiling() -> Callable[[], bool]:
    compiler = getattr(sys.modules["torch"], "compiler", None)
    return getattr(compiler, "is_compiling", None) or (lambda: False)


# -- steps


class StepCounter:
    """Steps of a program, from the steps of its optimizers.

    A GAN, alternating policies, parameter groups and optimizers for single parameters step several optimizers per step
    of the program. The one that steps most often counts. An optimizer that replaces a deleted one continues its count.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}
        self._most = self._ended = 0

    def after(self, optimizer: Any) -> None:
        key = id(optimizer)
        count = self._counts.get(key)
        count = self._start(optimizer) if count is None else count + 1
        self._counts[key] = count
        if count <= self._most:
            return
        self._most = count
        rank = program.known() or program.join(-1)
        if rank is not None:
            if count % layout.TIMED_STEPS == 1:
                groups.refresh()
            rank.optimizer_step(count)

    def _start(self, optimizer: Any) -> int:
        """Return the count of an optimizer after its first step here."""
        key = id(optimizer)
        self._references[key] = weakref.ref(optimizer, lambda _: self._end(key))
        return max(_finished_steps(optimizer), self._ended + 1)

    def _end(self, key: int) -> None:
        self._references.pop(key, None)
        self._ended = max(self._ended, self._counts.pop(key, 0))


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
    is_compiling, know, after = _is_compiling(), program.known, hook.guard(StepCounter().after)

    def begin_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        rank = None if is_compiling() else know()
        if rank is not None:
            rank.note_optimizer(optimizer)
            rank.move_to(layout.OPTIMIZER)

    def end_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_compiling():
            after(optimizer)

    module.register_optimizer_step_pre_hook(begin_step)
    module.register_optimizer_step_post_hook(end_step)


# -- phases


def _report_data(module: Any) -> None:
    """Report the time that the program waits for the next batch."""
    iterator = module._BaseDataLoaderIter
    iterator.__next__ = _observe(iterator.__next__, layout.DATA, layout.FORWARD)


def _report_backward(module: Any) -> None:
    module.backward = _observe(module.backward, layout.BACKWARD, layout.FORWARD)


def _report_evaluation(module: Any) -> None:
    """Report an evaluation from `model.eval()` on, until `model.train()`, a backward pass or a step.

    Only models with parameters to train count, and only after the first step: programs freeze parts in this way.
    """
    train = module.Module.train
    is_compiling, know = _is_compiling(), program.known

    def note(rank: Any, model: Any, mode: bool) -> None:
        if mode:
            rank.leave("eval")
        elif rank.phase() != layout.EVAL and any(one.requires_grad for one in model.parameters()):
            rank.enter("eval")

    report = hook.guard(note)

    @functools.wraps(train)
    def switch(self: Any, mode: bool = True) -> Any:
        if is_compiling():
            return train(self, mode)
        rank = know()
        was_training = self.training
        result = train(self, mode)
        if rank is not None and rank.steps and was_training != mode:
            report(rank, self, mode)
        return result

    module.Module.train = switch


def _report_compilations(module: Any) -> None:
    """Report compilations. Any step may compile a new shape, in its forward or its backward pass."""

    def begin(_: Any) -> None:
        rank = program.known()
        if rank is not None:
            rank.enter("compile")

    def end(_: Any) -> None:
        rank = program.known()
        if rank is not None:
            rank.leave("compile")

    module.callback_handler.register_start_callback(hook.guard(begin))
    module.callback_handler.register_end_callback(hook.guard(end))
