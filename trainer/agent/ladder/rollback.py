"""Rung 1: the batch of a bad step is left out from now on, by this attempt and by all that follow."""

import sys

from trainer.agent.processes.detached_thread import run_detached
from trainer.contract import skipped_batches
from trainer.contract.events import EventKind, EventLog
from trainer.contract.run_dir import AttemptDir
from trainer.contract.skipped_batches import Skip

RECORD_SKIP_SECONDS = 10.0
"""How long a hung file system may hold up the next generation."""


async def record_skip(skip: Skip, attempt: AttemptDir, events: EventLog) -> None:
    """Write it down, before any rank can take that batch again."""
    try:
        await run_detached(lambda: skipped_batches.add(attempt, [skip]), RECORD_SKIP_SECONDS)
    except (OSError, ValueError) as error:  # this attempt leaves it out nevertheless
        sys.stderr.write(f"orch-agent: cannot write {attempt.skipped}: {error!r}\n")
    events.write(EventKind.BATCH_SKIPPED, step=skip.step, position=skip.position, reason=skip.reason)
