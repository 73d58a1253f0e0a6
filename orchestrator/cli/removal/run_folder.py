"""The folder of a run that is to be removed: proved to be its own, renamed, then deleted."""

import os
import shlex
import shutil
import stat
from pathlib import Path

from checkpointing.storage.durable import NotAFile, fsync_dir, read_json
from orchestrator.errors import Precondition
from orchestrator.registry.operations.removal_writes import Removal
from orchestrator.registry.records import Attempt, Run
from trainer.contract.run_dir import RunDir


def aside(run: Run, first: Attempt) -> Path:
    """The name that the folder of a run bears while it is deleted; nobody else's has it."""
    folder = Path(run.run_dir)
    return folder.with_name(f".{run.name}.{first.nonce}.removed")


def own_folder(run: Run, first: Attempt, *, submitted: bool) -> Path | None:
    """Where the files of a run are now; None where there are none any more, or never were.

    Raises Precondition for a folder that is not known to be this run's, and for one that cannot be seen or read.
    """
    renamed, folder = aside(run, first), Path(run.run_dir)
    if _is_there(run, renamed):
        # Only `orch rm` makes this name; what was half deleted may have lost its run.json.
        _require_own_folder(run, renamed)
        return renamed
    if _is_there(run, folder):
        _require_own_folder(run, folder)
        _require_owner(run, folder, first)
        return folder
    if submitted and run.removal != Removal.SET_ASIDE:
        raise foreign_folder(run, f"the folder of {run.name} is not there", "mount its file system")
    return None


def _is_there(run: Run, folder: Path) -> bool:
    try:
        os.lstat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise _unreadable(run, error, folder, "see that you may enter the folders above it") from error
    return True


def _unreadable(run: Run, error: OSError, place: Path, cure: str) -> Precondition:
    """What cannot be read may well be the run's own: to forget it is no cure."""
    what = f"the folder of {run.name} cannot be read: {error.strerror or error}"
    hint = f"{cure}, then type the same command again" if isinstance(error, PermissionError) else "orch doctor"
    return Precondition(what, where=str(place), hint=hint)


def _require_own_folder(run: Run, folder: Path) -> None:
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no folder"
        raise foreign_folder(run, f"{folder} is {what}: orch made a folder there", "remove it yourself")
    if found.st_uid != os.geteuid():
        raise foreign_folder(run, f"{folder} belongs to another user (uid {found.st_uid})", "ask its owner")


def _require_owner(run: Run, folder: Path, first: Attempt) -> None:
    try:
        owner = read_json(RunDir(folder).run)
    except (FileNotFoundError, NotADirectoryError, NotAFile, ValueError):
        owner = None
    except OSError as error:
        raise _unreadable(run, error, RunDir(folder).run, f"chmod u+rwx {shlex.quote(str(folder))}") from error
    if not isinstance(owner, dict) or (owner.get("name"), owner.get("nonce")) != (run.name, first.nonce):
        raise foreign_folder(run, f"the folder is not known to be that of {run.name}", "look at its run.json")


def foreign_folder(run: Run, what: str, cure: str) -> Precondition:
    """The refusal to delete a folder that is not this run's alone."""
    hint = f"{cure}; to forget the run and touch no file: orch rm {run.name} --forget"
    return Precondition(what, where=run.run_dir, hint=hint)


def set_aside(run: Run, first: Attempt, folder: Path) -> Path:
    """Rename the folder, so that nobody finds half of it under the run's name; raises OSError."""
    renamed = aside(run, first)
    if folder != renamed:
        os.rename(folder, renamed)
        fsync_dir(renamed.parent)
    return renamed


def delete_tree(folder: Path) -> None:
    """Delete a folder and all that is in it, links themselves and never what they lead to; raises OSError."""
    shutil.rmtree(folder)
    fsync_dir(folder.parent)


def bytes_below(folder: Path) -> int:
    """The bytes that deleting a folder frees: files with further names elsewhere keep theirs."""
    total, places = 0, [folder]
    while places:
        with os.scandir(places.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    places.append(Path(entry.path))
                    continue
                found = entry.stat(follow_symlinks=False)
                total += found.st_size if found.st_nlink == 1 else 0
    return total
