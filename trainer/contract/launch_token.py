"""GO: the launch token without which an agent refuses to train, and the fence that later actions read again."""

import errno
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, fsync_dir, read_json, write_durably
from checkpointing.storage.storage_errors import FULL


@dataclass(frozen=True, kw_only=True)
class LaunchToken:
    """Written by the controller after it has adopted exactly one job for the attempt."""

    attempt: int
    epoch: int  # the controller's fencing epoch when it launched
    job_id: str
    nonce: str  # of the attempt; part of its checkpoint names
    checkpoints: tuple[str, ...] = ()  # folder names of earlier attempts that this attempt may inherit
    perhaps: tuple[str, ...] = ()  # further ones, on nodes' own disks: inherited where they are found, never missed
    corrupt: tuple[str, ...] = ()  # those of earlier attempts that must not be loaded, whatever else is left
    over: tuple[str, ...] = ()  # `<attempt>-<nonce>` of the run's earlier attempts: they write no more
    config_digest: str = ""  # of the config that this attempt was decided with; empty: not known
    trained: bool = False  # an earlier attempt of the run has reached a step, whether or not it was saved
    mtbf: float = 0.0  # seconds between two failures of a job of this size, as far as is known; 0: not known

    def write(self, path: Path) -> None:
        """Put the token in force; without effect once it was revoked, however late a paused controller does it."""
        fields = asdict(self)
        if not self.corrupt:  # agents of older versions know no such key
            del fields["corrupt"]
        write_durably(path, dump_line({"schema": "orch.go/1", **fields}).encode())

    @classmethod
    def read(cls, path: Path) -> "LaunchToken":
        """Parse a token; raises OSError when there is none (any more), ValueError when it is not one."""
        if _revoked(path).exists():
            raise FileNotFoundError(errno.ENOENT, "was revoked", str(path))
        fields: Any = read_json(path)
        if not isinstance(fields, dict) or fields.pop("schema", None) != "orch.go/1":
            raise ValueError(f"{path} is not a launch token")
        values: dict[str, Any] = {key: tuple(item) if isinstance(item, list) else item for key, item in fields.items()}
        return cls(**values)

    def is_same(self, other: "LaunchToken") -> bool:
        """Whether both let the same job train; a controller that took over may have written it with its own epoch."""
        return (self.attempt, self.job_id, self.nonce) == (other.attempt, other.job_id, other.nonce)


def revoke(path: Path) -> None:
    """Fence an attempt for good: a process that reads its GO from now on must not commit or delete."""
    if is_revoked(path):
        return
    try:
        write_durably(_revoked(path), b"")
    except OSError as error:
        if error.errno not in FULL:
            raise
        os.replace(path, _revoked(path))  # needs no room; that it has a token inside makes no difference
        fsync_dir(path.parent)
    path.unlink(missing_ok=True)


def is_revoked(path: Path) -> bool:
    """Whether an attempt is fenced."""
    return _revoked(path).exists() and not path.exists()


def _revoked(path: Path) -> Path:
    """Stands beside a GO that is over: a controller that was paused may write GO again, and cannot take this away."""
    return path.with_name(f"{path.name}.revoked")


def holds(path: Path, token: LaunchToken) -> bool:
    """Whether `token` is still the one in force; an unreadable GO counts as revoked."""
    try:
        return token.is_same(LaunchToken.read(path))
    except (OSError, ValueError, TypeError, KeyError):
        return False
