"""Verdicts on checkpoints, stored in small files in the run's folder, and the difference between two tensors.

Retention does not count a copy with a bad verdict towards those to keep. A good verdict is only informational, because
bytes may rot later, except that retention keeps the newest copy that has passed a restore test. A verdict applies to
one copy in one location, with the manifest that it had at the time.
"""

import contextlib
import json
import math
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass

from checkpointing.errors import ManifestError
from checkpointing.format.commit import parse_name, read_commit
from checkpointing.format.manifest import TensorInfo
from checkpointing.storage.backends import Storage
from checkpointing.storage.digests import digest
from checkpointing.storage.durable import canonical


@dataclass(frozen=True, kw_only=True)
class TensorDiff:
    """The difference in one tensor between two checkpoints.

    A missing tensor is None, and numbers are None if the values are not comparable. `largest` is the largest absolute
    difference between values, `relative` is the norm of the difference divided by the larger of the two norms, and
    `changed` is the share of values whose bits differ. If `by_fingerprint` is set, only fingerprints were compared.
    """

    key: str
    first: TensorInfo | None
    second: TensorInfo | None
    equal: bool = False
    by_fingerprint: bool = False
    largest: float | None = None
    relative: float | None = None
    changed: float | None = None

    @property
    def comparable(self) -> bool:
        return self.first is not None and self.first == self.second

    @property
    def weight(self) -> float:
        """Sort key: tensors that cannot be compared, or have no number, come first."""
        if self.relative is None:
            return 0.0 if self.equal else math.inf
        return math.inf if math.isnan(self.relative) else self.relative


VERDICTS = "verdicts"
SCHEMA = "orch.verdict/1"
RESTORE_TESTED = 5
"""Level of a restore test, which loads the checkpoint into a model and trains it. Above all verification levels."""


@dataclass(frozen=True, kw_only=True)
class CopyVerdict:
    """Verdict on the copy of `name` in `place` (the folder or URL that holds it), with its level and time.

    `manifest` is the digest in the copy's COMMIT, or "" if COMMIT could not be trusted. `at` is in seconds since the
    epoch.
    """

    name: str
    place: str
    manifest: str
    ok: bool
    level: int
    at: float
    reason: str = ""


def read_manifest_digest(storage: Storage, name: str) -> str:
    """Return a copy's manifest digest, or "" if it has no valid COMMIT. Raises OSError if COMMIT is unreadable."""
    with contextlib.suppress(ManifestError, FileNotFoundError):
        return read_commit(storage, name).manifest
    return ""


def record(storage: Storage, verdict: CopyVerdict) -> None:
    """Write a verdict, unless an earlier good verdict on the same copy has a higher level. Raises OSError."""
    file = _file(verdict.name, verdict.place)
    earlier = _read(storage, file)
    if earlier is None or not _is_superseded(earlier, verdict):
        storage.publish(file, canonical({"schema": SCHEMA, **asdict(verdict)}))


def _is_superseded(earlier: CopyVerdict, verdict: CopyVerdict) -> bool:
    """Return whether both found the same copy good, and the earlier one at a higher level."""
    return earlier.ok and verdict.ok and earlier.manifest == verdict.manifest and earlier.level > verdict.level


def withdraw(storage: Storage, name: str, place: str) -> None:
    """Delete a good verdict on a copy that is now in doubt. A bad verdict stays. Raises OSError."""
    known = _read(storage, _file(name, place).rpartition("/")[2])
    if known is not None and known.ok:
        storage.delete(_file(name, place))


def forget(storage: Storage, place: str, present: Iterable[str]) -> None:
    """Delete the verdicts on copies that no longer exist in `place`. Raises OSError."""
    there = set(present)
    for verdict in read_verdicts(storage):
        if verdict.place == place and verdict.name not in there:
            storage.delete(_file(verdict.name, place))


def read_verdicts(storage: Storage) -> list[CopyVerdict]:
    """Return all verdicts except damaged ones. Raises OSError if they cannot be listed."""
    names = [name for name, size in storage.list(VERDICTS).items() if size is not None]
    return [verdict for name in names if (verdict := _read(storage, f"{VERDICTS}/{name}")) is not None]


def known_bad(storage: Storage, place: str, copies: Storage) -> dict[str, str]:
    """Return the reasons for bad verdicts by name, for unchanged copies in `place` (read through `copies`).

    Raises OSError.
    """
    return bad_copies(read_verdicts(storage), place, copies)


def bad_copies(verdicts: Iterable[CopyVerdict], place: str, copies: Storage) -> dict[str, str]:
    """Return the same as `known_bad`, but from verdicts that have already been read. Raises OSError."""
    bad = [verdict for verdict in verdicts if verdict.place == place and not verdict.ok]
    return {item.name: item.reason for item in bad if item.manifest == read_manifest_digest(copies, item.name)}


def newest_restore_tested(
    verdicts: Iterable[CopyVerdict], place: str, copies: Storage, names: Collection[str]
) -> str | None:
    """Return the newest of `names` whose copy in `place` has passed a restore test and has not changed since.

    Raises OSError.
    """
    passed = [item for item in verdicts if item.ok and item.level >= RESTORE_TESTED and item.place == place]
    tested = {parts: item for item in passed if item.name in names and (parts := parse_name(item.name)) is not None}
    newest_first = (tested[parts] for parts in sorted(tested, reverse=True))
    return next((item.name for item in newest_first if item.manifest == read_manifest_digest(copies, item.name)), None)


def _file(name: str, place: str) -> str:
    return f"{VERDICTS}/{name}.{digest(place.encode())[:16]}"


def _read(storage: Storage, file: str) -> CopyVerdict | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        with storage.open(file) as stream:
            fields = json.loads(stream.read())
        if fields.pop("schema") != SCHEMA or parse_name(fields["name"]) is None:
            return None
        return CopyVerdict(**fields)
    return None
