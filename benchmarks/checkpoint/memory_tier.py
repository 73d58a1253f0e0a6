"""A restart in place: a rank dies, its writer keeps the arena, and the next generation loads from it."""

import time

import torch

from benchmarks.checkpoint.cold import drop
from benchmarks.checkpoint.contest import LIMIT, OURS, interleaved
from benchmarks.checkpoint.ours import Ours, files_of
from benchmarks.checkpoint.rows import Measured, Setting
from benchmarks.checkpoint.states import State, state
from checkpointing.engine.link import WriterLink


def restart(setting: Setting) -> Measured:
    """The load alone, planned before in both cases: from memory, and from the disk whose cache is dropped."""
    torch.set_num_threads(1)
    made = state("BIG", setting.scale)
    first = Ours(setting.folder / "ours", made)
    place = first.folder / first.save().name
    files, saved = files_of(place), {key: tensor.clone() for key, tensor in made.tensors.items()}

    def from_memory() -> float:
        return _loaded(first, saved, "memory")

    def from_disk() -> float:
        drop(files)
        return _loaded(other, saved, "disk")

    other = Ours(first.folder, State(made.blank()), link=WriterLink.start())
    times = interleaved({LIMIT: from_disk, OURS: from_memory}, setting.rounds)
    other.checkpointer.close()
    first.close()
    return Measured(ours=times[OURS], limit=times[LIMIT], rounds=setting.rounds, cache="cold disk")


def _loaded(ours: Ours, saved: dict[str, torch.Tensor], tier: str) -> float:
    target = {key: torch.zeros_like(tensor) for key, tensor in saved.items()}
    start = time.perf_counter()
    restored = ours.checkpointer.restore(target)
    seconds = time.perf_counter() - start
    if restored is None or not all(torch.equal(target[key], tensor) for key, tensor in saved.items()):
        raise RuntimeError("what was loaded is not what was saved")
    if (restored.tier == "memory") != (tier == "memory"):
        raise RuntimeError(f"loaded from {restored.tier}, not from {tier}")
    return seconds
