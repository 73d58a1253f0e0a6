"""Location of a run: its folder, its cluster and its controller."""

import os
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import Precondition
from orchestrator.home import registry_path
from orchestrator.registry.lease import LeaseState, displayed_state, holder_host
from orchestrator.run_dirs.run_folder import foreign_reason
from orchestrator.run_view import RunView
from trainer.protocol.config_sections.scheduler_kinds import traits
from trainer.protocol.run_dir import RunDir

ASK_WITHIN = 2.0
"""Seconds to wait for a file system. A hung one must not block a status query."""
PUT_BACK = (
    "move it back or put a link there; or rebuild the registry from every folder that holds runs: "
    "`orch db rebuild --root FOLDER --root OTHER`"
)


def existing_folder(run: str, run_dir: str) -> RunDir:
    """Return the folder of a run. Raises Precondition if it is missing or belongs to another user."""
    if not Path(run_dir).is_dir():
        raise Precondition(_missing(run), where=run_dir, hint=PUT_BACK)
    if why := foreign_reason(Path(run_dir)):
        raise Precondition(why, where=run_dir, hint="ask who put it there; nothing in it is read")
    return RunDir(Path(run_dir))


def warn_of_missing(screen: Screen, run: str, run_dir: str) -> None:
    """Warn if the run's folder is missing; for verbs that work without it."""
    if _is_missing(run_dir):
        screen.warn("folder_missing", f"{_missing(run)}: {run_dir}; {PUT_BACK}")


def warn_of_moved(screen: Screen, view: RunView) -> None:
    """Warn if the run's folder is missing. A run that has never had a job may not have a folder yet."""
    if has_moved(view):
        warn_of_missing(screen, view.run, view.run_dir)


def has_moved(view: RunView) -> bool:
    """Return whether the run has had a job but its folder is gone."""
    return bool(view.job_id or view.attempts > 1) and _is_missing(view.run_dir)


def warn_of_lost_checkpoint(screen: Screen, view: RunView) -> None:
    """Warn if the newest checkpoint in the registry is gone from the run's folder."""
    last, path = view.last_checkpoint, view.saved_path or ""
    home = os.path.dirname(path)
    if last is None or home != str(RunDir(Path(view.run_dir)).checkpoints) or not _answers(home, there=True):
        return
    if _answers(path, there=False):
        listed = f"`orch ckpt ls {view.run}` shows which checkpoints are there"
        screen.warn("checkpoint_gone", f"the folder of step {last['step']} of {view.run} is gone; {listed}")


def _is_missing(run_dir: str) -> bool:
    """Return whether the folder is missing; False if its file system does not answer in time."""
    return _answers(run_dir, there=False)


def _answers(folder: str, *, there: bool) -> bool:
    """Return whether the file system confirms in time that the folder exists (or is missing, if `there` is False)."""
    answers: list[bool] = []

    def ask() -> None:
        try:
            answers.append(stat.S_ISDIR(os.stat(folder).st_mode))
        except (FileNotFoundError, NotADirectoryError):
            answers.append(False)
        except OSError:  # a folder without read permission: the state is unknown
            pass

    asker = threading.Thread(target=ask, name="folder", daemon=True)
    asker.start()
    asker.join(ASK_WITHIN)
    return answers == [there]


def _missing(run: str) -> str:
    return f"the folder of {run} is not there (moved, deleted, or its file system is not mounted here)"


START = "`orch controller start` starts one"
"""Command to type if no controller runs."""
TAKE_OVER = "`orch controller start` takes over once its lease has expired"
"""Command to type while a controller stalls."""


def controller_state(now: float, scheduler: str = "") -> LeaseState:
    """Return whether a controller drives the runs of this scheduler (empty: any), and if not, why it stalls."""
    from orchestrator.registry import fast_queries  # sqlite3: not imported for `orch --help`

    return displayed_state(fast_queries.lease(registry_path(), scheduler or None), now)


def controller_lives(now: float, scheduler: str = "") -> bool:
    """Return whether a controller drives the runs of this scheduler; empty matches a controller of any scheduler."""
    return controller_state(now, scheduler).alive


@dataclass(frozen=True, kw_only=True)
class RunLocation:
    """Scheduler of a run. `reached` is False only if this host reaches another cluster or no cluster."""

    run: str
    scheduler: str
    reached: bool
    lives: bool  # whether a controller for it is alive

    @property
    def is_local(self) -> bool:
        return self.scheduler.startswith("local@")

    @property
    def place(self) -> str:
        """Host on which to type commands for this run's controller."""
        return f"on {self.scheduler.partition('@')[2]}" if self.is_local else f"on a login node of {self.scheduler}"

    def require_answer(self) -> None:
        """Raise Precondition if no controller serves the run and none can be started from here."""
        if not self.reached and not self.lives:
            raise Precondition(
                f"no controller of {self.scheduler} runs, and {self.run} cannot be served from this host",
                where=last_seen(self.scheduler),
                hint=f"type `orch controller start` {self.place}",
            )


def locate_run(run: str, kind: str, scheduler: str) -> RunLocation:
    """Return the location of a run. Queries Slurm only if no controller for the run is alive."""
    lives = controller_lives(time.time(), scheduler)
    return RunLocation(run=run, scheduler=scheduler, lives=lives, reached=lives or reaches(kind, scheduler))


def reaches(kind: str, scheduler: str) -> bool:
    """Return whether this host reaches that scheduler; also True if this host's scheduler does not answer now."""
    from orchestrator.scheduler.available_schedulers import kinds, make_instance

    if not scheduler:
        return True
    if kind not in kinds():
        return False
    return make_instance(kind)() in ("", scheduler)


def where_to_start(scheduler: str, kind: str, here: str) -> str:
    """Return the host on which to start a controller for these runs; empty for this host or if unknown."""
    if not scheduler or scheduler == f"local@{here}":
        return ""
    return f"on {scheduler.partition('@')[2]}" if traits(kind).simulated_nodes else f"on a login node of {scheduler}"


def last_seen(scheduler: str) -> str:
    """Describe the host of this scheduler's last controller, or else give the registry's path."""
    from orchestrator.registry import fast_queries

    held = fast_queries.lease(registry_path(), scheduler)
    host = holder_host(held.holder) if held is not None else ""
    return f"the last one ran on {host}" if host else f"registry {registry_path()}"
