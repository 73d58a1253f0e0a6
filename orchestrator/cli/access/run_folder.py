"""Location of a run: its folder, its cluster and its controller."""

import os
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import Precondition
from orchestrator.home import registry_path
from orchestrator.registry import fast_queries
from orchestrator.registry.lease import LeaseState, displayed_state, holder_host, host_name
from orchestrator.run_dirs.run_folder import foreign_reason
from orchestrator.run_view import RunView
from trainer.protocol.config_sections.scheduler_kinds import LOCAL
from trainer.protocol.run_dir import RunDir

T = TypeVar("T")
ASK_WITHIN = 2.0
"""Seconds to wait for a file system. A hung file system must not block a status query."""
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
    """Warn if the run's folder is missing, for verbs that work without it."""
    if _is_folder(run_dir) is False:
        screen.warn("folder_missing", f"{_missing(run)}: {run_dir}; {PUT_BACK}")


def has_moved(view: RunView) -> bool:
    """Return whether the run's folder is gone. A run that has never had a job may not have a folder yet."""
    return bool(view.job_id or view.attempts > 1) and _is_folder(view.run_dir) is False


def warn_of_lost_checkpoint(screen: Screen, view: RunView) -> None:
    """Warn if the newest checkpoint in the registry is gone from the run's folder."""
    last, path = view.last_checkpoint, view.saved_path or ""
    home = os.path.dirname(path)
    if last is None or home != str(RunDir(Path(view.run_dir)).checkpoints):
        return
    if _is_folder(home) and _is_folder(path) is False:
        listed = f"`orch ckpt ls {view.run}` shows which checkpoints remain"
        screen.warn("checkpoint_gone", f"the folder of step {last['step']} of {view.run} is gone; {listed}")


def _is_folder(path: str) -> bool | None:
    """Return whether the folder exists; None if its file system does not answer in time or denies access."""

    def look() -> bool | None:
        try:
            return stat.S_ISDIR(os.stat(path).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:
            return None

    return call_in_time(look)


def call_in_time(work: Callable[[], T]) -> T | None:
    """Return the result of `work` on a folder; None if the file system does not answer within `ASK_WITHIN` seconds."""
    results: list[T] = []
    thread = threading.Thread(target=lambda: results.append(work()), name="folder", daemon=True)
    thread.start()
    thread.join(ASK_WITHIN)
    return results[0] if results else None


def _missing(run: str) -> str:
    return f"the folder of {run} is missing (moved, deleted, or its file system is not mounted here)"


START = "`orch controller start` starts one"
"""Command to type if no controller is running."""
TAKE_OVER = "`orch controller start` takes over once its lease has expired"
"""Command to type while a controller is stalled."""


def controller_state(scheduler: str = "") -> LeaseState:
    """Return whether a controller is driving this scheduler's runs (any runs if empty), and if not, why."""
    return displayed_state(fast_queries.lease(registry_path(), scheduler or None), time.time())


@dataclass(frozen=True, kw_only=True)
class RunLocation:
    """A run's scheduler. `reached` is False only if this host can reach a different cluster or none at all."""

    run: str
    scheduler: str
    reached: bool
    lives: bool  # whether a controller for that scheduler is alive

    def require_answer(self) -> None:
        """Raise Precondition if no controller serves the run and none can be started from here."""
        if self.reached or self.lives:
            return
        held = fast_queries.lease(registry_path(), self.scheduler)
        host = holder_host(held.holder) if held is not None else ""
        raise Precondition(
            f"no controller for {self.scheduler} is running, and {self.run} cannot be served from this host",
            where=f"the last one ran on {host}" if host else f"registry {registry_path()}",
            hint=f"type `orch controller start` {where_to_type(self.scheduler)}",
        )


def locate_run(run: str, kind: str, scheduler: str) -> RunLocation:
    """Return the location of a run. Queries Slurm only if no controller for the run is alive."""
    lives = controller_state(scheduler).alive
    return RunLocation(run=run, scheduler=scheduler, lives=lives, reached=lives or reaches(kind, scheduler))


def reaches(kind: str, scheduler: str) -> bool:
    """Return whether this host can reach that scheduler. Also true if this host's scheduler is not answering now."""
    from orchestrator.scheduler.available_schedulers import kinds, make_instance

    if not scheduler:
        return True
    if kind not in kinds():
        return False
    return make_instance(kind)() in ("", scheduler)


def where_to_type(scheduler: str) -> str:
    """Return the host from which commands can reach this scheduler; empty if it is this host or unknown."""
    kind, _, host = scheduler.partition("@")
    if kind != LOCAL:
        return f"on a login node of {scheduler}" if scheduler else ""
    return "" if host == host_name() else f"on {host}"
