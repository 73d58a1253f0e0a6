"""Catalog of checkpoints: the committed folders under one root (newest first), their owner, and those not trusted."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from checkpointing.errors import ManifestError
from checkpointing.format.commit import DELETED, Commit, parse_name, read_commit
from checkpointing.format.manifest import COMMIT
from checkpointing.storage.backends import Storage, open_storage

_UNREADABLE = Commit(manifest="", size=0, committed_at=0.0)


@dataclass(frozen=True)
class Owner:
    """An attempt. `fence` returns whether it may still commit and delete.

    `inherit` lists the checkpoints in its launch token. `ended_attempts` lists earlier attempts that no longer write,
    as `<attempt>-<nonce>`; their unfinished checkpoints are debris.
    """

    attempt: int
    nonce: str
    inherit: tuple[str, ...]
    fence: Callable[[], bool]
    ended_attempts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A committed checkpoint. `bytes` and `committed_at` are 0 if its COMMIT is damaged, which verification reports.

    `place` is its path or URL. `path` is the same as a Path and is useful only on mounted file systems.
    """

    name: str
    path: Path
    step: int
    attempt: int
    nonce: str
    bytes: int
    committed_at: float
    place: str = ""


class Catalog:
    """Finds checkpoints by their names and COMMIT markers."""

    def __init__(self, root: Path | str, storage: Storage | None = None) -> None:
        self.root, self.place = Path(root), str(root).rstrip("/")
        self.storage = storage or open_storage(root)

    def names(self) -> list[str]:
        """Return every folder with a checkpoint's name, committed or not, newest first."""
        known = [parts for name, size in self.storage.list("").items() if size is None and (parts := parse_name(name))]
        return [str(parts) for parts in sorted(known, reverse=True)]

    def is_committed(self, name: str) -> bool:
        """Return whether a checkpoint has its marker and no tombstone.

        An unreadable marker counts as present, so that the checkpoint is reported and never deleted as debris. An
        unreadable tombstone does not count.
        """
        return self._has(name, COMMIT, unreadable=True) and not self.is_tombstoned(name)

    def is_tombstoned(self, name: str) -> bool:
        """Return whether the checkpoint's deletion has begun. Any process that may delete here may finish it."""
        return self._has(name, DELETED, unreadable=False)

    def _has(self, name: str, file: str, *, unreadable: bool) -> bool:
        try:
            self.storage.open(f"{name}/{file}").close()
        except FileNotFoundError:
            return False
        except OSError:
            return unreadable
        return True

    def committed_entries(self) -> list[Entry]:
        """Return all committed checkpoints, highest step first and, within a step, latest attempt first."""
        return [self._entry(name) for name in self.names() if self.is_committed(name)]

    def entries_for_owner(self, owner: Owner) -> list[Entry]:
        """Return the checkpoints that an attempt may load or delete (its own and those it inherits), newest first."""
        names = [name for name in self.names() if name in owner.inherit or _is_owned(name, owner)]
        return [self._entry(name) for name in names if self.is_committed(name)]

    def _entry(self, name: str) -> Entry:
        parts = parse_name(name)
        assert parts is not None
        try:
            commit = read_commit(self.storage, name)
        except (OSError, ManifestError):
            commit = _UNREADABLE
        return Entry(
            name=name,
            path=self.root / name,
            step=parts.step,
            attempt=parts.attempt,
            nonce=parts.nonce,
            bytes=commit.size,
            committed_at=commit.committed_at,
            place=f"{self.place}/{name}",
        )


def _is_owned(name: str, owner: Owner) -> bool:
    parts = parse_name(name)
    return parts is not None and (parts.attempt, parts.nonce) == (owner.attempt, owner.nonce)


class DistrustedCheckpoints:
    """Copies refused in particular tiers, and names that a restore passed over in every tier."""

    def __init__(self) -> None:
        self._refused: set[tuple[str, str]] = set()
        self._passed_over: frozenset[str] = frozenset()

    def refuse(self, tier: str, name: str) -> None:
        """Mark the copy in this tier (a path, or `memory`) as bad. Copies elsewhere may be good."""
        self._refused.add((tier, name))

    def pass_over(self, names: Iterable[str]) -> None:
        """Mark the checkpoints that a restore skipped or passed over in favour of an older one."""
        self._passed_over = frozenset(names)

    def in_tier(self, tier: str) -> frozenset[str]:
        """Return the names of checkpoints in this tier that must not be copied from or relied on."""
        return self._passed_over | {name for path, name in self._refused if path == tier}
