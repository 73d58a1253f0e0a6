"""Starts a run's own command from one of its checkpoints, and stops it after some steps. It keeps nothing it writes.

    python trial.py SCRATCH FOLDER COMMAND [ARGUMENT ...]   started by `restore_program.py`, once per rank or launcher,
                                                            in the namespaces of its node. SCRATCH is a folder of this
                                                            node, FOLDER the working folder.

The command sees no newer checkpoint than the one under test, and only temporary folders can be changed. The first
process of a node makes this view, and the others join it. Every process waits until all ranks have trained, so that
none loses its peers before.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ == "__main__":  # started by its path, so orch's packages are not importable otherwise
    sys.path[:] = [str(Path(__file__).resolve().parents[3]), *sys.path[1:]]

from checkpointing.storage.durable import read_json, write_durably
from trainer.agent.processes.proc import become_subreaper, descendants
from trainer.agent.user_command.checkpoints import find, find_other_rank, group
from trainer.agent.user_command.private_view import ViewError, make_private
from trainer.agent.user_command.program_saves import locate, read_saves
from trainer.agent.user_command.set_aside import retarget, stale_pointers
from trainer.protocol.command_progress import AUTO, CommandCheckpointsConfig
from trainer.protocol.config import load
from trainer.protocol.plain_data import build
from trainer.protocol.rank_progress.progress import ProgressCell
from trainer.protocol.restore_test import CHECKPOINT_VARIABLE, RestoreTestOrder, read_order
from trainer.protocol.run_dir import AttemptDir, RunDir

PAUSE = 0.2
"""Seconds between two readings of the ranks' steps."""
_MOST_NEWER = 1000
_VIEW_SECONDS, _OTHERS_SECONDS = 120.0, 60.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Result of one of the test's processes."""

    refused: str = ""  # why the command was not started
    steps: int = 0  # trained by each of its ranks
    restored: tuple[int, ...] = ()  # step from which each says that it continues; 0: from none, or it does not count
    ended: bool = False  # the command has ended by itself


def trial_file(attempt: AttemptDir, rank: int) -> Path:
    """Return the file with the result of the process that starts at this rank."""
    return attempt.outcomes / f"trial-{rank:05d}.json"


def read_trial(attempt: AttemptDir, rank: int) -> Trial:
    """Return a process's result. Raises OSError and ValueError."""
    return build(Trial, read_json(trial_file(attempt, rank)))


def first_rank() -> int:
    """Return the rank that this process starts, or the first one of its launcher."""
    environ = os.environ
    return int(environ.get("RANK") or int(environ.get("NODE_RANK", "0")) * int(environ.get("NPROC_PER_NODE", "1")))


def enter_namespaces(attempt: AttemptDir) -> list[str]:
    """Return the words that start a process in its node's namespaces; the first process of a node makes them.

    The others wait for it. Raises ViewError if it cannot make them.
    """
    if is_first_of_node():
        return ["unshare", "-rm"]
    until = time.monotonic() + _VIEW_SECONDS
    while not (file := _view_file(attempt)).exists():
        if time.monotonic() > until:
            raise ViewError(f"the first process of this node made no view within {_VIEW_SECONDS:.0f} s")
        time.sleep(PAUSE)
    made = read_json(file)
    if made["refused"]:
        raise ViewError(str(made["refused"]))
    return ["nsenter", "--preserve-credentials", "-U", "-m", "-t", str(made["pid"])]


def is_first_of_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _view_file(attempt: AttemptDir) -> Path:
    return attempt.outcomes / f"view-{first_rank() - int(os.environ.get('LOCAL_RANK', '0')):05d}.json"


def main(scratch: Path, folder: Path, command: list[str]) -> int:
    run = RunDir(Path(os.environ["ORCH_RUN_DIR"]))
    attempt, order = run.attempt(int(os.environ["ORCH_ATTEMPT"])), read_order(run)
    assert order is not None
    cells = _share_cells()
    if is_first_of_node():
        refused = make_view(folder, Path(os.environ[CHECKPOINT_VARIABLE]), order, run.path, scratch)
        write_durably(_view_file(attempt), json.dumps({"pid": os.getpid(), "refused": refused}).encode())
        if refused:
            _write(attempt, Trial(refused=refused))
            return 1
    os.chdir(folder)  # into the overlay
    code = train(command, cells, order.steps, attempt)
    if code == 0 and is_first_of_node():
        _await_others(attempt)
    if code < 0:  # it was killed
        os.kill(os.getpid(), signal.Signals(-code))
    return code


