"""Verifying and loading a checkpoint into a model's tensors, compared with reading the same bytes."""

import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader as dcp

from benchmarks.checkpoint import limits
from benchmarks.checkpoint.ours import Ours, checkpoint_files
from benchmarks.checkpoint.rows import Measured, Setting
from benchmarks.checkpoint.states import LIMIT, OURS, BenchmarkState, Side, drop, interleaved_medians, state, warm

_TIMES_DCP = 2.0


def load(setting: Setting, set_name: str, cold: bool) -> Measured:
    """Measure loads with the same layout; every side fills resident memory of the state's size."""
    torch.set_num_threads(1)
    made = state(set_name, setting.scale)
    place = Ours.save_once(setting.folder / "ours", made)
    # A new generation, because the saving one also holds the state in memory.
    ours = Ours(place.parent, BenchmarkState(made.blank()))
    files, target = checkpoint_files(place), made.blank()
    whole, threads = setting.folder / "torch.pt", limits.CORES
    torch.save(made.tensors, whole)
    room = limits.room(sum(-(-path.stat().st_size // limits.BLOCK) * limits.BLOCK for path in files))
    everything = [*files, whole]
    if not cold:
        warm(everything)

    def prepare() -> None:
        for tensor in target.values():
            tensor.zero_()
        if cold:
            drop(everything)

    def time_restore() -> float:
        prepare()
        start = time.perf_counter()
        found = ours.checkpointer.restore(target)
        seconds = time.perf_counter() - start
        if found is None or found.tier == "memory" or not _same(target, made):
            raise RuntimeError("what was loaded is not what was saved, or did not come from the disk")
        return seconds

    sides: dict[str, Side] = {
        **limits.raw_reads(files, room, cold=cold),
        OURS: time_restore,
        "dcp.load": lambda: _dcp_load(place, target, prepare),
        "torch.load": lambda: _torch_load(whole, prepare),
    }
    times = interleaved_medians(sides, setting.rounds)
    ours.close()
    faster = times["dcp.load"] / times[OURS]
    return Measured(
        ours=times[OURS], limit=times[LIMIT], peers={name: times[name] for name in ("dcp.load", "torch.load")},
        threads=threads, rounds=setting.rounds, cache="cold" if cold else "warm",
        demands=((f"{_TIMES_DCP:g} x dcp.load", faster >= _TIMES_DCP),),
        note=f"{faster:.1f} x dcp.load; raw read {made.nbytes / times[LIMIT] / 1e9:.1f} GB/s",
    )  # fmt: skip


def _same(target: dict[str, Tensor], made: BenchmarkState) -> bool:
    return all(torch.equal(target[key], tensor) for key, tensor in made.tensors.items())


def _dcp_load(place: Path, target: dict[str, Tensor], prepared: Callable[[], None]) -> float:
    prepared()
    start = time.perf_counter()
    dcp.load(target, checkpoint_id=place, no_dist=True)
    return time.perf_counter() - start


def _torch_load(path: Path, prepared: Callable[[], None]) -> float:
    prepared()
    start = time.perf_counter()
    torch.load(path, weights_only=True)
    return time.perf_counter() - start
