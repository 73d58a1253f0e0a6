"""Places where a test may kill the controller: `ORCH_FAILPOINT=after_sbatch` in the environment, else nothing."""

import os
import signal

VARIABLE = "ORCH_FAILPOINT"

POINTS = (
    "after_create",
    "before_folder",
    "after_folder",
    "before_mark",
    "before_submit",
    "after_sbatch",
    "after_submit",
    "after_find",
    "after_cancel_duplicate",
    "after_adopt",
    "after_submitted",
    "before_go",
    "after_go",
    "after_release",
    "before_revoke",
    "after_revoke",
    "after_attempt_ended",
    "before_next_intent",
    "after_next_intent",
    "after_stop_request",
    "after_cancel",
    "after_ask",
)
"""Every name that a controller or submit calls `reach` with, in the order of a run's life."""

REMOVAL_POINTS = ("rm_begun", "rm_copies", "rm_renamed", "rm_set_aside", "rm_deleted")
"""Those of `orch rm`."""


def reach(name: str) -> None:
    """Die here, as by `kill -9`, when the environment names this point."""
    if os.environ.get(VARIABLE) == name:
        os.kill(os.getpid(), signal.SIGKILL)
