"""Records the code that an attempt is about to train with, and compares it with the code before."""

import os
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from checkpointing.storage.durable import read_json
from trainer.agent.fork_server.torchrun_command import working_directory
from trainer.agent.processes.background_tasks import start_detached
from trainer.contract.config import JobConfig
from trainer.contract.events import EventKind, EventLog
from trainer.contract.messages.fork_server import ForkServerReady
from trainer.contract.node_identity import discover
from trainer.contract.run_dir import AttemptDir, RunDir
from trainer.contract.user_code.code_record import CodeRecord, changed_digests, printable
from trainer.contract.user_code.code_rule import CodeDecision, Occasion, judge_code
from trainer.contract.user_code.record_code import read_again, record_imported, record_named

MOST = 20
"""Maximum number of changed files whose digests an event lists."""


@dataclass(frozen=True, kw_only=True)
class CodeAtStart:
    """Digest of the user's code, a description of its changes, and the digests of the changed files.

    All are empty if there is nothing to report.
    """

    digest: str = ""
    changes: str = ""
    files: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_comparison(
        cls, before: CodeRecord | None, now: CodeRecord, occasion: Occasion, since: str
    ) -> "CodeAtStart":
        decision, reason = judge_code(before, now, occasion, since)
        if decision is not CodeDecision.WARN or before is None:
            return cls(digest=now.digest)
        files = [(printable(name), digest) for name, digest in changed_digests(before, now).items()]
        return cls(digest=now.digest, changes=reason, files=dict(files[:MOST]))

    def write_change(self, events: EventLog) -> None:
        if self.changes:
            events.write(EventKind.CODE_CHANGED, digest=self.digest, reason=self.changes, files=self.files)


def record_code(attempt: AttemptDir, config: JobConfig, skip: Collection[str] = ()) -> CodeAtStart:
    """Write the code record of this attempt into its folder and compare it; only the first node does.

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
    return CodeAtStart.from_comparison(before, now, occasion, since)


def write_events(events: EventLog, node: int, ready: ForkServerReady) -> None:
    """Write the events of a fork server that has become ready."""
    fields = {"warm": ready.warm, "reason": ready.reason, "seconds": ready.seconds}
    events.write(EventKind.FORK_SERVER, node=node, **fields)
    if ready.code:
        events.write(EventKind.CODE_RECORDED, digest=ready.code)
    CodeAtStart(digest=ready.code, changes=ready.code_changes, files=ready.code_files).write_change(events)


async def note_changes(attempt: AttemptDir, events: EventLog) -> None:
    """Read the recorded files again before new ranks import them; write an event if any has changed."""

    def look() -> CodeAtStart:
        before = CodeRecord.read(attempt.code)
        if before is None:
            return CodeAtStart()
        now = read_again(before)
        found = CodeAtStart.from_comparison(before, now, Occasion.NEXT, _LAST_START)
        if found.changes:
            now.write(attempt.code)
        return found

    with suppress(OSError):
        (await start_detached(look)).write_change(events)


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
    """Return the code that trained last, else the submitted code; raises OSError."""
    if (own := CodeRecord.read(attempt.code)) is not None:
        return own, _LAST_START, Occasion.NEXT
    for past in reversed(attempt.run.all_attempts()):
        if past.number < attempt.number and (trained := CodeRecord.read(past.code)) is not None:
            return trained, f"attempt {past.number}", Occasion.NEXT
    return _read_submitted(attempt.run.run), "the submit", Occasion.START


def _read_submitted(run_json: Path) -> CodeRecord | None:
    try:
        return CodeRecord.from_identity(read_json(run_json)["identity"])
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return None
