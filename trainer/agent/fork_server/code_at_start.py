"""Record of the code and packages that an attempt trains with, compared with the previous record."""

import os
import sys
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from checkpointing.storage.durable import read_json
from trainer.agent.fork_server.launch_order import with_interpreter, working_directory
from trainer.agent.processes.background_tasks import start_detached
from trainer.protocol.config import JobConfig
from trainer.protocol.events import EventKind, EventLog
from trainer.protocol.messages.ranks import CodeAtStart, ForkServerReady
from trainer.protocol.node_identity import discover
from trainer.protocol.run_dir import AttemptDir, RunDir
from trainer.protocol.user_code.code_record import (
    CodeDecision,
    CodeRecord,
    Occasion,
    changed_packages,
    judge_code,
    listed_digests,
    package_words,
)
from trainer.protocol.user_code.installed_packages import find_site_folders, normalize_names
from trainer.protocol.user_code.record_code import carry_late, read_again, record_imported, record_named, with_packages


def _compare(before: CodeRecord | None, now: CodeRecord, occasion: Occasion, since: str) -> CodeAtStart:
    packages = {} if before is None else changed_packages(before, now)
    decision, reason = judge_code(before, now, occasion, since, packages=package_words(packages))
    if decision is not CodeDecision.WARN or before is None:
        return CodeAtStart(digest=now.digest)
    versions = {name: new for name, (_, new) in packages.items()}
    return CodeAtStart(digest=now.digest, changes=reason, files=listed_digests(before, now), packages=versions)


def record_code(attempt: AttemptDir, config: JobConfig, skip: Collection[str] = ()) -> CodeAtStart:
    """Write this attempt's code record and compare it with the previous one. Only the first node does so.
    `skip` lists the modules that this process had imported before the workload.
    """
    if not _is_first_node() or _is_away(attempt.run, config):
        return CodeAtStart()
    now = _code_here(attempt.run, config, skip)
    try:
        before, since, occasion = _code_before(attempt, now)
        now = carry_late(now, before)
        now.write(attempt.code)
    except OSError as error:  # training does not depend on the record
        sys.stderr.write(f"orch: cannot record the code of this attempt: {error}\n")
        return CodeAtStart()
    return _compare(before, now, occasion, since)


def write_events(events: EventLog, node: int, ready: ForkServerReady) -> None:
    fields = {"warm": ready.warm, "reason": ready.reason, "seconds": ready.seconds}
    events.write(EventKind.FORK_SERVER, node=node, **fields)
    if ready.code.digest:
        events.write(EventKind.CODE_RECORDED, digest=ready.code.digest)
    _write_change(ready.code, events)


def _write_change(code: CodeAtStart, events: EventLog) -> None:
    if code.changes:
        found = {"digest": code.digest, "files": code.files, "packages": code.packages}
        events.write(EventKind.CODE_CHANGED, reason=code.changes, **found)


async def note_changes(attempt: AttemptDir, config: JobConfig, events: EventLog) -> None:
    """Reread the recorded files before new ranks import them, and write an event if any has changed."""

    def look() -> CodeAtStart:
        before = CodeRecord.read(attempt.code)
        if before is None or _is_away(attempt.run, config):
            return CodeAtStart()
        now = read_again(before)
        found = _compare(before, now, Occasion.NEXT, _LAST_START)
        if found.changes:
            now.write(attempt.code)
        return found

    with suppress(OSError):
        _write_change(await start_detached(look), events)


_LAST_START = "the last start in this attempt"


def _is_away(run: RunDir, config: JobConfig) -> bool:
    """Return whether the command cannot start because its folder is absent; the last trained code stays on record."""
    return bool(config.command) and not working_directory(run, config).is_dir()


def _is_first_node() -> bool:
    try:
        return discover(os.environ).node == 0
    except (RuntimeError, OSError, KeyError, ValueError):
        return False


def _code_here(run: RunDir, config: JobConfig, skip: Collection[str]) -> CodeRecord:
    if config.command:
        record = record_named(config, working_directory(run, config))
        return with_packages(record, replace(config, command=with_interpreter(config, os.environ)), {})
    built_in = CodeRecord(covers="packages only: the workload is orch's own")
    record = built_in if config.trains_built_in_workload else record_imported(sys.modules, skip, config)
    return with_packages(record, config, {name: sys.modules[name] for name in sys.modules.keys() - skip})


def _code_before(attempt: AttemptDir, now: CodeRecord) -> tuple[CodeRecord | None, str, Occasion]:
    """Return the code that trained last, or else the submitted code. Raises OSError."""
    if (own := CodeRecord.read(attempt.code)) is not None:
        return own, _LAST_START, Occasion.NEXT
    for past in reversed(attempt.earlier_attempts()):
        if (trained := CodeRecord.read(past.code)) is not None:
            return trained, f"attempt {past.number}", Occasion.NEXT
    return _read_submitted(attempt.run.run, now), "the submit", Occasion.START


def _read_submitted(run_json: Path, now: CodeRecord) -> CodeRecord | None:
    """Return the submitted code, with the packages of the submitter's interpreter if ranks use the same one."""
    try:
        identity = read_json(run_json)["identity"]
        record, env = CodeRecord.from_identity(identity), identity.get("env") or {}
        same = env.get("executable") == sys.executable and {*find_site_folders(sys.path)} <= {*now.site_folders}
        packages = normalize_names(env.get("packages") or {}) if same else {}
    except (FileNotFoundError, ValueError, TypeError, KeyError, AttributeError):
        return None
    # `orch submit` does not read folders that only ranks use, such as those in env.PYTHONPATH.
    known = {**(now.packages or {}), **packages}
    return replace(record or CodeRecord(), packages=known) if packages else record
