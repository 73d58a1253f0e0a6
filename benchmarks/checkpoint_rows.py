"""Measurements of the checkpoint table, each in its own process: `python -m benchmarks.checkpoint_rows NAME JSON`.

Every function takes a folder, a number of rounds and a scale (the share of the full state sets), then its row's
arguments.
"""

import math
import os
import resource
import shutil
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader as dcp_loader

from benchmarks import checkpoint_sides as sides
from benchmarks.checkpoint_sides import BenchmarkState, Dcp, Ours, Side, opened_dcps
from benchmarks.runner import LIMIT, OURS, Result, answer, interleave, run_in_process, serve
from checkpointing.verification.verify import verify
from checkpointing.writer.link import WriterLink
from trainer.agent.rank_processes.checkpoint_writers import CheckpointWriter

Times = Mapping[str, Sequence[float]]


def limit_of(times: Times) -> float:
    """Return the lowest median among the limits, because some rows measure their limit in several ways."""
    return min(statistics.median(found) for name, found in times.items() if name.startswith(LIMIT))


def compare(times: Times, *, at_least: bool = False, **rest: Any) -> Result:
    """Return the ratio of every side to the limit: time / limit, or limit / time if `at_least`."""
    limit = limit_of(times)
    ratios = {
        name: [limit / seconds if at_least else seconds / limit for seconds in found]
        for name, found in times.items()
        if not name.startswith(LIMIT)
    }
    ours = ratios.pop(OURS)
    others = {name: [statistics.median(found)] for name, found in ratios.items()}
    return Result(
        values=ours, others=others, measured={OURS: statistics.median(times[OURS]), LIMIT: limit}, **rest
    )  # fmt: skip


# -- save stalls


def stall_block(folder: Path, rounds: int, scale: float, set_name: str) -> Result:
    """Measure the call that copies the state, compared with one memcpy into a shared mapping; both use one thread."""
    state = BenchmarkState.from_set(set_name, scale)
    ours = Ours(folder / "ours", state)
    with opened_dcps(folder, state, "DCP thread", "DCP process") as dcps:
        compared: dict[str, Side] = {LIMIT: sides.memcpy_side(state.nbytes), OURS: lambda: ours.save().stall}
        compared |= {kind: partial(lambda dcp: dcp.save().stall, dcp) for kind, dcp in dcps.items()}
        times = interleave(compared, rounds)
    ours.close()
    return compare(times)


def stall_lazy(folder: Path, rounds: int, scale: float, set_name: str) -> Result:
    """Measure the save call and the wait before the optimizer step, with passes several memcpys long in between."""
    state = BenchmarkState.from_set(set_name, scale)
    ours = Ours(folder / "ours", state, mode="lazy")
    copy = sides.memcpy_side(state.nbytes)
    training = sides.SavePasses(8 * min(copy() for _ in range(5)))
    lengths: list[float] = []

    def ours_stall() -> float:
        step = state.next_step()
        start = time.perf_counter()
        ours.checkpointer.save(step, state.tensors, {})
        called = time.perf_counter()
        lengths.append(training.run())
        resumed = time.perf_counter()
        ours.checkpointer.before_optimizer_step()
        stall = called - start + time.perf_counter() - resumed
        ours.checkpointer.wait()
        ours.commit_of(step)
        return stall

    def dcp_stall(dcp: Dcp) -> float:
        state.next_step()
        start = time.perf_counter()
        ended, wait_for_staging = dcp.start()
        called = time.perf_counter()
        training.run()
        resumed = time.perf_counter()
        wait_for_staging()
        stall = called - start + time.perf_counter() - resumed
        ended.result()
        dcp.clean()
        return stall

    with opened_dcps(folder, state, "DCP thread, async staging", "DCP process, async staging") as dcps:
        compared: dict[str, Side] = {LIMIT: copy, OURS: ours_stall}
        compared |= {kind: partial(dcp_stall, dcp) for kind, dcp in dcps.items()}
        times = interleave(compared, rounds)
    ours.close()
    slower = statistics.median(lengths) / min(training.run() for _ in range(5)) - 1
    return compare(times, notes=[f"time of the passes in between, compared with running alone: {slower:+.0%}"])


