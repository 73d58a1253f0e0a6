"""A third scheduler, as somebody would add it: jobs of a spool that is this host's own, started by its daemon.

It borrows how local jobs are started; what makes it a scheduler of its own is its name, its instance and its rows in
trainer/protocol/config_sections/scheduler_kinds.py and orchestrator/scheduler/available_schedulers.py.
"""

import socket

from orchestrator.scheduler.interface import JobSpec
from orchestrator.scheduler.local.local_scheduler import LocalScheduler


class SpoolInstance:
    """The spool of this host."""

    silence = ""

    def __call__(self) -> str:
        return f"spool@{socket.gethostname()}"


class SpoolScheduler(LocalScheduler):
    kind = "spool"


def script(spec: JobSpec) -> str:
    """What the spool's daemon would be given."""
    return f"#SPOOL name={spec.name} nodes={spec.resources.nodes}\n"
