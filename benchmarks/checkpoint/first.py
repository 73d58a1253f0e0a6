"""The first save of a process compared with its later ones."""

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.checkpoint.ours import Ours
from benchmarks.checkpoint.rows import Measured, Setting
from benchmarks.checkpoint.states import state
from benchmarks.checkpoint.torch_own import Dcp, lone_group

_STEADY = 5
_DCP_STARTS = 3


def first(setting: Setting, set_name: str) -> Measured:
    """Measure new processes, each with its first save and several more, from the call to COMMIT."""
    ours = [_fresh("ours", setting, set_name) for _ in range(setting.rounds)]
    dcp = [_fresh("DCP process", setting, set_name) for _ in range(_DCP_STARTS)]
    steady = statistics.median(seconds for times in ours for seconds in times[1:])
    dcp_steady = statistics.median(seconds for times in dcp for seconds in times[1:])
    dcp_first = statistics.median(times[0] for times in dcp)
    return Measured(
        ours=statistics.median(times[0] for times in ours), limit=steady, rounds=setting.rounds, cache="O_DIRECT",
        # Scaled so that the ratio is first save / steady save of DCP itself.
        peers={"DCP process": dcp_first / dcp_steady * steady},
        note=f"DCP: {dcp_first:.2f} s after {dcp_steady:.2f} s steady",
    )  # fmt: skip


def _fresh(side: str, setting: Setting, set_name: str) -> list[float]:
    words = [sys.executable, "-m", "benchmarks.checkpoint.row_process", "--starts", side, set_name, str(setting.scale)]
    done = subprocess.run([*words, str(setting.folder)], capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise RuntimeError(f"{side} did not save: {done.stderr.strip()[-2000:]}")
    times: list[float] = json.loads(done.stdout.splitlines()[-1])
    return times


def starts(side: str, set_name: str, scale: float, folder: Path) -> list[float]:
    """Return the seconds of the first save and several more; runs in a new process."""
    torch.set_num_threads(1)
    made = state(set_name, scale)
    if side == "ours":
        ours = Ours(folder / "first", made)
        times = [ours.save().whole for _ in range(1 + _STEADY)]
        ours.close()
        return times
    with lone_group(folder):
        dcp = Dcp(folder, made, side)
        times = [dcp.save().whole for _ in range(1 + _STEADY)]
        dcp.close()
    shutil.rmtree(folder / side.replace(" ", "-"), ignore_errors=True)
    return times
