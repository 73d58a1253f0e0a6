"""Rung 1: the batch of a bad step is left out from now on, by this attempt and by all that follow."""

import asyncio
import sys

from trainer.contract import skips
from trainer.contract.events import EventKind, EventLog
from trainer.contract.run_dir import AttemptDir
from trainer.contract.skips import Skip


async def leave_out(skip: Skip, attempt: AttemptDir, events: EventLog) -> None:
    """Write it down, before any rank can take that batch again."""
    try:
        await asyncio.to_thread(skips.add, attempt, [skip])
    except (OSError, ValueError) as error:  # this attempt leaves it out nevertheless
        sys.stderr.write(f"orch-agent: cannot write {attempt.skipped}: {error}\n")
    events.write(EventKind.BATCH_SKIPPED, step=skip.step, position=skip.position, reason=skip.reason)
