"""Starting a controller in the background, and seeing that it lives."""

import time
from dataclasses import dataclass

from orchestrator.cli.access.run_location import controller_state
from orchestrator.cli.terminal.render import Screen
from orchestrator.controller import service
from orchestrator.controller.leasing.lease import LEASE_TTL
from orchestrator.controller.service import Health
from orchestrator.errors import Precondition
from orchestrator.home import controller_log, registry_path
from orchestrator.scheduler.available_schedulers import lease_key

ALIVE_WITHIN = 30.0
"""Seconds that a new controller may take until it has the lease."""
LOOK_EVERY = 0.1


@dataclass(frozen=True, kw_only=True)
class Started:
    """A controller that lives, and whether this command started it."""

    started: bool
    health: Health


def start_controller(screen: Screen, kind: str) -> Started:
    """Start a controller for this kind of scheduler unless one lives; raises Precondition when it does not come up."""
    started = service.ensure_running(registry_path(), kind)
    screen.if_interrupted = lambda: "interrupted: `orch controller status` says whether the controller has come up"
    key = lease_key(kind)
    before = controller_state(time.time(), key)
    if before.stalled:
        screen.note(f"{before.reason}: the new one waits until its lease has expired, a minute at most")
    deadline = time.monotonic() + ALIVE_WITHIN + (LEASE_TTL if before.stalled or before.once else 0.0)
    while not controller_state(time.time(), key).stays:
        if time.monotonic() >= deadline:
            raise Precondition(
                f"the controller was started, and has not come up within {ALIVE_WITHIN:.0f} s",
                where=str(controller_log()),
                hint="that file says why; `orch controller run` runs one in the foreground",
            )  # fmt: skip
        time.sleep(LOOK_EVERY)
    return Started(started=started, health=service.status(registry_path(), key))
