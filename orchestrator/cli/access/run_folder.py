"""Whether a run's folder is where the registry says: people move folders, and file systems are not mounted."""

import os
import stat
import threading
from pathlib import Path
from typing import Any

from orchestrator.cli.terminal.render import Screen
from orchestrator.controller.run_dirs.own_folder import foreign
from orchestrator.errors import Precondition
from trainer.contract.run_dir import RunDir

ASK_WITHIN = 2.0
"""Seconds in which a file system is to answer: one that hangs holds up nobody who asks for the state of a run."""
PUT_BACK = (
    "move it back or put a link there; or make the registry anew from every folder that holds runs: "
    "`orch db rebuild --root FOLDER --root OTHER`"
)


def existing_folder(run: str, run_dir: str) -> RunDir:
    """The folder of a run; raises Precondition when it is not there."""
    if not Path(run_dir).is_dir():
        raise Precondition(_missing(run), where=run_dir, hint=PUT_BACK)
    if why := foreign(Path(run_dir)):
        raise Precondition(why, where=run_dir, hint="ask who put it there; nothing in it is read")
    return RunDir(Path(run_dir))


def warn_of_missing(screen: Screen, run: str, run_dir: str) -> None:
    """For verbs that can answer without it."""
    if _is_missing(run_dir):
        screen.warn("folder_missing", f"{_missing(run)}: {run_dir}; {PUT_BACK}")


def warn_of_moved(screen: Screen, row: dict[str, Any]) -> None:
    """The same by a status row: a run that has never had a job may have no folder yet."""
    if has_moved(row):
        screen.warn("folder_missing", f"{_missing(row['run'])}: {row['run_dir']}; {PUT_BACK}")


def has_moved(row: dict[str, Any]) -> bool:
    """Whether a run that has had a job, by its status row, has no folder any more."""
    return bool(row["job_id"] or row["attempts"] > 1) and _is_missing(row["run_dir"])


def warn_of_lost_checkpoint(screen: Screen, row: dict[str, Any]) -> None:
    """Say of a status row that the newest checkpoint, as the registry has it, is not in the run's folder any more."""
    last, path = row["last_checkpoint"], row["saved_path"] or ""
    home = os.path.dirname(path)
    if last is None or home != str(RunDir(Path(row["run_dir"])).checkpoints) or not _answers(home, there=True):
        return
    if _answers(path, there=False):
        run, step = row["run"], last["step"]
        words = f"the folder of step {step} of {run} is gone; `orch ckpt ls {run}` shows which checkpoints are there"
        screen.warn("checkpoint_gone", words)


def _is_missing(run_dir: str) -> bool:
    """Whether it is not there; False when its file system does not say in time."""
    return _answers(run_dir, there=False)


def _answers(folder: str, *, there: bool) -> bool:
    """Whether its file system says in time that a folder is there, or is not."""
    said: list[bool] = []

    def ask() -> None:
        try:
            said.append(stat.S_ISDIR(os.stat(folder).st_mode))
        except (FileNotFoundError, NotADirectoryError):
            said.append(False)
        except OSError:  # a folder that may not be looked into says nothing of what is in it
            pass

    asker = threading.Thread(target=ask, name="folder", daemon=True)
    asker.start()
    asker.join(ASK_WITHIN)
    return said == [there]


def _missing(run: str) -> str:
    return f"the folder of {run} is not there (moved, deleted, or its file system is not mounted here)"
