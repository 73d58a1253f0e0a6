"""GO: the launch token without which an agent refuses to train, and the fence that later actions read again."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from checkpointing.durable import dump_line, read_json, write_durably


@dataclass(frozen=True, kw_only=True)
class LaunchToken:
    """Written by the controller after it has adopted exactly one job for the attempt."""

    attempt: int
    epoch: int  # the controller's fencing epoch when it launched
    job_id: str
    nonce: str  # of the attempt; part of its checkpoint names
    checkpoints: tuple[str, ...] = ()  # folder names of earlier attempts that this attempt may inherit
    perhaps: tuple[str, ...] = ()  # further ones, on nodes' own disks: inherited where they are found, never missed
    over: tuple[str, ...] = ()  # `<attempt>-<nonce>` of the run's earlier attempts: they write no more
    mtbf: float = 0.0  # seconds between two failures of a job of this size, as far as is known; 0: not known

    def write(self, path: Path) -> None:
        write_durably(path, dump_line({"schema": "orch.go/1", **asdict(self)}).encode())

    @classmethod
    def read(cls, path: Path) -> "LaunchToken":
        """Parse a token; raises OSError when there is none, ValueError when it is not one."""
        fields: Any = read_json(path)
        if not isinstance(fields, dict) or fields.pop("schema", None) != "orch.go/1":
            raise ValueError(f"{path} is not a launch token")
        values: dict[str, Any] = {key: tuple(item) if isinstance(item, list) else item for key, item in fields.items()}
        return cls(**values)


def revoke(path: Path) -> None:
    """Fence an attempt off: whoever reads its GO again from now on must not commit or delete."""
    path.unlink(missing_ok=True)


def holds(path: Path, token: LaunchToken) -> bool:
    """Whether `token` is still the one in force; an unreadable GO counts as revoked."""
    try:
        return LaunchToken.read(path) == token
    except (OSError, ValueError, TypeError, KeyError):
        return False