def make_view(folder: Path, checkpoint: Path, order: RestoreTestOrder, run: Path, scratch: Path) -> str:
    """Make what the node's processes see. Return why not, or ""."""
    try:
        if other := find_other_rank(checkpoint.parent):
            raise ViewError(f"each rank has a checkpoint folder of its own, such as {other}")
        make_private([folder, Path.home(), checkpoint.parent], checkpoint.parent, [run], scratch)
        hide_newer(checkpoint, order.step, find_config(RunDir(Path(order.run_dir))))
    except (ViewError, OSError) as error:
        foreign = isinstance(error, OSError) and error.errno == errno.EOVERFLOW
        why = f"{checkpoint.parent} belongs to another user or group, which a user namespace cannot write"
        return why if foreign else str(error)
    return ""


def _share_cells() -> list[ProgressCell]:
    """Return the cells of this process's ranks, and let the command open all inherited files through this process.

    It cannot open those of the agent, which is not in this namespace.
    """
    cells = []
    for name in ("ORCH_CELLS", "ORCH_STACKS"):
        descriptors = [int(path.rpartition("/")[2]) for path in os.environ.get(name, "").split(",") if path]
        os.environ[name] = ",".join(f"/proc/{os.getpid()}/fd/{one}" for one in descriptors)
        cells += [ProgressCell(one) for one in descriptors if name == "ORCH_CELLS"]
    own = os.environ.get("LOCAL_RANK", "")
    return [cells[int(own)]] if own else cells


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
    for other, main_entry, siblings in group(os.listdir(checkpoint.parent), config, _MOST_NEWER):
        for name in (main_entry, *siblings) if other > step else ():
            _remove(checkpoint.parent / name)
    found, _ = find(checkpoint.parent, config)
    if found and found[0].path == checkpoint:
        for pointer in stale_pointers(found[0], config):
            retarget(pointer, checkpoint.parent / ".orch-pointer" / "new")


def _remove(path: Path) -> None:
    """Delete an entry, unless the run has just deleted it itself. Raises OSError."""
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def train(command: list[str], cells: list[ProgressCell], steps: int, attempt: AttemptDir) -> int:
    """Run the command until all ranks have trained `steps` steps. Return 0, or its exit code if it ends before."""
    become_subreaper()
    try:
        process = subprocess.Popen(command)
    except FileNotFoundError:
        return 127
    except PermissionError:
        return 126
    reached = False
    while process.poll() is None:
        # One step more: a rank may report the loss of a step after its end.
        if not reached and (now := read_steps(cells)).steps > steps:
            reached = True
            _write(attempt, now)
        if reached and _all_have_trained(attempt):
            break
        time.sleep(PAUSE)
    if not reached:
        _write(attempt, Trial(**{**asdict(read_steps(cells)), "ended": True}))
    _kill_all()
    code = process.wait()
    return 0 if reached else code


def read_steps(cells: list[ProgressCell]) -> Trial:
    """Return how many steps each of these ranks has trained at least, and where they continued."""
    found = [cell.read() for cell in cells]
    rows = [now for now in found if now is not None]
    done = [max(0, now.step - now.restored_step) for now in rows] if len(rows) == len(cells) else [0]
    return Trial(steps=min(done, default=0), restored=tuple(now.restored_step for now in rows))


def _all_have_trained(attempt: AttemptDir) -> bool:
    environ = os.environ
    processes = int(environ["WORLD_SIZE"]) if "LOCAL_RANK" in environ else int(environ.get("NNODES", "1"))
    return sum(name.startswith("trial-") for name in os.listdir(attempt.outcomes)) >= processes


def _await_others(attempt: AttemptDir) -> None:
    """Wait until the commands of this node's other ranks have ended; what they have written is deleted then."""
    first, until = first_rank(), time.monotonic() + _OTHERS_SECONDS
    others = range(first + 1, first + int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    while time.monotonic() < until and not all(trial_file(attempt, rank).exists() for rank in others):
        time.sleep(PAUSE)


def _write(attempt: AttemptDir, trial: Trial) -> None:
    write_durably(trial_file(attempt, first_rank()), json.dumps(asdict(trial)).encode())


def _kill_all() -> None:
    """Kill everything that the command has started, also what has left its process group."""
    own = os.getpid()
    while others := [pid for pid in descendants([own])[own] if pid != own]:
        for pid in others:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
