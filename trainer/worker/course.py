"""A rank's way through its steps: every phase is told to the progress cell, and its own work is measured."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed.distributed_c10d as c10d
from torch import nn

from trainer.contract.progress import SECTIONS, Phase, ProgressCell
from trainer.worker.own_work import Stopwatch, leave_waits_out, stopwatch

_SECTION = {phase: index for index, phase in enumerate(SECTIONS)} | {Phase.COMPILE: SECTIONS.index(Phase.FORWARD)}


class Course:
    """Phases of one generation, from its first step on; costs a few microseconds a step."""

    def __init__(self, cell: ProgressCell, watch: Stopwatch, *, compiles: bool = False) -> None:
        """`compiles`: the first forward pass compiles the model."""
        self._cell, self._watch, self._compiles = cell, watch, compiles
        self._counters = _counters()
        self._section: int | None = None
        self._phase, self._aside, self._thread = Phase.INIT, 0, threading.get_ident()
        self._before = [0] * len(SECTIONS)
        self._first = True

    def enter(self, phase: Phase) -> None:
        """Go on to another phase."""
        if phase is Phase.FORWARD and self._compiles:
            phase, self._compiles = Phase.COMPILE, False
        self._phase = phase
        self._cell.enter(phase, sum([count() for count in self._counters]))
        self._section = _SECTION.get(phase)
        self._watch.turn(self._section)

    def pause(self) -> None:
        """What comes now is no work of the step: a wait for peers, or telling others about it."""
        self._watch.turn(None)

    def resume(self) -> None:
        """Back to the section that was paused."""
        self._watch.turn(self._section)

    def step_aside(self, phase: Phase) -> None:
        """Leave the step for something slow that belongs to no section of it, from within a phase; also while aside."""
        self._aside += 1
        if self._aside == 1:
            self._cell.enter(phase, sum([count() for count in self._counters]))
            if threading.get_ident() == self._thread:  # a thread of autograd has a clock of its own
                self.pause()

    def come_back(self) -> None:
        """Go on where the step was left."""
        self._aside -= 1
        if self._aside == 0:
            self._cell.enter(self._phase, sum([count() for count in self._counters]))
            if threading.get_ident() == self._thread:
                self.resume()

    def stepped(self, step: int) -> None:
        """`step` is over: tell the own work so far. The first step, which allocates and compiles, is left out."""
        self._section = None
        self._watch.turn(None)
        total = self._watch.total()
        if self._first:
            self._first, self._before = False, list(total)
            self._cell.warmed()
        self._cell.worked(step, [now - before for now, before in zip(total, self._before, strict=True)])


def _counters() -> list[Callable[[], int]]:
    """How many collectives each group of this rank has begun: a tenth of a microsecond each."""
    found = []
    for group in c10d._world.pg_map:
        try:
            group._get_sequence_number_for_group()
        except RuntimeError:  # a backend that does not count
            continue
        found.append(group._get_sequence_number_for_group)
    return found


_current: list[Course] = []
"""Of this rank, once it trains."""


@contextmanager
def evaluating() -> Iterator[None]:
    """For a workload that evaluates, or does anything else that takes minutes, within its data or its loss.

    What is inside has the limit of a slow phase, and is no work of the step. Does nothing outside a rank.
    """
    made = _current[0] if _current else None
    if made is None:
        yield
        return
    made.step_aside(Phase.EVAL)
    try:
        yield
    finally:
        made.come_back()


def _tell_compilations(made: Course) -> None:
    """A shape that is new may be compiled in any step, in the forward pass and in the backward pass."""
    from torch._dynamo.callback import callback_handler

    callback_handler.register_start_callback(lambda _: made.step_aside(Phase.COMPILE))
    callback_handler.register_end_callback(lambda _: made.come_back())


def course(cell: ProgressCell, model: nn.Module, device: torch.device) -> Course:
    """The course of a rank that trains `model` on `device`."""
    made = Course(cell, stopwatch(device), compiles=compiles(model))
    _current[:] = [made]
    if compiles(model):
        _tell_compilations(made)
    if device.type != "cpu":  # on the CPU who waits does not run, and is not measured
        leave_waits_out(model, made.pause, made.resume)
    return made


def compiles(model: nn.Module) -> bool:
    """Whether `model`, or a part of it, has been given to torch.compile."""
    parts = list(model.modules())
    return any(type(part).__name__ == "OptimizedModule" or part._compiled_call_impl is not None for part in parts)
