"""Time from a state to a durable, digested, committed checkpoint."""

from functools import partial

import torch

from benchmarks.checkpoint import limits
from benchmarks.checkpoint.ours import Ours
from benchmarks.checkpoint.rows import Measured, Setting
from benchmarks.checkpoint.states import LIMIT, OURS, Side, interleaved_medians, peers, state
from benchmarks.checkpoint.torch_own import KINDS, Dcp, dcp_save, lone_group, torch_save


def save(setting: Setting, set_name: str) -> Measured:
    """Measure from the end of staging (a separate row) to COMMIT; the raw write also starts from staged bytes."""
    return _measure_save(setting, set_name, whole=False)


def whole(setting: Setting, set_name: str) -> Measured:
    """Measure from the call to COMMIT, including staging."""
    return _measure_save(setting, set_name, whole=True)


def _measure_save(setting: Setting, set_name: str, *, whole: bool) -> Measured:
    torch.set_num_threads(1)
    made, folder = state(set_name, setting.scale), setting.folder
    ours = Ours(folder / "ours", made)
    staged = limits.room(made.nbytes, shared=True)
    with lone_group(folder):
        dcps = {kind: Dcp(folder, made, kind) for kind in KINDS if "async staging" not in kind}

        def ours_seconds() -> float:
            saved = ours.save()
            return saved.whole if whole else saved.written

        def dcp_seconds(dcp: Dcp) -> float:
            times = dcp.save()
            return times.whole if whole else times.whole - times.staged

        sides: dict[str, Side] = {LIMIT: lambda: limits.raw_write(staged, folder), OURS: ours_seconds}
        # The engine writes large buffers with several threads.
        for threads in (2, 4):
            sides[f"{LIMIT}, {threads} threads"] = partial(limits.raw_write, staged, folder, threads=threads)
        sides |= {kind: partial(dcp_seconds, dcp) for kind, dcp in dcps.items()}
        sides["dcp.save, 1 thread"] = lambda: dcp_save(made.tensors, folder / "dcp", threads=1)
        sides["dcp.save, 2 threads"] = lambda: dcp_save(made.tensors, folder / "dcp", threads=2)
        sides["torch.save"] = lambda: torch_save(made.tensors, folder / "torch.pt")
        times = interleaved_medians(sides, setting.rounds)
        for dcp in dcps.values():
            dcp.close()
    ours.close()
    rate = made.nbytes / times[LIMIT] / 1e9
    return Measured(
        ours=times[OURS], limit=times[LIMIT], peers=peers(times), threads=limits.CORES, rounds=setting.rounds,
        cache="O_DIRECT", note=f"raw write {rate:.2f} GB/s",
    )  # fmt: skip
