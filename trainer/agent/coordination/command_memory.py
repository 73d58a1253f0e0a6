"""What one attempt leaves to the next about a user's own program: its failures in a row, and what was set aside."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from checkpointing.durable import dump_line, read_json, write_durably
from trainer.agent.watch.blame import OwnFailure
from trainer.contract.run_dir import RunDir


@dataclass(frozen=True, kw_only=True)
class Aside:
    """A checkpoint that was set aside, and why it cannot be whole (empty: no sign of it)."""

    step: int
    identity: str
    original: str  # path
    path: str
    bytes: int
    damage: str = ""

    @property
    def name(self) -> str:
        return Path(self.original).name


@dataclass(kw_only=True)
class CommandMemory:
    """Goes on over attempts until the program trains."""

    failures: list[OwnFailure] = field(default_factory=list)  # in a row, oldest first
    aside: list[Aside] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Raises OSError."""
        write_durably(path, dump_line({"schema": "orch.command/1", **asdict(self)}).encode())

    @classmethod
    def before(cls, run: RunDir, attempt: int) -> "CommandMemory":
        """What the attempt before this one left; nothing where it left nothing that can be read. Raises OSError."""
        try:
            fields = read_json(run.attempt(attempt - 1).command_memory)
            failures = [OwnFailure(**each) for each in fields["failures"]]
            return cls(failures=failures, aside=[Aside(**each) for each in fields["aside"]])
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return cls()
