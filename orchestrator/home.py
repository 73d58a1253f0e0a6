"""Where orch keeps its own state: the registry, the controller's log, saved tracebacks."""

import os
from collections.abc import Mapping
from pathlib import Path


def state_home(environ: Mapping[str, str] = os.environ) -> Path:
    """`ORCH_HOME`, or `orch` below the XDG state folder; made private to the user on first use."""
    base = environ.get("ORCH_HOME")
    if base:
        home = Path(base).expanduser().absolute()
    else:
        state = environ.get("XDG_STATE_HOME") or "~/.local/state"
        home = Path(state).expanduser().absolute() / "orch"
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    return home


def registry_path(environ: Mapping[str, str] = os.environ) -> Path:
    """`ORCH_REGISTRY` (a file name), or `registry.db` in the state folder."""
    named = environ.get("ORCH_REGISTRY")
    return Path(named).expanduser().absolute() if named else state_home(environ) / "registry.db"
