"""Environment variables through which the start-up module in a user's program finds its rank's files.

Launchers close descriptors that they do not know, so the module opens the agent's descriptors by path.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.protocol.flight_variables import FLIGHT_DEFAULTS, FLIGHT_FILE

STARTUP = Path(__file__).parents[1] / "instrument" / "python_path"
"""Folder that contains nothing but the start-up module, `sitecustomize.py`."""
_PATHS = ("PYTHONPATH", "JOB_PYTHONPATH")
"""Variables that hold a program's import path; a configuration made from an sbatch script sets one from the other."""


@dataclass(frozen=True, kw_only=True)
class RankFiles:
    """The agent's descriptors, and the socket paths, of a node's ranks in the order of LOCAL_RANK."""

    cells: tuple[int, ...]
    stacks: tuple[int, ...]
    sockets: tuple[str, ...]  # of torch's worker servers; "" if a rank cannot listen


def instrument(
    files: RankFiles, environ: Mapping[str, str], watchdog: Path, saves: Path, states: Sequence[str] = ()
) -> dict[str, str]:
    """Return the variables to add to a program's `environ`. NCCL's watchdog writes its records beside `watchdog`, and
    the ranks list their checkpoints in `saves`. `states` are the digests of their parameters in the one that they
    restore.
    """
    recorder = {**FLIGHT_DEFAULTS, FLIGHT_FILE: str(watchdog)}
    return {
        "ORCH_INSTRUMENT": "auto",
        "ORCH_CELLS": ",".join(map(_path, files.cells)),
        "ORCH_STACKS": ",".join(map(_path, files.stacks)),
        "ORCH_FLIGHTS": ",".join(files.sockets),
        "ORCH_SAVED": str(saves),
        **({"ORCH_RESUME_STATE": ",".join(states)} if any(states) else {}),
        **{name: value for name, value in recorder.items() if name not in environ},
        **{name: _startup_first(environ.get(name, "")) for name in _PATHS if name == _PATHS[0] or name in environ},
    }


def _path(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def _startup_first(path: str) -> str:
    return os.pathsep.join(filter(None, [str(STARTUP), path]))
