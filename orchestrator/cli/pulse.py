"""Whether a controller lives, as `orchestrator.controller.lease` tells it, without the ORM."""

from orchestrator.controller.lease import LeaseState, shown
from orchestrator.home import registry_path

TAKE_OVER = "`orch controller tick` or the next `orch submit` takes over once its lease has expired"
"""What to type while a controller stalls."""


def controller_state(now: float, scheduler: str = "") -> LeaseState:
    """Whether a controller drives the runs of this scheduler (empty: of any), or stalls instead, and why."""
    from orchestrator.registry import quick  # sqlite3: not for `orch --help`

    return shown(quick.lease(registry_path(), scheduler or None), now)


def controller_lives(now: float, scheduler: str = "") -> bool:
    """Whether a controller drives the runs of this scheduler; whether any lives where that is not known (empty)."""
    return controller_state(now, scheduler).alive
