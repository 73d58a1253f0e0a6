"""Configurations in a run's folder that somebody has edited: they do not count, and people are told what does."""

import json
import shlex
import threading
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, read_json
from orchestrator.cli.access.registry import open_store
from orchestrator.cli.terminal.render import Screen
from orchestrator.errors import NotFound
from orchestrator.states import LIVE_RUNS, RunState
from trainer.contract.config_sections.moved_keys import in_present_keys
from trainer.contract.run_dir import RunDir

READ_WITHIN = 2.0
"""Seconds for reading the folder: one that hangs holds up nobody who asks for the state of a run."""
_TOLD = 3
"""Changed keys that are told one by one."""


def warn_of_edited_config(screen: Screen, row: dict[str, Any]) -> None:
    """Say what of the run's config.json is not in the registry, and how to have it; `row` is its status row."""
    edited = _edited(RunDir(Path(row["run_dir"])))
    if edited is None:
        return
    path, content, digest = edited
    asked = _asked(content, digest, row["config_digest"])
    if asked is None:
        return
    command = _command(row, asked or "KEY=VALUE")
    screen.warn("edited_config", f"{path} was edited: that changes nothing; type {command}")


def _command(row: dict[str, Any], change: str) -> str:
    """The command that takes a changed configuration."""
    run, saved = row["run"], row["last_checkpoint"]
    if row["state"] == RunState.SUCCEEDED and saved is not None:
        return f"orch submit --from {run} {change}"  # its newest checkpoint by then: this one may be replaced
    resume = f"orch resume {run} {change}"
    return f"`orch cancel {run}`, then `{resume}`" if row["state"] in LIVE_RUNS else resume


def _edited(folder: RunDir) -> tuple[Path, Any, str] | None:
    """The run's config file when it is not what was submitted, its content (None: unreadable), the submitted digest."""
    found: list[tuple[Path, Any, str]] = []

    def read() -> None:
        from trainer.contract.config import digest_of  # dataclasses of all of a job: only for who names a run

        try:
            submitted = str(read_json(folder.run)["config_digest"])
            content = folder.config.read_bytes()
        except (OSError, ValueError, KeyError, TypeError):
            return
        try:
            parsed = json.loads(content)
            if digest_of(parsed) != submitted:
                found.append((folder.config, parsed, submitted))
        except ValueError:
            found.append((folder.config, None, submitted))

    reader = threading.Thread(target=read, name="config", daemon=True)
    reader.start()
    reader.join(READ_WITHIN)
    return found[0] if found else None


def _asked(content: Any, submitted: str, current: str) -> str | None:
    """What to type for the edited values, as overrides; empty where that is not clear, None where they are in force."""
    from orchestrator.config.compose import diff  # omegaconf: only where something was edited

    if not isinstance(content, dict):
        return ""
    try:
        with open_store(readonly=True) as store:
            known, now = store.config(submitted), store.config(current)
    except NotFound:
        return ""
    # What `orch resume RUN KEY=VALUE` has set since is no edit, nor is an edit that it has repeated.
    content = in_present_keys(content)
    wanted = {key: after for key, (_, after) in diff(known, content).items()}
    missing = {key: after for key, (before, after) in diff(now, content).items() if key in wanted}
    if not missing:
        return None
    return " ".join(_override(key, value) for key, value in missing.items()) if len(missing) <= _TOLD else ""


def _override(key: str, value: Any) -> str:
    if value is None:
        return f"'~{key}'"
    text = value if isinstance(value, str) and value and value.isprintable() else dump_line(value)
    return shlex.quote(f"{key}={text}")
