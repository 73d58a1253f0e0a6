"""Rounds of each fault: orch's figures and those of others."""

import json
import math
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
"""Seconds that others have to notice, and then to train again."""

_TORCHRUN, _SCRIPT = "torchrun", "ours, torchrun's script"


def _scale(folder: Path, kind: str) -> Figures:
    """Run the scale benchmark in its own process; the worse of the two verdicts counts, and a failed one is never."""
    words = [sys.executable, "-m", "benchmarks.scale", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode not in (0, 1) or not done.stdout.strip():
        said = (done.stdout + done.stderr).strip().splitlines()
        raise RuntimeError((said or ["benchmarks.scale said nothing"])[-1])
    found = json.loads(done.stdout.splitlines()[-1])
    cpu, *verdicts = found["rows"]
    whole = all(row["good"] == row["rounds"] for row in verdicts)
    return {
        "cpu": cpu["value"],
        "verdict": max(row["value"] for row in verdicts) if whole else math.inf,
        "wrong": float(sum(row["wrong"] for row in verdicts)),
    }


FAULTS: dict[str, dict[str, Side]] = {
    "kill": {
        OURS: ours.kill,
        _SCRIPT: lambda folder, kind: ours.kill_in_script(folder, kind, STEP_SECONDS),
        _TORCHRUN: lambda folder, kind: torchrun.fault(folder, signal.SIGKILL, STEP_SECONDS, PATIENCE),
    },
    "stop": {
        OURS: ours.stop,
        _SCRIPT: lambda folder, kind: ours.stop_in_script(folder, kind, STEP_SECONDS, PATIENCE),
        _TORCHRUN: lambda folder, kind: {
            "declared": torchrun.fault(folder, signal.SIGSTOP, STEP_SECONDS, PATIENCE)["noticed"]
        },
    },
    "spare": {OURS: ours.lose_node},
    "monitoring": {OURS: lambda folder, kind: monitoring.cost(folder, kind)},
    "scale": {OURS: _scale},
}

ONCE = {("stop", _SCRIPT), ("stop", _TORCHRUN), ("scale", OURS)}
"""Sides measured once, so that their n is 1: two wait for the full patience, the third includes both kinds of ranks."""
