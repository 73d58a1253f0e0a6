"""File descriptors that a hand-off to the writer costs the trainer, under `ulimit -n 256`."""

import math
import os
import resource
import threading

import torch

from benchmarks.checkpoint.ours import Ours
from benchmarks.checkpoint.rows import Measured, Setting
from benchmarks.checkpoint.states import state
from benchmarks.checkpoint.torch_own import Dcp, lone_group

LIMIT = 256
_SAVES = 3


def hand_off(setting: Setting) -> Measured:
    """Measure the peak of open descriptors in some saves of SMALL, minus those before the checkpointer existed."""
    _hard, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, most))
    torch.set_num_threads(1)
    made = state("SMALL", setting.scale)
    before = _open()
    ours = Ours(setting.folder / "ours", made)
    with _Watch() as watch:
        for _ in range(_SAVES):
            ours.save()
    held = _open() - before
    ours.close()
    return Measured(
        ours=watch.most - before, limit=1, unit="", rounds=_SAVES, peers={"DCP process": _dcp(setting)},
        note=f"{held} are held between saves; {len(made.tensors)} tensors",
    )  # fmt: skip


def _dcp(setting: Setting) -> float:
    """Return the same for DCP's process mode; infinity if it fails."""
    made = state("SMALL", setting.scale)
    with lone_group(setting.folder):
        before = _open()
        dcp = Dcp(setting.folder, made, "DCP process")
        try:
            with _Watch() as watch:
                dcp.save()
        except (OSError, RuntimeError):
            return math.inf
        return watch.most - before


class _Watch:
    """Thread that continuously counts this process's descriptors."""

    def __init__(self) -> None:
        self.most = _open()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._ended.wait(0.0005):
            self.most = max(self.most, _open())

    def __enter__(self) -> "_Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def _open() -> int:
    # One of them belongs to the listing itself.
    return len(os.listdir("/proc/self/fd")) - 1