# -- training while a save is written

_SAVES = 3


class Pass(NamedTuple):
    """Duration of several consecutive saves, and the number of training steps during them."""

    seconds: float
    steps: int


def rate_while_saving(folder: Path, rounds: int, scale: float) -> Result:
    """Measure seconds per step during back-to-back saves, excluding their stalls, which have separate rows."""
    state, step = BenchmarkState.from_set("SMALL", scale), _training_step()
    ours = Ours(folder / "ours", state)
    passes: dict[str, list[Pass]] = {}

    def alone() -> float:
        start, steps = time.perf_counter(), 0
        while time.perf_counter() < start + 1.0:
            step()
            steps += 1
        return (time.perf_counter() - start) / steps

    def measure(name: str, begin: Callable[[], Callable[[], bool]], clean: Callable[[], None]) -> float:
        found = _train_during_saves(step, begin, clean)
        passes.setdefault(name, []).append(found)
        return found.seconds / max(1, found.steps)

    def begin_ours() -> Callable[[], bool]:
        number = state.next_step()
        ours.checkpointer.save(number, state.tensors, {})
        return partial(ours.has_committed, number)

    with opened_dcps(folder, state, "DCP thread", "DCP process") as dcps:
        compared: dict[str, Side] = {LIMIT: alone, OURS: partial(measure, OURS, begin_ours, ours.checkpointer.wait)}
        for kind, dcp in dcps.items():
            compared[kind] = partial(measure, kind, partial(lambda dcp: dcp.start()[0].done, dcp), dcp.clean)
        times = interleave(compared, rounds)
    ours.close()
    costs = _describe_costs(passes, limit_of(times))
    note = f"{_SAVES} saves back to back each round; duration and training cost of one save, without the stall: {costs}"
    return compare(times, at_least=True, notes=[note])


def _training_step() -> Callable[[], None]:
    """Return a small model's forward, backward and optimizer step in one thread."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    sample = torch.randn(128, 256)

    def step() -> None:
        model(sample).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def _train_during_saves(
    step: Callable[[], None], begin: Callable[[], Callable[[], bool]], clean: Callable[[], None]
) -> Pass:
    """Run steps during several saves; every save starts as soon as the previous one has finished."""
    steps, spent = 0, 0.0
    for _ in range(_SAVES):
        is_done = begin()
        start = time.perf_counter()
        while not is_done() and time.perf_counter() < start + 120:
            step()
            steps += 1
        spent += time.perf_counter() - start
        clean()
    return Pass(spent, steps)


def _describe_costs(passes: Mapping[str, Sequence[Pass]], alone: float) -> str:
    """Describe the duration of one save and the training time that it costs, which a rate does not show."""
    costs = []
    for name, found in passes.items():
        lasts = statistics.median(each.seconds for each in found) / _SAVES
        lost = statistics.median(each.seconds - each.steps * alone for each in found) / _SAVES
        costs.append(f"{name} {1000 * lasts:.0f} ms, {1000 * lost:.0f} ms")
    return "; ".join(costs)


# -- durable saves


def save(folder: Path, rounds: int, scale: float, set_name: str, whole: bool) -> Result:
    """Measure from the end of staging to COMMIT, or from the call (`whole`); the raw write starts from staged bytes."""
    state = BenchmarkState.from_set(set_name, scale)
    ours = Ours(folder / "ours", state)
    staged = sides.room(state.nbytes, shared=True)

    def seconds(side: Ours | Dcp) -> float:
        saved = side.save()
        return saved.whole if whole else saved.written

    with opened_dcps(folder, state, "DCP thread", "DCP process") as dcps:
        compared: dict[str, Side] = {LIMIT: partial(sides.raw_write, staged, folder), OURS: partial(seconds, ours)}
        # The engine writes large buffers with several threads.
        for threads in (2, 4):
            compared[f"{LIMIT}, {threads} threads"] = partial(sides.raw_write, staged, folder, threads=threads)
        compared |= {kind: partial(seconds, dcp) for kind, dcp in dcps.items()}
        for threads in (1, 2):
            compared[f"dcp.save, {threads} threads"] = partial(
                sides.dcp_save, state.tensors, folder / "dcp", threads=threads
            )
        compared["torch.save"] = partial(sides.torch_save, state.tensors, folder / "torch.pt")
        times = interleave(compared, rounds)
    ours.close()
    note = f"raw write {state.nbytes / limit_of(times) / 1e9:.2f} GB/s; O_DIRECT"
    return compare(times, at_least=True, notes=[note])


def first_save(folder: Path, rounds: int, scale: float, set_name: str) -> Result:
    """Measure the first save and several more in new processes, from the call to COMMIT."""

    def start(side: str) -> list[float]:
        return list(answer(run_in_process("checkpoint_rows", "saves_of_process", folder, scale, side, set_name), 300))

    ours, dcp = [start(OURS) for _ in range(rounds)], [start("DCP process") for _ in range(3)]
    steady, dcp_steady = (statistics.median(s for times in found for s in times[1:]) for found in (ours, dcp))
    dcp_first = statistics.median(times[0] for times in dcp)
    times = {OURS: [times[0] for times in ours], LIMIT: [steady]}
    # DCP's ratio is to its own steady save.
    times["DCP process"] = [dcp_first / dcp_steady * steady]
    return compare(times, notes=[f"DCP: {dcp_first:.2f} s after {dcp_steady:.2f} s steady; O_DIRECT"])


def saves_of_process(folder: Path, scale: float, side: str, set_name: str) -> list[float]:
    """Return how long this process's first save and five more take, in seconds."""
    state = BenchmarkState.from_set(set_name, scale)
    if side == OURS:
        ours = Ours(folder / "first", state)
        times = [ours.save().whole for _ in range(6)]
        ours.close()
        return times
    with opened_dcps(folder, state, side) as dcps:
        times = [dcps[side].save().whole for _ in range(6)]
    shutil.rmtree(folder / side.replace(" ", "-"), ignore_errors=True)
    return times


