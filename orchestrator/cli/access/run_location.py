"""Which cluster a run belongs to, whether a controller lives there, and what to type where when none is reached."""

import time
from dataclasses import dataclass
from typing import Any

from orchestrator.controller.leasing.lease import LeaseState, displayed_state, host_of
from orchestrator.errors import Precondition
from orchestrator.home import registry_path
from trainer.contract.config_sections.scheduler_kinds import traits

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
