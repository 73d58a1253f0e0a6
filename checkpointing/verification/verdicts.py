"""Verdicts: what a verification by hand found, each a small file in the folder `verdicts` beside the checkpoints.

A bad one counts: retention takes that copy for nobody's substitute. A good one is only shown, because bytes may rot
afterwards. A verdict is about one copy in one place, and about the manifest that it had then.
"""

import contextlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from checkpointing.errors import ManifestError
from checkpointing.format.commit import parse_name, read_commit
from checkpointing.storage.backends import Storage
from checkpointing.storage.digests import digest
from checkpointing.storage.durable import canonical

VERDICTS = "verdicts"
SCHEMA = "orch.verdict/1"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found of the copy of `name` in `place` (the folder or URL that holds it), at which level and when.

    `manifest` is the digest in its COMMIT, "" when that could not be believed; `at` in seconds since the epoch.
    """

    name: str
    place: str
    manifest: str
    ok: bool
    level: int
    at: float
    reason: str = ""


def manifest_of(storage: Storage, name: str) -> str:
    """Which manifest a copy has; raises OSError when its COMMIT is there and cannot be read."""
    with contextlib.suppress(ManifestError, FileNotFoundError):
        return read_commit(storage, name).manifest
    return ""


def record(storage: Storage, verdict: Verdict) -> None:
    """Write a verdict over an earlier one of the same copy; raises OSError."""
    storage.publish(_file(verdict.name, verdict.place), canonical({"schema": SCHEMA, **asdict(verdict)}))


def forget(storage: Storage, place: str, present: Iterable[str]) -> None:
    """Take away the verdicts on copies that `place` has no more; raises OSError."""
    there = set(present)
    for verdict in read_verdicts(storage):
        if verdict.place == place and verdict.name not in there:
            storage.delete(_file(verdict.name, place))


def read_verdicts(storage: Storage) -> list[Verdict]:
    """All verdicts; damaged ones are left out. Raises OSError when they cannot be listed."""
    names = [name for name, size in storage.list(VERDICTS).items() if size is not None]
    return [verdict for name in names if (verdict := _read(storage, name)) is not None]


def known_bad(storage: Storage, place: str, copies: Storage) -> dict[str, str]:
    """Names whose copy in `place` (read through `copies`) was found bad and is still the same one, and what was found.

    Raises OSError.
    """
    bad = [verdict for verdict in read_verdicts(storage) if verdict.place == place and not verdict.ok]
    return {item.name: item.reason for item in bad if item.manifest == manifest_of(copies, item.name)}


def _file(name: str, place: str) -> str:
    return f"{VERDICTS}/{name}.{digest(place.encode())[:16]}"


def _read(storage: Storage, file: str) -> Verdict | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        with storage.open(f"{VERDICTS}/{file}") as stream:
            fields = json.loads(stream.read())
        if fields.pop("schema") != SCHEMA or parse_name(fields["name"]) is None:
            return None
        return Verdict(**fields)
    return None
