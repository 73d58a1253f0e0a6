"""Whether a controller lives, as `orchestrator.controller.lease` tells it, without the ORM."""

from orchestrator.controller.lease import LeaseState, shown
from orchestrator.home import registry_path

TAKE_OVER = "`orch controller tick` or the next `orch submit` takes over once its lease has expired"
"""What to type while a controller stalls."""


def controller_state(now: float) -> LeaseState:
    """Whether some controller drives the runs of this registry, or stalls instead, and why this is said."""
    from orchestrator.registry import quick  # sqlite3: not for `orch --help`

    return shown(quick.lease(registry_path()), now)


def controller_lives(now: float) -> bool:
    """Whether some controller drives the runs of this registry."""
    return controller_state(now).alive
