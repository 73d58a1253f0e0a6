"""What one attempt leaves to the next about a user's own program: its failures in a row, and what was set aside."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from checkpointing.storage.durable import dump_line, read_json, write_durably
from trainer.agent.user_command.earlier_checkpoints import Stamps
from trainer.agent.user_command.set_aside import Pointer
from trainer.agent.watch.root_cause import CommandFailure
from trainer.contract.run_dir import RunDir
from trainer.contract.secrets.secret_redaction import in_use


@dataclass(frozen=True, kw_only=True)
class SetAsideCheckpoint:
    """A checkpoint that was set aside, and why it cannot be whole (empty: no sign of it)."""

    step: int
    identity: str
    original: str  # path
    path: str
    bytes: int
    damage: str = ""
    pointers: tuple[Pointer, ...] = ()  # files that named it
    siblings: tuple[str, ...] = ()  # names of the other entries of its folder that belong to it

    @property
    def name(self) -> str:
        return Path(self.original).name

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "SetAsideCheckpoint":
        pointers = tuple(Pointer(**each) for each in fields.get("pointers", ()))
        return cls(**{**fields, "pointers": pointers, "siblings": tuple(fields.get("siblings", ()))})


@dataclass(kw_only=True)
class CommandMemory:
    """Goes on over attempts until the program trains."""

    failures: list[CommandFailure] = field(default_factory=list)  # in a row, oldest first
    aside: list[SetAsideCheckpoint] = field(default_factory=list)
    earlier: Stamps | None = None  # what was there before the run's first start; None: not looked at
    saved: bool = False  # a whole checkpoint was there at some time; never forgotten

    def encoded(self) -> bytes:
        """As it stands in its file; names that are no UTF-8 read back as they were."""
        line = in_use().record(dump_line({"schema": "orch.command/1", **asdict(self)}))
        return line.encode(errors="backslashreplace")

    @classmethod
    def before(cls, run: RunDir, attempt: int) -> "CommandMemory":
        """What the newest earlier attempt that left anything left; nothing where it cannot be read. Raises OSError."""
        for earlier in reversed(run.all_attempts()):
            if earlier.number < attempt and (found := _read(earlier.command_memory)) is not None:
                return found
        return CommandMemory()


class MemoryFile:
    """Holds what was kept last, however late a slow file system lets an earlier write end."""

    def __init__(self, path: Path) -> None:
        self._path, self._newest, self._lock = path, b"", Lock()

    def keep(self, memory: CommandMemory) -> Callable[[], bool]:
        """What to do apart for it to be on the disk, which True says; it raises OSError."""
        self._newest = memory.encoded()

        def write() -> bool:
            with self._lock:
                write_durably(self._path, self._newest)
            return True

        return write


def _read(path: Path) -> CommandMemory | None:
    """None where there is no file; without those that are still, or again, in their places."""
    try:
        fields = read_json(path)
        failures = [CommandFailure(**each) for each in fields["failures"]]
        aside = [SetAsideCheckpoint.from_json(each) for each in fields["aside"]]
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError):
        return CommandMemory(saved=True, earlier={})
    # An older version has not written down whether there was one.
    saved = bool(fields.get("saved", True))
    aside = [one for one in aside if not _is_back(one)]
    return CommandMemory(failures=failures, aside=aside, saved=saved, earlier=_read_stamps(fields))


def _read_stamps(fields: dict[str, Any]) -> Stamps:
    stamps = fields.get("earlier")  # an older version has not written it down
    return {str(name): int(at) for name, at in stamps.items()} if isinstance(stamps, dict) else {}


def _is_back(one: SetAsideCheckpoint) -> bool:
    """It is written down before it is renamed, and put back before that is."""
    return os.path.lexists(one.original) and not os.path.lexists(one.path)
