"""A third scheduler, as a developer would add it: jobs of a spool on this host, started by its daemon.

It starts jobs like the local scheduler, but has its own name, instance and rows in
trainer/protocol/config_sections/scheduler_kinds.py and orchestrator/scheduler/available_schedulers.py.
"""

import socket

from orchestrator.scheduler.interface import JobSpec
from orchestrator.scheduler.local.local_scheduler import LocalScheduler


class SpoolInstance:
    """Instance of this host's spool."""

    silence = ""

    def __call__(self) -> str:
        return f"spool@{socket.gethostname()}"


class SpoolScheduler(LocalScheduler):
    kind = "spool"


def script(spec: JobSpec) -> str:
    """Return the script for the spool's daemon."""
    return f"#SPOOL name={spec.name} nodes={spec.resources.nodes}\n"
