"""Changes to a run's code and configuration, and edits of files that have no effect."""

import json
import re
import shlex
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpointing.storage.durable import dump_line, read_json
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.terminal.render import Screen
from orchestrator.config.compose import diff
from orchestrator.config.redaction import redacted_value
from orchestrator.errors import NotFound
from orchestrator.registry.records import Attempt, Notice, Run
from orchestrator.run_view import RunView
from orchestrator.states import RunState
from trainer.protocol.config_sections.moved_keys import in_present_keys
from trainer.protocol.events import EventKind
from trainer.protocol.run_dir import RunDir

if TYPE_CHECKING:  # `orch status` does not open the store
    from orchestrator.registry.store import Store

READ_WITHIN = 2.0
"""Seconds to wait for the folder. A hung file system must not block a status query."""
_MOST_LISTED = 3
"""Maximum number of changed keys listed one by one."""
_DIGEST = re.compile(r"\b[0-9a-f]{32,64}\b")


def describe_code(code: dict[str, Any], notices: Sequence[Notice]) -> str:
    """Describe the code in an identity, with the digest of the files that trained last or else were submitted."""
    ours = code.get("orch")
    words = [f"orch {ours.get('version')} {short_digests(ours.get('sha256'))}"] if isinstance(ours, dict) else []
    words += map(_describe_place, code.get("user") or [])
    kinds = (EventKind.CODE_RECORDED, EventKind.CODE_CHANGED)
    trained = [notice for notice in notices if notice.kind in kinds and notice.data.get("digest")]
    if trained:
        words.append(f"files {short_digests(trained[-1].data['digest'])} (attempt {trained[-1].attempt})")
    elif digest := (code.get("files") or {}).get("digest"):
        words.append(f"files {short_digests(digest)}")
    return "   ".join(words)


def _describe_place(place: dict[str, Any]) -> str:
    unknown = f" (changes not known: {place['dirty_reason']})" if place.get("dirty_reason") else ""
    commit = f" {short_digests(place['git'])}" if place.get("git") else ""
    return f"{place.get('path')}{commit}{' with changes' if place.get('dirty') else unknown}"


def short_digests(value: Any) -> str:
    """Cut every digest in a text to twelve digits."""
    return _DIGEST.sub(lambda match: match[0][:12], str(value))


def config_changes(store: "Store", run: Run, attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    """Return each changed key and the first attempt with the change; the last attempt may not have begun yet."""
    # Attempts begun by an older orch have no config of their own.
    digests = [(attempt.number, attempt.base_digest or run.config_digest) for attempt in attempts]
    digests.append((len(attempts) + 1, run.config_digest))
    return [
        {"attempt": number, "key": key, "before": redacted_value(key, before), "now": redacted_value(key, now)}
        for (_, old), (number, new) in pairwise(digests)
        if old != new
        for key, (before, now) in diff(store.config(old), store.config(new)).items()
    ]


def warn_of_edited_config(screen: Screen, view: RunView) -> None:
    """Warn about edits in the run's config.json that have no effect, and give the command to type."""
    edited = _find_edited_config(RunDir(Path(view.run_dir)))
    if edited is None:
        return
    path, content, digest = edited
    overrides = _edited_overrides(content, digest, view.config_digest)
    if overrides is not None:
        command = _command(view, overrides or "KEY=VALUE")
        screen.warn("edited_config", f"{path} was edited: that changes nothing; type {command}")


def _command(view: RunView, change: str) -> str:
    """Return the command that applies a changed configuration."""
    if view.state == RunState.SUCCEEDED and view.last_checkpoint is not None:
        return f"orch submit --from {view.run} {change}"  # its newest checkpoint at that time
    resume = f"orch resume {view.run} {change}"
    return f"`orch cancel {view.run}`, then `{resume}`" if view.is_live else resume


def _find_edited_config(folder: RunDir) -> tuple[Path, Any, str] | None:
    """Return the config file if it was edited, its content (None: unreadable) and the submitted digest; else None."""
    found: list[tuple[Path, Any, str]] = []

    def read() -> None:
        from trainer.protocol.config import hash_config  # dataclasses of a whole job: only for commands that name a run

        try:
            submitted = str(read_json(folder.run)["config_digest"])
            content = folder.config.read_bytes()
        except (OSError, ValueError, KeyError, TypeError):
            return
        try:
            parsed = json.loads(content)
            if hash_config(parsed) != submitted:
                found.append((folder.config, parsed, submitted))
        except ValueError:
            found.append((folder.config, None, submitted))

    reader = threading.Thread(target=read, name="config", daemon=True)
    reader.start()
    reader.join(READ_WITHIN)
    return found[0] if found else None


def _edited_overrides(content: Any, submitted: str, current: str) -> str | None:
    """Return overrides for the edited values; empty if they are not clear, None if all are in force."""
    if not isinstance(content, dict):
        return ""
    try:
        with open_store(readonly=True) as store:
            known, now = store.config(submitted), store.config(current)
    except NotFound:
        return ""
    # Changes made by `orch resume RUN KEY=VALUE` are not edits; edits that it repeated are already in force.
    content = in_present_keys(content)
    wanted = diff(known, content)
    missing = {key: after for key, (before, after) in diff(now, content).items() if key in wanted}
    if not missing:
        return None
    return " ".join(_override(key, value) for key, value in missing.items()) if len(missing) <= _MOST_LISTED else ""


def _override(key: str, value: Any) -> str:
    if value is None:
        return f"'~{key}'"
    text = value if isinstance(value, str) and value and value.isprintable() else dump_line(value)
    return shlex.quote(f"{key}={text}")
