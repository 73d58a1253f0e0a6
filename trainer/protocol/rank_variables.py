"""Environment variables of a rank that its node's preparation sets: the interpreter and the caches."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

STAGE_VARIABLE, PYTHON_VARIABLE, CACHES_VARIABLE = "ORCH_STAGE", "ORCH_PYTHON", "ORCH_CACHES"
"""Folder of the unpacked `cluster.stage.archive`, its interpreter, and the run's folder below `cluster.caches`."""
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TRUE = ("1", "on", "yes", "true")


def rank_python(environ: Mapping[str, str]) -> str:
    """Return the interpreter of the ranks: the staged archive's, or this one."""
    return environ.get(PYTHON_VARIABLE) or sys.executable


def node_caches(folder: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for caches that the ranks of a node share; `environ` has what is set already.

    Hugging Face's files stay where they are if the job is offline: the new folder would be empty.
    """
    found = {CACHES_VARIABLE: str(folder), "TMPDIR": str(folder / "tmp")}
    if not any(environ.get(name, "").lower() in _TRUE for name in _OFFLINE):
        found["HF_HOME"] = str(folder / "huggingface")
        home = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME", ""), ".cache")
        token = Path(home, "huggingface", "token")  # of `hf auth login`
        found |= {"HF_TOKEN_PATH": str(token)} if "HF_HOME" not in environ and token.is_file() else {}
    return {name: value for name, value in found.items() if name not in environ}


def rank_caches(on_machine: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for compiler caches, which ranks must not share.

    `on_machine` numbers the job's ranks on one machine: with simulated nodes it is the rank, else the local rank.
    """
    folder = environ.get(CACHES_VARIABLE)
    if not folder:
        return {}
    names = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
    place = f"rank-{on_machine}"
    return {name: os.path.join(folder, place, part) for name, part in names.items() if name not in environ}
