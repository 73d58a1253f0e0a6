"""Accelerate: folders that `Accelerator.save_state` writes, in loops of the program's own.

The position in the data belongs to the program, which often finds it in the folder's name (`step_20`). So a save for
another step is made only if its name, or a registered counter, follows from the step.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.agent.adapters.host import AdapterHost

SAVE_AND_GO_ON = 1

_LAST_NUMBER = re.compile(r"(\d+)(?!.*\d)", re.ASCII)
_RANDOM = re.compile(r"random_states_(\d+)\.pkl", re.ASCII)
_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth)", re.ASCII)
_OTHERS = re.compile(r"(optimizer|scheduler|scaler|sampler|dl_state_dict).*", re.ASCII)
"""Files of `save_state` that are no weights. Hooks of the program (diffusers) give weights names of their own."""


def _number(name: str) -> int:
    found = _LAST_NUMBER.search(name)
    return int(found[1][:18]) if found else -1


class CountedLoop:
    """A program's training loop: its steps in this process, and the names that it gives to its checkpoints."""

    def __init__(self) -> None:
        self.steps = self.seen = 0  # optimizer steps, and those at the last end of the loop's body
        self.base = 0  # step that the program has resumed from
        self.saved = -1  # optimizer steps at the newest save
        self.accelerator: Any = None
        self.name = ""  # a path of a checkpoint whose number is the step
        self.optimizer: Any = None

    def note_load(self, path: Any) -> None:
        number = _number(os.path.basename(os.fspath(path))) if path else -1
        self.base = max(0, number - self.steps)

    def note_save(self, accelerator: Any, path: Any) -> bool:
        """Return whether a checkpoint for another step can be made like this one."""
        self.accelerator, self.saved = accelerator, self.steps
        if accelerator.project_configuration.automatic_checkpoint_naming:
            self.name = ""
            return any(map(self._counts_steps, accelerator._custom_objects))
        name = os.path.basename(os.fspath(path))
        self.name = os.fspath(path) if _number(name) == self.base + self.steps and "epoch" not in name.lower() else ""
        return bool(self.name)

    def _counts_steps(self, registered: Any) -> bool:
        """Return whether an object that is part of every checkpoint has the program's step."""
        values = registered.state_dict().values()
        return any(type(value) is int and value == self.base + self.steps for value in values)

    def save(self) -> None:
        """Save the state after the newest step on all ranks, unless the program has just saved it.

        A folder proves nothing: a faster rank may have made it.
        """
        if self.saved == self.steps:
            return
        if not self.name:
            self.accelerator.save_state()
            return
        folder, name = os.path.split(self.name)
        path = os.path.join(folder, _LAST_NUMBER.sub(str(self.base + self.steps), name))
        self.accelerator.save_state(path)


def install(module: Any, host: AdapterHost) -> None:
    """Hook saves, loads, optimizer steps and data loaders. `module` is `accelerate.accelerator`."""
    loop = CountedLoop()
    _hook_saves(module.Accelerator, loop, host)
    _hook_optimizer(module.AcceleratedOptimizer, loop, host)
    loaders = sys.modules["accelerate.data_loader"]
    for loader in (loaders.DataLoaderShard, loaders.DataLoaderDispatcher):
        _hook_loader(loader, loop, host)


def _hook_saves(accelerator: Any, loop: CountedLoop, host: AdapterHost) -> None:
    save, load = accelerator.save_state, accelerator.load_state
    enter = host.guard(lambda: host.leads and host.rank.enter("checkpoint"))
    leave = host.guard(lambda: host.leads and host.rank.leave("checkpoint"))

    def report(self: Any, asked: Any, path: Any) -> None:
        if host.leads:
            host.lead()
            host.saved(loop.base + loop.steps, os.path.abspath(os.fspath(path)))
            if loop.note_save(self, asked or path):
                host.answer_requests()

    saved, loaded = host.guard(report), host.guard(loop.note_load)

    @functools.wraps(save)
    def save_state(self: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        enter()
        try:
            path = save(self, output_dir, *args, **kwargs)
        finally:
            leave()
        saved(self, output_dir, path)
        return path

    @functools.wraps(load)
    def load_state(self: Any, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = load(self, input_dir, *args, **kwargs)
        loaded(input_dir)
        return result

    accelerator.save_state, accelerator.load_state = save_state, load_state


def _hook_optimizer(optimizer: Any, loop: CountedLoop, host: AdapterHost) -> None:
    step = optimizer.step

    def count(self: Any) -> None:
        loop.optimizer = loop.optimizer or self
        loop.steps += self is loop.optimizer and bool(self.gradient_state.sync_gradients)

    counted = host.guard(count)

    @functools.wraps(step)
    def step_and_count(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        counted(self)
        return result

    optimizer.step = step_and_count


def _hook_loader(loader: Any, loop: CountedLoop, host: AdapterHost) -> None:
    iterate = loader.__iter__

    def end_body() -> None:
        if loop.steps == loop.seen or not host.leads:
            return
        loop.seen = loop.steps
        reason = host.due(loop.base + loop.steps)
        if reason:
            loop.save()
        if reason > SAVE_AND_GO_ON:
            host.leave()

    ended = host.guard(end_body)

    @functools.wraps(iterate)
    def iterate_and_save(self: Any) -> Iterator[Any]:
        for batch in iterate(self):
            yield batch
            ended()  # the program asks for the next batch, so its schedulers and counters have stepped too

    loader.__iter__ = iterate_and_save


def checkpoints(folder: str) -> list[tuple[int, str]]:
    """Return folders with a number in their names and a rank's random states, lowest first. Raises OSError."""
    found = []
    for entry in os.scandir(folder):
        if entry.is_dir() and _number(entry.name) >= 0 and any(map(_RANDOM.fullmatch, os.listdir(entry.path))):
            found.append((_number(entry.name), entry.path))
    return sorted(found)


def damage(path: str) -> str:
    """Return why a checkpoint is incomplete, or "" if it is complete. Raises OSError."""
    names = os.listdir(path)
    has_weights = any(_WEIGHTS.fullmatch(name) and not _OTHERS.fullmatch(name) for name in names)
    has_parts = any(os.path.isdir(os.path.join(path, name)) for name in names)
    if not has_weights and not has_parts:
        return "has no weights"
    # A schedule has an optimizer; a program without one may keep its optimizer to itself.
    if "scheduler.bin" in names and not has_parts and not any(name.startswith("optimizer") for name in names):
        return "lacks optimizer.bin"
    ranks = {int(match[1]) for match in map(_RANDOM.fullmatch, names) if match}
    missing = sorted(set(range(max(ranks, default=0) + 1)) - ranks)
    return f"lacks random_states_{missing[0]}.pkl" if missing else ""


def resume(path: str) -> tuple[dict[str, str], list[str]]:
    """Return the variable that a program may read; programs choose what they give to `load_state` themselves."""
    return ({"ORCH_RESUME_PATH": path} if path else {}), []
