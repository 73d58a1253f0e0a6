"""Adds modules that rank 0 has imported by its first step to an attempt's code record."""

import sys
from collections.abc import Collection

from trainer.protocol.config import JobConfig
from trainer.protocol.events import EventKind
from trainer.protocol.run_dir import AttemptDir
from trainer.protocol.user_code.code_record import CodeDecision, CodeRecord, Occasion, judge_code, listed_digests
from trainer.protocol.user_code.record_code import add_late
from trainer.worker.reporting.metrics import Journal
from trainer.worker.reporting.stderr_best_effort import write_stderr


def record_late_code(attempt: AttemptDir, config: JobConfig, skip: Collection[str], journal: Journal) -> None:
    """Add the user's modules, except `skip`, to `attempt.code`. Write an event if any is new or has changed."""
    if config.trains_built_in_workload:
        return
    modules = {name: module for name, module in list(sys.modules.items()) if name not in skip}
    try:
        before = CodeRecord.read(attempt.code)
        if before is None or (now := add_late(before, modules, config)) == before:
            return
        now.write(attempt.code)
    except OSError as error:  # training does not depend on it
        write_stderr(f"orch: the code that rank 0 imported by its first step was not recorded: {error}")
        return
    if now.digest != before.digest:
        journal.event(EventKind.CODE_RECORDED, digest=now.digest)
    decision, reason = judge_code(before, now, Occasion.NEXT, "the code of this attempt was recorded")
    if decision is CodeDecision.WARN:
        files = listed_digests(before, now)
        journal.event(EventKind.CODE_CHANGED, reason=reason, digest=now.digest, files=files, packages={})
