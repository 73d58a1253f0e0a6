"""Changes to a run's code and configuration, and file edits that have no effect."""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpointing.storage.durable import read_json
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.access.run_folder import call_in_time
from orchestrator.cli.terminal.render import Screen
from orchestrator.config.redaction import redacted_value
from orchestrator.errors import NotFound
from orchestrator.registry.records import Attempt, Notice, Run
from orchestrator.run_view import RunView
from orchestrator.states import RunState
from trainer.protocol.events import EventKind
from trainer.protocol.run_dir import RunDir

if TYPE_CHECKING:  # `orch status` does not open the store
    from orchestrator.registry.store import Store

_DIGEST = re.compile(r"\b[0-9a-f]{32,64}\b")


def describe_code(code: dict[str, Any], notices: Sequence[Notice]) -> str:
    """Describe an identity's code, with the digest of the files last used in training, or else of those submitted."""
    ours = code.get("orch")
    words = [f"orch {ours.get('version')} {short_digests(ours.get('sha256'))}"] if isinstance(ours, dict) else []
    words += map(describe_place, code.get("user") or [])
    kinds = (EventKind.CODE_RECORDED, EventKind.CODE_CHANGED)
    trained = [notice for notice in notices if notice.kind in kinds and notice.data.get("digest")]
    if trained:
        words.append(f"files {short_digests(trained[-1].data['digest'])} (attempt {trained[-1].attempt})")
    elif digest := (code.get("files") or {}).get("digest"):
        words.append(f"files {short_digests(digest)}")
    return "   ".join(words)


def describe_place(place: Mapping[str, Any]) -> str:
    """Describe a folder of the user's code: its path, its commit, and a digest of uncommitted changes."""
    commit = f" {short_digests(place['git'])}" if place.get("git") else ""
    unknown = f" (changes unknown: {place['dirty_reason']})" if place.get("dirty_reason") else ""
    changes = f" with changes {str(place.get('diff_sha256') or '')[:8]}".rstrip() if place.get("dirty") else unknown
    return f"{place.get('path')}{commit}{changes}"


def short_digests(value: Any) -> str:
    """Shorten every digest in a text to twelve digits."""
    return _DIGEST.sub(lambda match: match[0][:12], str(value))


def config_changes(store: "Store", run: Run, attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    """Return each changed key and the first attempt with the change. The last attempt may not have begun yet."""
    from orchestrator.config.compose import diff  # imports omegaconf, needed only to compare configurations

    # Attempts from an older orch have no config of their own.
    digests = [(attempt.number, attempt.base_digest or run.config_digest) for attempt in attempts]
    digests.append((len(attempts) + 1, run.config_digest))
    return [
        {"attempt": number, "key": key, "before": redacted_value(key, before), "now": redacted_value(key, now)}
        for (_, old), (number, new) in pairwise(digests)
        if old != new
        for key, (before, now) in diff(store.config(old), store.config(new)).items()
    ]


def warn_of_edited_config(screen: Screen, view: RunView) -> None:
    """Warn that edits to the run's config.json have no effect, and name the command to use instead."""
    place = RunDir(Path(view.run_dir))
    edited = call_in_time(lambda: _edited_config(place))
    if edited is None or _is_in_force(*edited, view.config_digest):
        return
    command = f"`orch resume {view.run} KEY=VALUE`"
    if view.state == RunState.SUCCEEDED:
        command = f"`orch submit --from {view.run} KEY=VALUE`"
    if view.is_live:
        command = f"`orch cancel {view.run}`, then {command}"
    screen.warn("edited_config", f"{place.config} was edited, which has no effect; use {command}")


def _edited_config(place: RunDir) -> tuple[Any, str] | None:
    """Return an edited config.json's content (None if not JSON) and submitted digest, or None if it was not edited."""
    from trainer.protocol.config import hash_config  # imports all job dataclasses, needed only if a run is named

    try:
        submitted = str(read_json(place.run)["config_digest"])
        text = place.config.read_bytes()
    except (OSError, ValueError, KeyError, TypeError):
        return None
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None, submitted
    return None if hash_config(content) == submitted else (content, submitted)


def _is_in_force(content: Any, submitted: str, current: str) -> bool:
    """Return whether the current configuration already has all edited values, set by `orch resume RUN KEY=VALUE`."""
    if not isinstance(content, dict):
        return False
    from orchestrator.config.compose import diff  # imports omegaconf, needed only to compare configurations

    try:
        with open_store(readonly=True) as store:
            before, now = store.config(submitted), store.config(current)
    except NotFound:
        return False
    return not diff(before, content).keys() & diff(now, content).keys()
