"""Points at which a test can kill orch by setting a variable, e.g. `ORCH_FAILPOINT=after_sbatch`."""

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
"""Names that a controller or `orch submit` passes to `reach`, in the order in which a run reaches them."""

REMOVAL_POINTS = ("rm_begun", "rm_copies", "rm_renamed", "rm_set_aside", "rm_deleted")
"""Names that `orch rm` passes to `reach`."""


def reach(name: str) -> None:
    """Kill this process with SIGKILL if the environment names this point."""
    if os.environ.get(VARIABLE) == name:
        os.kill(os.getpid(), signal.SIGKILL)
