"""Where orch keeps its own state: the registry, the controller's log, saved tracebacks."""

import os
from collections.abc import Mapping
from pathlib import Path

from checkpointing.storage.trusted_path import check_unshared


def state_home(environ: Mapping[str, str] = os.environ) -> Path:
    """`ORCH_HOME`, or `orch` below the XDG state folder; made private to the user on first use.

    Raises NotPrivate where others could change what is in it, else OSError, whose `filename` says which variable
    named the folder.
    """
    variable = next((name for name in ("ORCH_HOME", "XDG_STATE_HOME") if environ.get(name)), "")
    home = Path(environ[variable] if variable else "~/.local/state").expanduser().absolute()
    home = home if variable == "ORCH_HOME" else home / "orch"
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = "it is no folder" if isinstance(error, FileExistsError) else error.strerror
        source = f"{variable}={environ[variable]}" if variable else str(home)
        raise OSError(error.errno, f"the state folder cannot be made: {why}", source) from error
    check_unshared(home, then="ORCH_HOME=FOLDER")
    return home


def registry_path(environ: Mapping[str, str] = os.environ) -> Path:
    """`ORCH_REGISTRY` (a file name), or `registry.db` in the state folder; raises as `state_home`."""
    named = environ.get("ORCH_REGISTRY")
    if not named:
        return state_home(environ) / "registry.db"
    path = Path(named).expanduser().absolute()
    check_unshared(path.parent, then="ORCH_REGISTRY=FILE")
    return path
