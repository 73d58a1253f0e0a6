"""Rate of training steps while a checkpoint is written in the background."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from benchmarks.checkpoint.ours import Ours
from benchmarks.checkpoint.rows import Measured, Setting
from benchmarks.checkpoint.states import LIMIT, OURS, Side, interleaved_medians, peers, state
from benchmarks.checkpoint.torch_own import Dcp, lone_group

_SAVES = 3
_ALONE_S = 1.0


class _Training:
    """A small model's forward, backward and optimizer step in one thread."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self._model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, foreach=True)
        self._input = torch.randn(128, 256)

    def step(self) -> None:
        loss = self._model(self._input).square().mean()
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)


def while_saving(setting: Setting) -> Measured:
    """Measure seconds per step during back-to-back saves, without their stalls, which are separate rows."""
    torch.set_num_threads(1)
    made, training = state("SMALL", setting.scale), _Training()
    ours = Ours(setting.folder / "ours", made)
    seen: dict[str, list[Pass]] = {}

    def alone() -> float:
        end, count, start = time.perf_counter() + _ALONE_S, 0, time.perf_counter()
        while time.perf_counter() < end:
            training.step()
            count += 1
        return (time.perf_counter() - start) / count

    def ours_rate() -> float:
        def begin() -> Callable[[], bool]:
            step = made.next_step()
            ours.checkpointer.save(step, made.tensors, {})
            return lambda: any(kind == "checkpoint.committed" and data["step"] == step for _, kind, data in ours.events)

        passed = _train_during_saves(training, begin)
        ours.checkpointer.wait()
        return _record_pass(seen, OURS, passed)

    def dcp_rate(kind: str, dcp: Dcp) -> float:
        return _record_pass(seen, kind, _dcp_pass(training, dcp))

    with lone_group(setting.folder):
        dcps = {kind: Dcp(setting.folder, made, kind) for kind in ("DCP thread", "DCP process")}
        sides: dict[str, Side] = {LIMIT: alone, OURS: ours_rate}
        sides |= {kind: partial(dcp_rate, kind, dcp) for kind, dcp in dcps.items()}
        times = interleaved_medians(sides, setting.rounds)
        for dcp in dcps.values():
            dcp.close()
    ours.close()
    return Measured(
        ours=times[OURS], limit=times[LIMIT], peers=peers(times), rounds=setting.rounds,
        note=f"step alone {1000 * times[LIMIT]:.2f} ms; {_SAVES} saves back to back each round; one save lasts and "
        f"costs training, the stall apart: {_costs(seen, times[LIMIT])}",
    )  # fmt: skip


class Pass(NamedTuple):
    """Several saves in sequence, and the number of steps during them."""

    seconds: float
    steps: int


def _record_pass(seen: dict[str, list[Pass]], name: str, passed: Pass) -> float:
    seen.setdefault(name, []).append(passed)
    return passed.seconds / max(1, passed.steps)


def _costs(seen: dict[str, list[Pass]], alone: float) -> str:
    """Return the cost of one save in words: the loss is the slowdown times its length, which a rate does not show."""
    told = []
    for name, passes in seen.items():
        lasts = statistics.median(each.seconds for each in passes) / _SAVES
        lost = statistics.median(each.seconds - each.steps * alone for each in passes) / _SAVES
        told.append(f"{name} {1000 * lasts:.0f} ms, {1000 * lost:.0f} ms")
    return "; ".join(told)


def _train_during_saves(training: _Training, begin: Callable[[], Callable[[], bool]]) -> Pass:
    """Run steps during several saves; every save begins as soon as the previous one has ended."""
    steps, spent = 0, 0.0
    for _ in range(_SAVES):
        done = begin()
        start = time.perf_counter()
        deadline = start + 120
        while not done() and time.perf_counter() < deadline:
            training.step()
            steps += 1
        spent += time.perf_counter() - start
    return Pass(spent, steps)


def _dcp_pass(training: _Training, dcp: Dcp) -> Pass:
    started = False

    def begin() -> Callable[[], bool]:
        nonlocal started
        if started:
            dcp.clean()
        started = True
        ended, _staging = dcp.start()
        return ended.done

    passed = _train_during_saves(training, begin)
    dcp.clean()
    return passed
