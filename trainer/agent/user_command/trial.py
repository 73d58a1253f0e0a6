"""Starts a run's own command from one of its checkpoints, and stops it after some steps. It keeps nothing it writes.

    python trial.py FOLDER COMMAND [ARGUMENT ...]   started by `restore_program.py`, once per rank or launcher, in the
                                                    view of its node (`trial_view.py`). FOLDER is the working folder.

Every process waits until all ranks have trained, so that none loses its peers before.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

if __name__ == "__main__":  # started by its path, so orch's packages are not importable otherwise
    sys.path[:] = [str(Path(__file__).resolve().parents[3]), *sys.path[1:]]

from checkpointing.storage.durable import read_json, write_durably
from trainer.agent.processes.proc import become_subreaper, descendants
from trainer.agent.user_command.opened_files import OpenedFiles
from trainer.agent.user_command.trial_view import find_config, first_rank, is_first_of_node, list_tested
from trainer.protocol.plain_data import build
from trainer.protocol.rank_progress.progress import ProgressCell
from trainer.protocol.restore_test import CHECKPOINT_VARIABLE, read_order
from trainer.protocol.run_dir import AttemptDir, RunDir

PAUSE = 0.2
"""Seconds between two readings of the ranks' steps."""
_OTHERS_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Result of one of the test's processes."""

    refused: str = ""  # why the command was not started
    steps: int = 0  # trained by each of its ranks
    restored: tuple[int, ...] = ()  # step from which each says that it continues; 0: from none, or it does not count
    ended: bool = False  # the command has ended by itself
    opened: bool = False  # a process of the node has opened a file of the checkpoint


def trial_file(attempt: AttemptDir, rank: int) -> Path:
    """Return the file with the result of the process that starts at this rank."""
    return attempt.outcomes / f"trial-{rank:05d}.json"


def read_trial(attempt: AttemptDir, rank: int) -> Trial:
    """Return a process's result. Raises OSError and ValueError."""
    return build(Trial, read_json(trial_file(attempt, rank)))


def has_opened(attempt: AttemptDir) -> bool:
    """Return whether a process of any node has opened a file of the checkpoint. Raises OSError and ValueError."""
    return any(build(Trial, read_json(file)).opened for file in attempt.outcomes.glob("trial-*.json"))


def main(folder: Path, command: list[str]) -> int:
    run = RunDir(Path(os.environ["ORCH_RUN_DIR"]))
    attempt, order = run.attempt(int(os.environ["ORCH_ATTEMPT"])), read_order(run)
    assert order is not None
    cells = _share_cells()
    os.chdir(folder)  # into the overlay
    checkpoint = Path(os.environ[CHECKPOINT_VARIABLE])
    try:
        opened = OpenedFiles(list_tested(checkpoint, find_config(RunDir(Path(order.run_dir)))))
    except OSError as error:  # the node's limits of inotify
        _write(attempt, Trial(refused=f"whether it opens {checkpoint.name} cannot be seen: {error}"))
        return 1
    code = train(command, cells, order.steps, attempt, opened)
    if code == 0 and is_first_of_node():
        _await_others(attempt)
    if code < 0:  # it was killed
        os.kill(os.getpid(), signal.Signals(-code))
    return code


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


def train(command: list[str], cells: list[ProgressCell], steps: int, attempt: AttemptDir, opened: OpenedFiles) -> int:
    """Run the command until all ranks have trained `steps` steps. Return 0, or its exit code if it ends before."""
    become_subreaper()
    try:
        # The group of this process has no number in these namespaces, so its signals would reach others.
        process = subprocess.Popen(command, start_new_session=True)
    except FileNotFoundError:
        return 127
    except PermissionError:
        return 126
    reached = False
    while process.poll() is None:
        # One step more: a rank may report the loss of a step after its end.
        if not reached and (now := read_steps(cells)).steps > steps:
            reached = True
            _write(attempt, replace(now, opened=opened.is_any_opened()))
        if reached and _all_have_trained(attempt):
            break
        time.sleep(PAUSE)
    if not reached:
        _write(attempt, replace(read_steps(cells), ended=True, opened=opened.is_any_opened()))
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
    """Wait until this node's other ranks have ended: they are killed with the view, soon after this process's end."""
    first, until = first_rank(), time.monotonic() + _OTHERS_SECONDS
    files = [trial_file(attempt, first + rank) for rank in range(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))]
    own = {"1", str(os.getpid())}
    while time.monotonic() < until and not all(file.exists() for file in files):
        time.sleep(PAUSE)
    while time.monotonic() < until and any(name.isdigit() and name not in own for name in os.listdir("/proc")):
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
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