def descriptors(folder: Path, rounds: int, scale: float) -> Result:
    """Measure the peak number of descriptors open during saves, under `ulimit -n 256`."""
    _soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    state = BenchmarkState.from_set("SMALL", scale)
    before = _count_descriptors()
    ours = Ours(folder / "ours", state)
    with _watch_descriptors() as peak:
        for _ in range(_SAVES):
            ours.save()
    held = _count_descriptors() - before
    ours.close()
    note = f"{held} are held between saves; {len(state.tensors)} tensors"
    with opened_dcps(folder, state) as none:
        dcp_before = _count_descriptors()
        none["DCP process"] = Dcp(folder, state, "DCP process")
        try:
            with _watch_descriptors() as dcp_peak:
                none["DCP process"].save()
            dcp = float(dcp_peak[0] - dcp_before)
        except (OSError, RuntimeError):
            dcp = math.inf
        none.clear()
    return Result(values=[peak[0] - before], others={"DCP process": [dcp]}, notes=[note])


@contextmanager
def _watch_descriptors() -> Iterator[list[int]]:
    """Count this process's descriptors continuously; the yielded list contains the peak."""
    peak, ended = [_count_descriptors()], threading.Event()

    def watch() -> None:
        while not ended.wait(0.0005):
            peak[0] = max(peak[0], _count_descriptors())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        ended.set()
        thread.join()


def _count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) - 1  # one belongs to the listing itself


# -- verification and loads


def verify_level_2(folder: Path, rounds: int, scale: float, cold: bool) -> Result:
    """Measure `verify` in this process; both sides read into a small, reused buffer."""
    place = Ours.save_once(folder / "ours", BenchmarkState.from_set("BIG", scale))
    files = sides.checkpoint_files(place)
    target = sides.room(sides.CORES * sides.BLOCK)
    if not cold:
        sides.warm(files)

    def time_verify() -> float:
        if cold:
            sides.drop(files)
        start = time.perf_counter()
        report = verify(place, 2)
        seconds = time.perf_counter() - start
        if not report.ok:
            raise RuntimeError(f"a healthy checkpoint was refused: {report.faults}")
        return seconds

    times = interleave({**sides.raw_reads(files, target, cold=cold), OURS: time_verify}, rounds)
    rate = sum(path.stat().st_size for path in files) / limit_of(times) / 1e9
    return compare(times, at_least=True, notes=[f"raw read {rate:.1f} GB/s, {sides.CORES} threads"])


