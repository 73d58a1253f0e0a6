"""One round of each fault: our figures, and those of others beside them."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from benchmarks.recovery import monitoring, ours, torchrun

Figures = Mapping[str, float]
Side = Callable[[Path, str], Figures]

OURS = "ours"
STEP_SECONDS = 0.2
PATIENCE = 60.0
"""Seconds that torchrun is given to notice, and then to train again."""

_TORCHRUN, _SCRIPT = "torchrun", "ours, torchrun's script"


def _scale(folder: Path, kind: str) -> Figures:
    """In a process of its own; the worse of the two verdicts counts."""
    words = [sys.executable, "-m", "benchmarks.scale", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
    if not done.stdout.strip():
        raise RuntimeError((done.stderr.strip().splitlines() or ["benchmarks.scale said nothing"])[-1])
    cpu, *verdicts = json.loads(done.stdout.splitlines()[-1])["rows"]
    return {"cpu": cpu["value"], "verdict": max(row["value"] for row in verdicts)}


FAULTS: dict[str, dict[str, Side]] = {
    "kill": {
        OURS: ours.kill,
        _SCRIPT: lambda folder, kind: ours.kill_in_script(folder, kind, STEP_SECONDS),
        _TORCHRUN: lambda folder, kind: torchrun.fault(folder, signal.SIGKILL, STEP_SECONDS, PATIENCE),
    },
    "stop": {
        OURS: ours.stop,
        _TORCHRUN: lambda folder, kind: {
            "declared": torchrun.fault(folder, signal.SIGSTOP, STEP_SECONDS, PATIENCE)["noticed"]
        },
    },
    "spare": {OURS: ours.lose_node},
    "monitoring": {OURS: lambda folder, kind: monitoring.cost()},
    "scale": {OURS: _scale},
}

ONCE = {("stop", _TORCHRUN), ("scale", OURS)}
"""Sides that are measured once: one waits out its patience every time, the other's figures are medians already."""
