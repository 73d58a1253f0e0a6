"""Time for which a save stops training."""

import time
from functools import partial

import torch

from benchmarks.checkpoint import limits
from benchmarks.checkpoint.ours import Ours
from benchmarks.checkpoint.rows import Measured, Setting
from benchmarks.checkpoint.states import LIMIT, OURS, BenchmarkState, Side, interleaved_medians, peers, state
from benchmarks.checkpoint.torch_own import Dcp, lone_group


def block(setting: Setting, set_name: str) -> Measured:
    """Measure the call that copies the state, compared with one memcpy into a shared mapping; one thread in both."""
    torch.set_num_threads(1)
    made = state(set_name, setting.scale)
    ours = Ours(setting.folder / "ours", made)
    with lone_group(setting.folder):
        dcps = {kind: Dcp(setting.folder, made, kind) for kind in ("DCP thread", "DCP process")}
        sides: dict[str, Side] = {LIMIT: _memcpy(made), OURS: lambda: ours.save().stall}
        sides |= {kind: partial(_staging_seconds, dcp) for kind, dcp in dcps.items()}
        times = interleaved_medians(sides, setting.rounds)
        for dcp in dcps.values():
            dcp.close()
    ours.close()
    return _measurement(times, setting, "")


def lazy(setting: Setting, set_name: str) -> Measured:
    """Measure the call and the wait before the optimizer.

    Between them runs a forward and backward pass as long as several memcpys.
    """
    torch.set_num_threads(1)
    made = state(set_name, setting.scale)
    ours = Ours(setting.folder / "ours", made, mode="lazy")
    copied = _memcpy(made)
    training = _Passes(8 * min(copied() for _ in range(5)))
    lengths: list[float] = []

    def ours_stall() -> float:
        step = made.next_step()
        start = time.perf_counter()
        ours.checkpointer.save(step, made.tensors, {})
        called = time.perf_counter()
        lengths.append(training.run())
        asked = time.perf_counter()
        ours.checkpointer.before_optimizer_step()
        waited = time.perf_counter() - asked
        ours.wait_for_commit(step)
        return called - start + waited

    with lone_group(setting.folder):
        kinds = ("DCP thread, async staging", "DCP process, async staging")
        dcps = {kind: Dcp(setting.folder, made, kind) for kind in kinds}
        sides: dict[str, Side] = {LIMIT: copied, OURS: ours_stall}
        sides |= {kind: partial(_overlapped_stall, dcp, made, training) for kind, dcp in dcps.items()}
        times = interleaved_medians(sides, setting.rounds)
        for dcp in dcps.values():
            dcp.close()
    ours.close()
    alone = min(training.run() for _ in range(5))
    slower = sorted(lengths)[len(lengths) // 2] / alone - 1
    return _measurement(times, setting, f"the passes between took {slower:+.0%} of their time alone")


def _overlapped_stall(dcp: Dcp, made: BenchmarkState, training: "_Passes") -> float:
    made.next_step()
    start = time.perf_counter()
    ended, staging = dcp.start()
    called = time.perf_counter()
    training.run()
    asked = time.perf_counter()
    if staging is not None:
        staging.result()
    stall = called - start + time.perf_counter() - asked
    ended.result()
    dcp.clean()
    return stall


def _staging_seconds(dcp: Dcp) -> float:
    return dcp.save().staged


def _memcpy(made: BenchmarkState) -> Side:
    source, target = limits.room(made.nbytes), limits.room(made.nbytes, shared=True)
    return lambda: limits.memcpy(source, target)


class _Passes:
    """Matrix products in one thread that take about `seconds`, like a forward and backward pass."""

    def __init__(self, seconds: float) -> None:
        self._left, self._right = torch.randn(256, 512), torch.randn(512, 512)
        start, number = time.perf_counter(), 0
        while time.perf_counter() - start < 0.1:
            self._product()
            number += 1
        self._number = max(1, int(number * seconds / 0.1))

    def _product(self) -> None:
        self._left = torch.tanh(self._left @ self._right)

    def run(self) -> float:
        start = time.perf_counter()
        for _ in range(self._number):
            self._product()
        return time.perf_counter() - start


def _measurement(times: dict[str, float], setting: Setting, note: str) -> Measured:
    return Measured(ours=times[OURS], limit=times[LIMIT], peers=peers(times), rounds=setting.rounds, note=note)
