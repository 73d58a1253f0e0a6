"""Checkpoints that a program has reported through its start-up module: their folder, names and framework."""

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.agent.adapters import registry
from trainer.agent.user_command.checkpoints import has_rank
from trainer.protocol.command_progress import CommandCheckpointsConfig, parse_digits
from trainer.protocol.logs.log_rotation import read_tail
from trainer.protocol.run_dir import AttemptDir

_TAIL = 64 * 1024
_NUMBER = re.compile(r"\d+", re.ASCII)
_CHECKPOINT = re.compile(r"ckpt|checkpoint|step|epoch|iter|model|state|snapshot", re.IGNORECASE)
"""Words in the names of checkpoints; other files that a program writes with `torch.save` may be data."""
PLAIN = "plain"


@dataclass(frozen=True, kw_only=True)
class ProgramSave:
    """Checkpoint that a rank has reported."""

    step: int
    path: str
    rank: int = -1
    state: str = ""  # number of ranks and digests of this rank's parameters; empty: unknown
    frameworks: str = ""  # names that the program has imported, separated by commas
    time: float = 0.0
    is_data: bool = False  # it seems to hold no state of a training


@dataclass(frozen=True, kw_only=True)
class LearnedFolder:
    """Folder and names of a program's checkpoints, and the adapter that knows their rules."""

    config: CommandCheckpointsConfig
    adapter: str


def read_saves(attempts: Iterable[AttemptDir]) -> list[ProgramSave]:
    """Return the successful saves that the ranks of these attempts have reported, oldest first.

    Checkpoints in the run's folder are those of `orch.checkpointer`, which verifies and deletes them itself.
    """
    found: list[ProgramSave] = []
    for attempt in attempts:
        own = attempt.run.checkpoints
        found += [save for save in parse_saves(read_rows(attempt)) if not Path(save.path).is_relative_to(own)]
    return sorted(found, key=lambda save: save.time)


def read_rows(attempt: AttemptDir) -> list[dict[str, Any]]:
    """Return the newest rows that the start-up modules have written for an attempt's agents."""
    lines: list[bytes] = []
    for path in sorted(attempt.outcomes.glob("saves-node-*.jsonl")):
        with suppress(OSError):
            lines += read_tail(path, _TAIL).splitlines()
    found = []
    for line in lines:
        with suppress(ValueError):  # cut by a kill, or the first line of the tail
            row = json.loads(line)
            found += [row] if isinstance(row, dict) else []
    return found


def are_mixed(attempts: Iterable[AttemptDir]) -> bool:
    """Return whether a rank has reported that checkpoints of several models are in one place."""
    return any(row.get("mixed") is True for attempt in attempts for row in read_rows(attempt))


def parse_saves(rows: Iterable[dict[str, Any]]) -> list[ProgramSave]:
    """Return the successful saves in these rows; others are skipped."""
    found = []
    for row in rows:
        with suppress(ValueError, TypeError, LookupError):
            if not row.get("failed"):
                save = ProgramSave(
                    step=int(row["step"]), path=str(row["path"]), frameworks=str(row.get("frameworks", "")),
                    time=float(row["time"]), rank=int(row.get("rank", -1)), state=str(row.get("state", "")),
                    is_data=bool(row.get("is_data")),
                )  # fmt: skip
                found.append(_in_layout(save))
    return found


def _in_layout(save: ProgramSave) -> ProgramSave:
    """Return the save of one file as that of the whole checkpoint, if a loop writes the layout of a framework."""
    adapter, path = registry.recognize_layout(save.path) if registry.choose(save.frameworks) == PLAIN else ("", "")
    return replace(save, path=path, frameworks=adapter, step=_last_number(path)) if adapter else save


def _last_number(path: str) -> int:
    numbers = _NUMBER.findall(Path(path).name)
    return parse_digits(numbers[-1]) if numbers else -1


def choose_adapter(saves: Sequence[ProgramSave]) -> str:
    """Return the adapter of the framework that has saved, or "" if nothing was reported."""
    return registry.choose(saves[-1].frameworks) if saves else ""


def locate(saves: Sequence[ProgramSave], adapter: str = "") -> LearnedFolder | None:
    """Return where the program saves its checkpoints, or None if that is unclear.

    A framework's first save is sufficient. `torch.save` may write anything, so two growing steps of one pattern are
    required, in files that are named like checkpoints and hold the state of a training.
    """
    adapter = adapter or choose_adapter(saves)
    places = [place for save in saves if (place := _derive(save, adapter)) is not None]
    if not places:
        return None
    newest = places[-1][0]
    if adapter == PLAIN and len({step for place, step in places if place == newest}) < 2:
        return None
    return LearnedFolder(config=newest, adapter=adapter)


def _derive(save: ProgramSave, adapter: str) -> tuple[CommandCheckpointsConfig, int] | None:
    """Return the folder and pattern of a checkpoint, and its step."""
    path = Path(save.path)
    # A file of one rank, or without a number, belongs to its folder.
    if adapter == PLAIN and (has_rank(path.name) or not _NUMBER.search(path.stem)):
        path = path.parent
    if adapter == PLAIN and (save.is_data or not _CHECKPOINT.search(path.name)):
        return None
    numbers = list(_NUMBER.finditer(path.name))
    step = save.step if adapter != PLAIN else parse_digits(numbers[-1][0]) if numbers else -1
    last = next((found for found in reversed(numbers) if parse_digits(found[0]) == step), None)
    if last is None or "*" in path.name:
        return None
    pattern = f"{_NUMBER.sub('*', path.name[: last.start()])}*{path.name[last.end() :]}"
    return CommandCheckpointsConfig(path=str(path.parent), pattern=pattern), step
