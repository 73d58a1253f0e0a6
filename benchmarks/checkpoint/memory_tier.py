"""A restart in place: a rank is gone, the agent's writer keeps the arena, and the next generation loads from it."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from benchmarks.checkpoint.ours import Ours, checkpoint_files
from benchmarks.checkpoint.rows import Measured, Setting
from benchmarks.checkpoint.states import LIMIT, OURS, BenchmarkState, drop, interleaved_medians, state
from checkpointing.writer.link import WriterLink
from trainer.agent.processes.checkpoint_writers import CheckpointWriter


def restart(setting: Setting) -> Measured:
    """Measure the load alone, by a new generation each time; both sides are prepared before, as ranks are."""
    torch.set_num_threads(1)
    made = state("BIG", setting.scale)
    checkpoint_writer = CheckpointWriter(
        0, os.environ, os.open(setting.folder / "writer.log", os.O_WRONLY | os.O_CREAT)
    )
    saver = Ours(setting.folder / "ours", made, link=_link_writer(checkpoint_writer))
    files = checkpoint_files(saver.folder / saver.save().name)
    saver.checkpointer.close()

    def from_memory() -> float:
        with _generation(saver, link=_link_writer(checkpoint_writer)) as ours:
            return _time_load(ours, made, memory=True)

    def from_disk() -> float:
        with _generation(saver) as ours:
            drop(files)
            return _time_load(ours, made, memory=False)

    times = interleaved_medians({LIMIT: from_disk, OURS: from_memory}, setting.rounds)
    checkpoint_writer.dismiss()
    checkpoint_writer.close()
    return Measured(ours=times[OURS], limit=times[LIMIT], rounds=setting.rounds, cache="cold disk")


def _link_writer(checkpoint_writer: CheckpointWriter) -> WriterLink:
    with checkpoint_writer.connection() as (memory, stream):
        return WriterLink.attach(os.dup(stream), os.dup(memory))


@contextmanager
def _generation(saver: Ours, link: WriterLink | None = None) -> Iterator[Ours]:
    """Yield a checkpointer like a new rank's: blank state of the same layout, prepared."""
    ours = Ours(saver.folder, BenchmarkState(saver.state.blank()), link=link)
    yield ours
    ours.checkpointer.close()


def _time_load(ours: Ours, made: BenchmarkState, *, memory: bool) -> float:
    target: dict[str, Tensor] = ours.state.tensors
    start = time.perf_counter()
    restored = ours.checkpointer.restore(target)
    seconds = time.perf_counter() - start
    if restored is None or not all(torch.equal(target[key], tensor) for key, tensor in made.tensors.items()):
        raise RuntimeError("what was loaded is not what was saved")
    if (restored.tier == "memory") != memory:
        raise RuntimeError(f"loaded from {restored.tier}: {ours.events}")
    return seconds
