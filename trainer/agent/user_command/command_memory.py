"""State of a user's program that is kept between attempts, until the program trains."""

import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from checkpointing.storage.durable import dump_line, read_json
from trainer.agent.user_command.checkpoints import Stamps
from trainer.agent.user_command.set_aside import Pointer
from trainer.protocol.failures.decision import CommandFailure
from trainer.protocol.plain_data import build
from trainer.protocol.run_dir import AttemptDir
from trainer.protocol.secrets.secret_redaction import in_use


@dataclass(frozen=True, kw_only=True)
class SetAsideCheckpoint:
    """Checkpoint that was set aside; `damage` is empty if it shows no damage."""

    step: int
    identity: str
    original: str  # path
    path: str
    bytes: int
    damage: str = ""
    proven: bool = False  # by its seal or the framework's rules
    pointers: tuple[Pointer, ...] = ()  # files that named it as the newest
    siblings: tuple[str, ...] = ()  # names of other entries in its folder that belong to it

    @property
    def name(self) -> str:
        return Path(self.original).name


@dataclass(kw_only=True)
class CommandMemory:
    """State of a user's program, kept across attempts until the program trains."""

    failures: list[CommandFailure] = field(default_factory=list)  # consecutive, oldest first
    aside: list[SetAsideCheckpoint] = field(default_factory=list)
    earlier: Stamps | None = None  # checkpoints from before the run's first start; None: not examined yet
    saved: bool = False  # a complete checkpoint has existed; never reset
    finite_until: float | None = None  # checkpoints that are newer must not be loaded: the loss was unusable
    warned: bool = False  # that it has saved nothing; never reset
    mixed: bool = False  # checkpoints of several models are in one place; never reset

    def encode(self) -> bytes:
        """Return the state's file content; names that are not UTF-8 are read back unchanged."""
        line = in_use().record(dump_line({"schema": "orch.command/1", **asdict(self)}))
        return line.encode(errors="backslashreplace")

    @classmethod
    def before(cls, attempt: AttemptDir) -> "CommandMemory":
        """Return the newest state left by an earlier attempt, or an empty state if there is none or it is unreadable.
        Raises OSError.
        """
        found = map(_read, (one.command_memory for one in reversed(attempt.earlier_attempts())))
        return next((memory for memory in found if memory is not None), CommandMemory())


def _read(path: Path) -> CommandMemory | None:
    """Return the stored state, omitting set-aside checkpoints that are back in place, or None if there is no file."""
    try:
        memory = build(CommandMemory, read_json(path))
        return replace(memory, aside=[one for one in memory.aside if not _is_back(one)], earlier=memory.earlier)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError):
        return CommandMemory(saved=True, earlier={})


def _is_back(one: SetAsideCheckpoint) -> bool:
    """Return whether the checkpoint is back in place.
    A move is recorded before the rename, and the record is removed after the checkpoint is put back.
    """
    return os.path.lexists(one.original) and not os.path.lexists(one.path)
