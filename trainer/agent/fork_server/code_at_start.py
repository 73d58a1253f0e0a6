"""Records which code an attempt is about to train with, and compares it with what was there before."""

import os
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from checkpointing.storage.durable import read_json
from trainer.agent.fork_server.torchrun_command import working_directory
from trainer.agent.processes.detached_thread import start_detached
from trainer.contract.config import JobConfig
from trainer.contract.events import EventKind, EventLog
from trainer.contract.messages.fork_server import ForkServerReady
from trainer.contract.node_identity import discover
from trainer.contract.run_dir import AttemptDir, RunDir
from trainer.contract.user_code.code_record import CodeRecord
from trainer.contract.user_code.code_rule import CodeDecision, Occasion, judge_code
from trainer.contract.user_code.record_code import read_again, record_imported, record_named


@dataclass(frozen=True, kw_only=True)
class CodeAtStart:
    """The digest of the user's code, and what of it is not as before; both empty where there is nothing to say."""

    digest: str = ""
    changes: str = ""


def record_code(attempt: AttemptDir, config: JobConfig, skip: Collection[str] = ()) -> CodeAtStart:
    """Write the code of this attempt into its folder, and judge it; only the first node does.

    `skip`: modules that this process had imported before the workload.
    """
    if config.trains_built_in_workload or not _is_first_node():
        return CodeAtStart()
    now = _code_here(attempt.run, config, skip)
    try:
        before, since, occasion = _code_before(attempt)
        now.write(attempt.code)
    except OSError as error:  # training does not depend on it
        sys.stderr.write(f"orch: the code of this attempt is not recorded: {error}\n")
        return CodeAtStart()
    decision, reason = judge_code(before, now, occasion, since)
    return CodeAtStart(digest=now.digest, changes=reason if decision is CodeDecision.WARN else "")


def write_events(events: EventLog, node: int, ready: ForkServerReady) -> None:
    """What a fork server that is ready has to report."""
    fields = asdict(ready)
    digest, changes = fields.pop("code"), fields.pop("code_changes")
    events.write(EventKind.FORK_SERVER, node=node, **fields)
    if digest:
        events.write(EventKind.CODE_RECORDED, digest=digest)
    if changes:
        events.write(EventKind.CODE_CHANGED, digest=digest, reason=changes)


async def note_changes(attempt: AttemptDir, events: EventLog) -> None:
    """Look at the recorded files again when ranks start that import them again: an event for what has changed."""

    def look() -> tuple[str, str]:
        before = CodeRecord.read(attempt.code)
        now = None if before is None else read_again(before)
        decision, reason = judge_code(before, now, Occasion.NEXT, _LAST_START)
        if now is None or decision is not CodeDecision.WARN:
            return "", ""
        now.write(attempt.code)
        return now.digest, reason

    with suppress(OSError):
        digest, reason = await start_detached(look)
        if reason:
            events.write(EventKind.CODE_CHANGED, digest=digest, reason=reason)


_LAST_START = "the last start in this attempt"


def _is_first_node() -> bool:
    try:
        return discover(os.environ).node == 0
    except (RuntimeError, OSError, KeyError, ValueError):
        return False


def _code_here(run: RunDir, config: JobConfig, skip: Collection[str]) -> CodeRecord:
    if config.command:
        return record_named(config, working_directory(run, config))
    return record_imported(sys.modules, skip, config)


def _code_before(attempt: AttemptDir) -> tuple[CodeRecord | None, str, Occasion]:
    """The code that trained last, else what was submitted; raises OSError."""
    if (own := CodeRecord.read(attempt.code)) is not None:
        return own, _LAST_START, Occasion.NEXT
    for past in reversed(attempt.run.all_attempts()):
        if past.number < attempt.number and (trained := CodeRecord.read(past.code)) is not None:
            return trained, f"attempt {past.number}", Occasion.NEXT
    return _submitted(attempt.run.run), "the submit", Occasion.START


def _submitted(run_json: Path) -> CodeRecord | None:
    try:
        return CodeRecord.from_json(read_json(run_json)["identity"]["code"]["files"])
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
