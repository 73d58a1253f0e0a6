"""Where runs of `orch demo` and `orch drill --demo` lie."""

from pathlib import Path

from orchestrator.errors import ConfigError, Precondition
from orchestrator.home import state_home


def demo_root(given: Path | None) -> Path:
    """The folder of demos, made when it is missing; raises ConfigError for a file, Precondition when it cannot be."""
    folder = (given or state_home() / "demo-runs").expanduser().absolute()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        taken = next((place for place in (folder, *folder.parents) if place.is_file()), folder)
        raise ConfigError(f"{taken} is a file, and must be a folder", where="--root", hint="--root FOLDER") from error
    except OSError as error:
        what = f"the folder for the demo's runs cannot be made: {error.strerror}"
        raise Precondition(what, where=str(folder), hint="--root FOLDER") from error
    return folder
