"""Locations of orch's own state (the registry, the controller's log, saved tracebacks) and of its shipped files."""

import errno
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from checkpointing.storage.trusted_path import check_unshared
from orchestrator.errors import ConfigError, RegistryError


def expand_home(text: str) -> str:
    """Return the path with ~ expanded. Unlike `os.path`, raises RuntimeError if the home folder is unknown."""
    if text == "~" or text.startswith("~/"):
        Path.home()
    return os.path.expanduser(text)


def shipped_folder(name: str) -> Path:
    """Return the path of `configs` or `sbatch_templates`: next to the packages, or inside `orchestrator` in a wheel."""
    here = Path(__file__).resolve().parent
    packed = here / "data" / name
    return packed if packed.is_dir() else here.parent / name


def state_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Return `ORCH_HOME`, or `orch` below the XDG state folder. The folder may not exist yet (see `make_state_home`).

    Raises NotPrivate if other users could change its contents, or OSError with the variable in use as `filename`.
    """
    home, source = _configured_home(environ)
    existing = next(place for place in (home, *home.parents) if os.path.lexists(place))
    if not existing.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "the state folder cannot be created: it is not a folder", source)
    check_unshared(existing, then="ORCH_HOME=FOLDER")
    return home


def make_state_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Create the state folder, private to the user, before the first write. Raises the same errors as `state_home`."""
    home, source = state_home(environ), _configured_home(environ)[1]
    try:
        for folder in (*reversed(home.parents), home):  # `parents=True` would leave their modes to the umask
            folder.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise OSError(error.errno, f"the state folder cannot be created: {error.strerror}", source) from error
    return state_home(environ)


def _configured_home(environ: Mapping[str, str]) -> tuple[Path, str]:
    """Return the state folder, and the setting that names it, for messages."""
    variable = next((name for name in ("ORCH_HOME", "XDG_STATE_HOME") if environ.get(name)), "")
    home = Path(environ[variable] if variable else "~/.local/state").expanduser().absolute()
    home = home if variable == "ORCH_HOME" else home / "orch"
    return home, f"{variable}={environ[variable]}" if variable else str(home)


def registry_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Return `ORCH_REGISTRY` (a file name), or `registry.db` in the state folder.

    Raises the same errors as `state_home`. Also raises ConfigError for a URL, and RegistryError for a path that cannot
    be a database.
    """
    named = environ.get("ORCH_REGISTRY")
    if named and re.match(r"(?:file|sqlite):|\w+://", named):
        hint = "name the file: ORCH_REGISTRY=/path/on/a/local/disk/registry.db"
        raise ConfigError("ORCH_REGISTRY must be a file name, not a URL", where=f"ORCH_REGISTRY={named}", hint=hint)
    path = Path(named).expanduser().absolute() if named else state_home(environ) / "registry.db"
    if named:
        check_unshared(path.parent, then="ORCH_REGISTRY=FILE")
    if why := _no_database(path):
        hint = "fix that, or set ORCH_REGISTRY=/path/on/a/local/disk/registry.db"
        raise RegistryError(f"the registry cannot be opened: {why}", where=str(path), hint=hint)
    return path


def _no_database(path: Path) -> str:
    """Return why this path cannot become a database, or "" for a file, a folder or a missing file.

    SQLite blocks forever on a pipe, and a broken link would look like an empty registry.
    """
    try:
        mode = path.stat().st_mode
    except OSError:
        broken = path.is_symlink() and not path.parent.joinpath(os.readlink(path)).parent.is_dir()
        circle = path.is_symlink() and os.readlink(path) in (path.name, str(path))
        return "it is a broken link" if broken or circle else ""
    return "" if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "it is a pipe or a device"


def controller_log() -> Path:
    """Return the log file of this home's controllers."""
    return state_home() / "controller.log"
