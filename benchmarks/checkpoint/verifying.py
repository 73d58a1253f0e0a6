"""Verification of every digest of a checkpoint, compared with reading the same bytes."""

import time

import torch

from benchmarks.checkpoint import limits
from benchmarks.checkpoint.ours import Ours, checkpoint_files
from benchmarks.checkpoint.rows import Measured, Setting
from benchmarks.checkpoint.states import LIMIT, OURS, drop, interleaved_medians, state, warm
from checkpointing.verification.verify import verify


def level_2(setting: Setting, cold: bool) -> Measured:
    """Measure `verify` in this process; both sides read into a small, reused buffer."""
    torch.set_num_threads(1)
    place = Ours.save_once(setting.folder / "ours", state("BIG", setting.scale))
    files, threads = checkpoint_files(place), limits.CORES
    room = limits.room(threads * limits.BLOCK)
    if not cold:
        warm(files)

    def time_verify() -> float:
        if cold:
            drop(files)
        start = time.perf_counter()
        report = verify(place, 2)
        seconds = time.perf_counter() - start
        if not report.ok:
            raise RuntimeError(f"a healthy checkpoint is refused: {report.faults}")
        return seconds

    times = interleaved_medians({**limits.raw_reads(files, room, cold=cold), OURS: time_verify}, setting.rounds)
    rate = sum(path.stat().st_size for path in files) / times[LIMIT] / 1e9
    return Measured(
        ours=times[OURS], limit=times[LIMIT], threads=threads, rounds=setting.rounds,
        cache="cold" if cold else "warm", note=f"raw read {rate:.1f} GB/s",
    )  # fmt: skip