def load(folder: Path, rounds: int, scale: float, set_name: str, cold: bool) -> Result:
    """Measure loads with the same layout; every side fills resident memory of the state's size."""
    state = BenchmarkState.from_set(set_name, scale)
    place = Ours.save_once(folder / "ours", state)
    # A new generation, because the one that saved also holds the state in memory.
    ours = Ours(place.parent, state.blank())
    files, target, whole = sides.checkpoint_files(place), state.blank().tensors, folder / "torch.pt"
    torch.save(state.tensors, whole)
    room = sides.room(sum(-(-path.stat().st_size // sides.BLOCK) * sides.BLOCK for path in files))
    if not cold:
        sides.warm([*files, whole])

    def time_load(act: Callable[[], Any]) -> tuple[float, Any]:
        for tensor in target.values():
            tensor.zero_()
        if cold:
            sides.drop([*files, whole])
        start = time.perf_counter()
        found = act()
        return time.perf_counter() - start, found

    def time_restore() -> float:
        seconds, found = time_load(lambda: ours.checkpointer.restore(target))
        if found is None or found.tier == "memory" or not state.equals(target):
            raise RuntimeError("the loaded state differs from the saved one, or was not read from the disk")
        return seconds

    compared: dict[str, Side] = {
        **sides.raw_reads(files, room, cold=cold),
        OURS: time_restore,
        "dcp.load": lambda: time_load(lambda: dcp_loader.load(target, checkpoint_id=place, no_dist=True))[0],
        "torch.load": lambda: time_load(lambda: torch.load(whole, weights_only=True))[0],
    }
    times = interleave(compared, rounds)
    ours.close()
    faster = statistics.median(times["dcp.load"]) / statistics.median(times[OURS])
    rate = f"raw read {state.nbytes / limit_of(times) / 1e9:.1f} GB/s, {sides.CORES} threads"
    demands = [] if faster >= 2.0 else ["2 x dcp.load"]
    return compare(times, at_least=True, demands=demands, notes=[f"{faster:.1f} x dcp.load; {rate}"])


def restart_from_memory(folder: Path, rounds: int, scale: float) -> Result:
    """Measure a restart in place: the agent's writer keeps the arena, and the next generation loads from it.

    Only the load is measured, by a new generation each time; both sides are prepared beforehand, as ranks are.
    """
    state = BenchmarkState.from_set("BIG", scale)
    writer = CheckpointWriter(0, os.environ, os.open(folder / "writer.log", os.O_WRONLY | os.O_CREAT))

    def link() -> WriterLink:
        with writer.connection() as (memory, stream):
            return WriterLink.attach(os.dup(stream), os.dup(memory))

    saver = Ours(folder / "ours", state, link=link())
    files = sides.checkpoint_files(saver.folder / saver.save().name)
    saver.checkpointer.close()

    def time_load(memory: bool) -> float:
        ours = Ours(saver.folder, state.blank(), link=link() if memory else None)
        if not memory:
            sides.drop(files)
        start = time.perf_counter()
        restored = ours.checkpointer.restore(ours.state.tensors)
        seconds = time.perf_counter() - start
        if restored is None or not state.equals(ours.state.tensors) or (restored.tier == "memory") != memory:
            raise RuntimeError(f"the loaded state differs from the saved one, or is from {restored and restored.tier}")
        ours.checkpointer.close()
        return seconds

    times = interleave({LIMIT: partial(time_load, memory=False), OURS: partial(time_load, memory=True)}, rounds)
    writer.dismiss()
    writer.close()
    return compare(times)


if __name__ in ("__main__", "__mp_main__"):
    # DCP's process mode imports this file again in its child, which needs the same setup.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    sides.replace_numpy_conversions()

if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(globals())
