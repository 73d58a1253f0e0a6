"""How fast training steps go while a checkpoint is written behind them."""

import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.checkpoint.contest import LIMIT, OURS, Side, interleaved, peers
from benchmarks.checkpoint.ours import Ours
from benchmarks.checkpoint.rows import Measured, Setting
from benchmarks.checkpoint.states import state
from benchmarks.checkpoint.torch_own import Dcp, lone_group

_SAVES = 3
_ALONE_S = 1.0


class _Training:
    """A small model, forward, backward and optimizer, in one thread."""

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
    """Seconds a step, saves going on back to back; the stall of each save is a row of its own and left out here."""
    torch.set_num_threads(1)
    made, training = state("SMALL", setting.scale), _Training()
    ours = Ours(setting.folder / "ours", made)
    stalls: list[float] = []

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

        seconds = _stepped(training, begin, stalls)
        ours.checkpointer.wait()
        return seconds

    with lone_group(setting.folder):
        dcps = {kind: Dcp(setting.folder, made, kind) for kind in ("DCP thread", "DCP process")}
        sides: dict[str, Side] = {LIMIT: alone, OURS: ours_rate}
        sides |= {kind: (lambda dcp=dcp: _dcp_rate(training, dcp)) for kind, dcp in dcps.items()}
        times = interleaved(sides, setting.rounds)
        for dcp in dcps.values():
            dcp.close()
    ours.close()
    return Measured(
        ours=times[OURS], limit=times[LIMIT], peers=peers(times), rounds=setting.rounds,
        note=f"step alone {1000 * times[LIMIT]:.2f} ms; {_SAVES} saves back to back each round",
    )  # fmt: skip


def _stepped(training: _Training, begin: Callable[[], Callable[[], bool]], stalls: list[float]) -> float:
    """Seconds a step over some saves; every save begins as soon as the one before it has ended."""
    steps, spent = 0, 0.0
    for _ in range(_SAVES):
        called = time.perf_counter()
        done = begin()
        start = time.perf_counter()
        stalls.append(start - called)
        deadline = start + 120
        while not done() and time.perf_counter() < deadline:
            training.step()
            steps += 1
        spent += time.perf_counter() - start
    return spent / max(1, steps)


def _dcp_rate(training: _Training, dcp: Dcp) -> float:
    started = False

    def begin() -> Callable[[], bool]:
        nonlocal started
        if started:
            dcp.clean()
        started = True
        ended, _staging = dcp.start()
        return ended.done

    seconds = _stepped(training, begin, [])
    dcp.clean()
    return seconds
