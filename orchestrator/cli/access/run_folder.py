"""Whether a run's folder is where the registry says: people move folders, and file systems are not mounted."""

from pathlib import Path

from orchestrator.cli.terminal.render import Screen
from orchestrator.controller.run_dirs.own_folder import foreign
from orchestrator.errors import Precondition
from trainer.contract.run_dir import RunDir

_PUT_BACK = (
    "move it back or put a link there; `orch db rebuild --root FOLDER` registers the runs of a folder at a new place"
)


def existing_folder(run: str, run_dir: str) -> RunDir:
    """The folder of a run; raises Precondition when it is not there."""
    if not Path(run_dir).is_dir():
        raise Precondition(_missing(run), where=run_dir, hint=_PUT_BACK)
    if why := foreign(Path(run_dir)):
        raise Precondition(why, where=run_dir, hint="ask who put it there; nothing in it is read")
    return RunDir(Path(run_dir))


def warn_of_missing(screen: Screen, run: str, run_dir: str) -> None:
    """For verbs that can answer without it."""
    if not Path(run_dir).is_dir():
        screen.warn("folder_missing", f"{_missing(run)}: {run_dir}; {_PUT_BACK}")


def _missing(run: str) -> str:
    return f"the folder of {run} is not there (moved, deleted, or its file system is not mounted here)"
