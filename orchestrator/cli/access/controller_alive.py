"""Whether a controller lives, as `orchestrator.controller.leasing.lease` tells it, without the ORM."""

from orchestrator.controller.leasing.lease import LeaseState, displayed_state
from orchestrator.home import registry_path

TAKE_OVER = "`orch controller tick` or the next `orch submit` takes over once its lease has expired"
"""What to type while a controller stalls."""


def controller_state(now: float, scheduler: str = "") -> LeaseState:
    """Whether a controller drives the runs of this scheduler (empty: of any), or stalls instead, and why."""
    from orchestrator.registry import fast_queries  # sqlite3: not for `orch --help`

    return displayed_state(fast_queries.lease(registry_path(), scheduler or None), now)


def controller_lives(now: float, scheduler: str = "") -> bool:
    """Whether a controller drives the runs of this scheduler; whether any lives where that is not known (empty)."""
    return controller_state(now, scheduler).alive
