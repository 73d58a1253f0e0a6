"""GO, the launch token that an agent requires before it trains. It is checked again before commits and deletions."""

import errno
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, fsync_dir, read_json, write_durably
from checkpointing.storage.storage_errors import FULL
from trainer.protocol.plain_data import build


@dataclass(frozen=True, kw_only=True)
class LaunchToken:
    """Launch token, written by the controller after it has adopted exactly one job for the attempt."""

    attempt: int
    epoch: int  # the controller's fencing epoch at launch
    job_id: str
    nonce: str  # attempt nonce; part of its checkpoint names
    checkpoints: tuple[str, ...] = ()  # earlier attempts' checkpoint folders that this attempt may inherit
    perhaps: tuple[str, ...] = ()  # other checkpoints on nodes' own disks, inherited if found
    corrupt: tuple[str, ...] = ()  # checkpoints of earlier attempts that must never be loaded
    over: tuple[str, ...] = ()  # `<attempt>-<nonce>` of the run's earlier attempts, which no longer write
    config_digest: str = ""  # digest of the config at launch; empty: unknown
    restarts: int = 0  # times that Slurm had requeued the job when it was launched for this attempt
    trained: bool = False  # an earlier attempt of the run has reached a step, saved or not
    mtbf: float = 0.0  # mean seconds between failures of a job of this size; 0: unknown

    def write(self, path: Path) -> None:
        """Write the token. Writing it after its revocation, as a paused controller may do, has no effect."""
        write_durably(path, dump_line({"schema": "orch.go/1", **asdict(self)}).encode())

    @classmethod
    def read(cls, path: Path) -> "LaunchToken":
        """Parse a token. Raises OSError if it is missing or revoked, ValueError if it is invalid."""
        if was_revoked(path):
            raise FileNotFoundError(errno.ENOENT, "was revoked", str(path))
        fields: Any = read_json(path)
        if not isinstance(fields, dict) or fields.get("schema") != "orch.go/1":
            raise ValueError(f"{path} is not a launch token")
        return build(cls, fields)

    def is_same(self, other: "LaunchToken") -> bool:
        """Return whether both tokens launch the same job. Their epochs may differ after a controller takeover."""
        return self._launch == other._launch

    @property
    def _launch(self) -> tuple[int, str, int, str]:
        return self.attempt, self.job_id, self.restarts, self.nonce


def revoke(path: Path) -> None:
    """Fence an attempt permanently: a process that reads its GO afterwards must not commit or delete."""
    if is_revoked(path):
        return
    try:
        write_durably(_revocation_marker(path), b"")
    except OSError as error:
        if error.errno not in FULL:
            raise
        os.replace(path, _revocation_marker(path))  # needs no disk space; the marker's content does not matter
        fsync_dir(path.parent)
    path.unlink(missing_ok=True)


def was_revoked(path: Path) -> bool:
    """Return whether the controller has revoked this GO. If not, a missing GO was deleted by someone else."""
    return _revocation_marker(path).exists()


def is_revoked(path: Path) -> bool:
    """Return whether this GO was revoked and is gone."""
    return was_revoked(path) and not path.exists()


def _revocation_marker(path: Path) -> Path:
    """Return the marker next to a revoked GO. A paused controller may rewrite GO, but never removes the marker."""
    return path.with_name(f"{path.name}.revoked")


def holds(path: Path, token: LaunchToken) -> bool:
    """Return whether `token` is still valid. An unreadable GO counts as revoked."""
    try:
        return token.is_same(LaunchToken.read(path))
    except (OSError, ValueError, TypeError, KeyError):
        return False
