"""Rung 1: the batch of a bad step is skipped from now on, by this attempt and by all that follow."""

import sys

from trainer.agent.processes.detached_thread import run_detached
from trainer.contract import skipped_batches
from trainer.contract.events import EventKind, EventLog
from trainer.contract.run_dir import AttemptDir
from trainer.contract.skipped_batches import Skip


async def record_skip(skip: Skip, attempt: AttemptDir, events: EventLog, *, seconds: float = 10.0) -> None:
    """Record the batch before any rank can read it again; a hung file system delays this by `seconds` at most."""
    try:
        await run_detached(lambda: skipped_batches.add(attempt, [skip]), seconds)
    except (OSError, ValueError) as error:  # this attempt skips it nevertheless
        sys.stderr.write(f"orch-agent: cannot write {attempt.skipped}: {error!r}\n")
    events.write(EventKind.BATCH_SKIPPED, step=skip.step, position=skip.position, reason=skip.reason)
