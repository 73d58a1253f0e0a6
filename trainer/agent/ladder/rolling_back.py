"""Rung 1: the batch of a bad step is left out from now on, by this attempt and by all that follow."""

import sys

from trainer.agent.processes.apart import apart
from trainer.contract import skips
from trainer.contract.events import EventKind, EventLog
from trainer.contract.run_dir import AttemptDir
from trainer.contract.skips import Skip

LEAVE_OUT_SECONDS = 10.0
"""How long a hung file system may hold up the next generation."""


async def leave_out(skip: Skip, attempt: AttemptDir, events: EventLog) -> None:
    """Write it down, before any rank can take that batch again."""
    try:
        await apart(lambda: skips.add(attempt, [skip]), LEAVE_OUT_SECONDS)
    except (OSError, ValueError) as error:  # this attempt leaves it out nevertheless
        sys.stderr.write(f"orch-agent: cannot write {attempt.skipped}: {error!r}\n")
    events.write(EventKind.BATCH_SKIPPED, step=skip.step, position=skip.position, reason=skip.reason)
