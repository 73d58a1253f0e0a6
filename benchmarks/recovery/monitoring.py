"""What watching costs a rank: a bare loop and the same one with its cell, stopwatch and ticker, block by block."""

import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

from trainer.agent.local_ranks import LocalRanks
from trainer.agent.sampling import Sampler, report_seconds
from trainer.contract.progress import Phase, ProgressCell
from trainer.worker.course import Course
from trainer.worker.own_work import ThreadTime
from trainer.worker.ticker import SECONDS as TICK_SECONDS
from trainer.worker.ticker import Ticker

_BLOCKS, _STEPS = 40, 5
_CALLS = 2000
_LOOKS_A_SECOND = 10
_STEP = 0.2
"""Seconds of the step on which what is paid by the second is laid: ten looks, two reports, two ticks."""


class _Training:
    """A small model whose step takes some tens of milliseconds in one thread."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self._model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, foreach=True)
        self._input = torch.randn(256, 512)

    def bare(self, _step: int) -> None:
        loss = self._model(self._input).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def watched(self, cell: ProgressCell, course: Course, step: int) -> None:
        """As `trainer.worker.loop` tells its way through a step."""
        course.enter(Phase.DATA)
        course.enter(Phase.FORWARD)
        loss = self._model(self._input).square().mean()
        course.enter(Phase.BACKWARD)
        loss.backward()
        course.enter(Phase.OPTIMIZER)
        course.pause()
        course.resume()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        course.stepped(step)
        cell.update(step=step, saved_step=0, save_seconds=0.0, step_seconds=0.0)
        cell.update(loss=0.0, grad_norm=0.0)


def cost() -> dict[str, float]:
    """`ratio` of median step times, blocks of both loops in turn; `cpu` seconds per step and rank."""
    torch.set_num_threads(1)
    training, ranks = _Training(), LocalRanks(1, range(4))
    cell = ranks.by_rank[0].cell
    course = Course(cell, ThreadTime())
    bare: list[float] = []
    watched: list[float] = []
    for block in range(_BLOCKS):
        order = (False, True) if block % 2 == 0 else (True, False)
        for watching in order:
            ticker = Ticker(cell)
            if watching:
                ticker.start()
                watched += _block(lambda step: training.watched(cell, course, step))
                ticker.stop()
            else:
                bare += _block(training.bare)
    cpu = _telling(cell, course) + _STEP * (_ticking(cell) + _sampling(ranks))
    ranks.close()
    return {"ratio": statistics.median(watched) / statistics.median(bare), "cpu": cpu}


def _block(train: Callable[[int], None]) -> list[float]:
    """Seconds of each of some steps."""
    seconds = []
    for step in range(1, _STEPS + 1):
        began = time.perf_counter()
        train(step)
        seconds.append(time.perf_counter() - began)
    return seconds


def _telling(cell: ProgressCell, course: Course) -> float:
    """CPU seconds of what a rank tells in one step, with nothing in between."""
    began = time.thread_time()
    for step in range(1, _CALLS + 1):
        for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER):
            course.enter(phase)
        course.pause()
        course.resume()
        course.stepped(step)
        cell.update(step=step, saved_step=0, save_seconds=0.0, step_seconds=0.0)
        cell.update(loss=0.0, grad_norm=0.0)
    return (time.thread_time() - began) / _CALLS


def _ticking(cell: ProgressCell) -> float:
    """CPU seconds a second of the ticker; waking up costs more than the tick."""
    began = time.thread_time()
    for _ in range(_CALLS):
        cell.tick()
    return (time.thread_time() - began) / _CALLS / TICK_SECONDS


def _sampling(ranks: LocalRanks) -> float:
    """CPU seconds a second and rank of the agent's looks and reports."""
    sampler, count = Sampler(ranks, "node"), _CALLS // 10
    began = time.thread_time()
    for _ in range(count):
        ranks.summary()
    look = (time.thread_time() - began) / count
    began = time.thread_time()
    for step in range(count):
        for local in ranks.by_rank.values():
            local.cell.update(step=step)
        sampler.report()
    report = (time.thread_time() - began) / count
    return (look * _LOOKS_A_SECOND + report / report_seconds(2)) / len(ranks.by_rank)
