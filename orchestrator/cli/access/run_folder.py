"""Location of a run: its folder, its cluster and its controller."""

import os
import stat
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orchestrator.cli.terminal.render import Screen
from orchestrator.controller.leasing.lease import LeaseState, displayed_state, host_of
from orchestrator.controller.run_dirs.run_folder import foreign
from orchestrator.errors import Precondition
from orchestrator.home import registry_path
from trainer.contract.config_sections.scheduler_kinds import traits
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


START = "`orch controller start` starts one"
"""What to type where no controller runs."""
TAKE_OVER = "`orch controller start` takes over once its lease has expired"
"""What to type while a controller stalls."""


def controller_state(now: float, scheduler: str = "") -> LeaseState:
    """Whether a controller drives the runs of this scheduler (empty: of any), or stalls instead, and why."""
    from orchestrator.registry import fast_queries  # sqlite3: not for `orch --help`

    return displayed_state(fast_queries.lease(registry_path(), scheduler or None), now)


def controller_lives(now: float, scheduler: str = "") -> bool:
    """Whether a controller drives the runs of this scheduler; whether any lives where that is not known (empty)."""
    return controller_state(now, scheduler).alive


@dataclass(frozen=True, kw_only=True)
class RunLocation:
    """Where a run is served: `reached` is False only when this host is known to reach another cluster, or none."""

    run: str
    scheduler: str
    reached: bool
    lives: bool  # whether a controller for it lives

    @property
    def is_local(self) -> bool:
        return self.scheduler.startswith("local@")

    @property
    def place(self) -> str:
        """Where to type what is for this run's controller."""
        return f"on {self.scheduler.partition('@')[2]}" if self.is_local else f"on a login node of {self.scheduler}"

    def require_answer(self) -> None:
        """Raise Precondition when nobody serves the run, and nobody can from here."""
        if not self.reached and not self.lives:
            raise Precondition(
                f"no controller of {self.scheduler} runs, and {self.run} cannot be served from this host",
                where=last_seen(self.scheduler),
                hint=f"type `orch controller start` {self.place}",
            )


def locate_run(row: dict[str, Any]) -> RunLocation:
    """The location of a run by its status row; Slurm is asked only when no controller for it lives."""
    run, kind, scheduler = row["run"], row["cluster"], row["scheduler"]
    lives = controller_lives(time.time(), scheduler)
    return RunLocation(run=run, scheduler=scheduler, lives=lives, reached=lives or reaches(kind, scheduler))


def reaches(kind: str, scheduler: str) -> bool:
    """Whether this host reaches that scheduler; one that does not answer just now may well be it."""
    from orchestrator.scheduler.available_schedulers import instance_of, kinds

    if not scheduler:
        return True
    if kind not in kinds():
        return False
    return instance_of(kind)() in ("", scheduler)


def where_to_start(scheduler: str, kind: str, here: str) -> str:
    """On which host a controller for these runs is started; empty for this one, and where that is not known."""
    if not scheduler or scheduler == f"local@{here}":
        return ""
    return f"on {scheduler.partition('@')[2]}" if traits(kind).simulated_nodes else f"on a login node of {scheduler}"


def last_seen(scheduler: str) -> str:
    """Where the last controller of this scheduler ran."""
    from orchestrator.registry import fast_queries

    held = fast_queries.lease(registry_path(), scheduler)
    host = host_of(held.holder) if held is not None else ""
    return f"the last one ran on {host}" if host else f"registry {registry_path()}"
