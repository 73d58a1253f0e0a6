"""The view that all processes of one node have in a restore test of a run's own command.

    python trial_view.py SCRATCH FOLDER    started by `restore_program.py` of the node's first process, in new
                                           namespaces as their PID 1. SCRATCH is a folder of this node, FOLDER the
                                           working folder.

It holds the namespaces until the process that has started it ends; all processes in them are killed then. They see no
newer checkpoint than the one under test, and no process outside.
"""

import errno
import json
import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

if __name__ == "__main__":  # started by its path, so orch's packages are not importable otherwise
    sys.path[:] = [str(Path(__file__).resolve().parents[3]), *sys.path[1:]]

from checkpointing.storage.durable import read_json, write_durably
from trainer.agent.user_command.checkpoints import find, find_other_rank, group
from trainer.agent.user_command.private_view import NAMESPACES, ViewError, make_private
from trainer.agent.user_command.program_saves import locate, read_saves
from trainer.agent.user_command.set_aside import pointers_to, retarget, stale_pointers
from trainer.protocol.checkpoint_seal import list_files
from trainer.protocol.command_progress import AUTO, CommandCheckpointsConfig
from trainer.protocol.config import load
from trainer.protocol.restore_test import CHECKPOINT_VARIABLE, RestoreTestOrder, read_order
from trainer.protocol.run_dir import AttemptDir, RunDir

PAUSE = 0.2
"""Seconds between two looks for the view of another process."""
_MOST_NEWER = 1000
_VIEW_SECONDS = 120.0


def first_rank() -> int:
    """Return the rank that this process starts, or the first one of its launcher."""
    environ = os.environ
    return int(environ.get("RANK") or int(environ.get("NODE_RANK", "0")) * int(environ.get("NPROC_PER_NODE", "1")))


def is_first_of_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def enter_view(attempt: AttemptDir, scratch: Path) -> list[str]:
    """Return the words that start a process in the view of its node, which the node's first process makes.

    Raises ViewError if it cannot be made.
    """
    holder = _start_holder(scratch) if is_first_of_node() else 0
    until = time.monotonic() + _VIEW_SECONDS
    while not (file := _view_file(attempt)).exists():
        if holder and os.waitpid(holder, os.WNOHANG)[0]:
            raise ViewError("the process that makes this node's view has died")
        if time.monotonic() > until:
            raise ViewError(f"the first process of this node made no view within {_VIEW_SECONDS:.0f} s")
        time.sleep(PAUSE)
    made = read_json(file)
    if made["refused"]:
        raise ViewError(str(made["refused"]))
    return ["nsenter", "--preserve-credentials", "-U", "-m", "-p", "-i", "-t", str(made["pid"])]


def _start_holder(scratch: Path) -> int:
    """Start the process that makes and holds the view, and return its PID.

    It reads from a pipe that only the end of this process closes. If a rank fails, its peers in the view are killed
    after it has reported why.
    """
    reading, _ = os.pipe()
    words = [*NAMESPACES, sys.executable, __file__, str(scratch), os.getcwd()]
    actions = [(os.POSIX_SPAWN_DUP2, reading, 0)]
    holder = os.posix_spawnp(words[0], words, os.environ, file_actions=actions)
    os.close(reading)
    return holder


def _view_file(attempt: AttemptDir) -> Path:
    return attempt.outcomes / f"view-{first_rank() - int(os.environ.get('LOCAL_RANK', '0')):05d}.json"


def main(scratch: Path, folder: Path) -> int:
    pid = int(os.readlink("/proc/self"))  # as the processes outside see it
    run = RunDir(Path(os.environ["ORCH_RUN_DIR"]))
    attempt, order = run.attempt(int(os.environ["ORCH_ATTEMPT"])), read_order(run)
    assert order is not None
    refused = make_view(folder, Path(os.environ[CHECKPOINT_VARIABLE]), order, run.path, scratch)
    write_durably(_view_file(attempt), json.dumps({"pid": pid, "refused": refused}).encode())
    if refused:
        return 1
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the orphans of these namespaces
    sys.stdin.read()
    return 0


def make_view(folder: Path, checkpoint: Path, order: RestoreTestOrder, run: Path, scratch: Path) -> str:
    """Make what the node's processes see. Return why not, or ""."""
    sockets = {Path(path).parent for path in os.environ.get("ORCH_FLIGHTS", "").split(",") if path}
    try:
        if other := find_other_rank(checkpoint.parent):
            raise ViewError(f"each rank has a checkpoint folder of its own, such as {other}")
        make_private([folder, Path.home(), checkpoint.parent], checkpoint.parent, [run, *sockets], scratch)
        hide_newer(checkpoint, order.step, find_config(RunDir(Path(order.run_dir))))
    except (ViewError, OSError) as error:
        foreign = isinstance(error, OSError) and error.errno == errno.EOVERFLOW
        why = f"{checkpoint.parent} belongs to another user or group, which a user namespace cannot write"
        return why if foreign else str(error)
    return ""


def find_config(source: RunDir) -> CommandCheckpointsConfig:
    """Return where a run saves: as configured, or as its saves show."""
    configured = load(source, source.newest_attempt).checkpoints
    if not configured.path:
        fixed = "" if configured.adapter == AUTO else configured.adapter
        place = locate(read_saves(source.all_attempts()), fixed)
        configured = configured if place is None else place.config
    return configured


def hide_newer(checkpoint: Path, step: int, config: CommandCheckpointsConfig) -> None:
    """Delete newer checkpoints in the overlay, and make pointers name the tested one. Raises OSError."""
    newer = [one for one in find(checkpoint.parent, config)[0] if one.step > step]
    for other, main_entry, siblings in group(os.listdir(checkpoint.parent), config, _MOST_NEWER):
        for name in (main_entry, *siblings) if other > step else ():
            _remove(checkpoint.parent / name)
    found, _ = find(checkpoint.parent, config)
    if found and found[0].path == checkpoint:
        by_name = [pointer for one in newer for pointer in pointers_to(one, found[0])]
        for pointer in (*by_name, *stale_pointers(found[0], config)):
            retarget(pointer, checkpoint.parent / ".orch-pointer" / "new")


def list_tested(checkpoint: Path, config: CommandCheckpointsConfig) -> list[Path]:
    """Return the files of a checkpoint. None is opened. Raises OSError."""
    for _, main_entry, siblings in group(os.listdir(checkpoint.parent), config, _MOST_NEWER):
        if main_entry == checkpoint.name:
            return list(list_files(checkpoint, siblings).values())
    return list(list_files(checkpoint).values())


def _remove(path: Path) -> None:
    """Delete an entry, unless the run has just deleted it itself. Raises OSError."""
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
