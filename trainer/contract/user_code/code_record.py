"""The user's code as one attempt imports it: the digest of every file, by module or script."""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, read_json, write_durably

SCHEMA = "orch.code/1"


@dataclass(frozen=True, kw_only=True)
class CodeFile:
    """Path and digest of a file at the time of reading."""

    path: str
    sha256: str

    @classmethod
    def read(cls, path: Path) -> "CodeFile":
        """Read the file now; for an unreadable file, the reason takes the place of the digest."""
        try:
            with path.open("rb") as stream:
                return cls(path=str(path), sha256=hashlib.file_digest(stream, "sha256").hexdigest())
        except OSError as error:
            return cls(path=str(path), sha256=f"unreadable: {error.strerror}")


@dataclass(frozen=True, kw_only=True)
class CodeRecord:
    """Record of the training code, with the scope that it covers."""

    files: Mapping[str, CodeFile] = field(default_factory=dict)
    """Files by module name, or by the path of a script as the command gives it."""
    absent: tuple[str, ...] = ()
    """Top-level modules that the code imports and that are not found."""
    covers: str = ""
    """Description of the scope: which files the record has."""

    @property
    def digest(self) -> str:
        """SHA-256 of all names and digests; folders do not matter."""
        total = hashlib.sha256()
        for name in sorted(self.files):
            total.update(f"{name}\0{self.files[name].sha256}\0".encode(errors="surrogateescape"))
        return total.hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "digest": self.digest, **asdict(self), "files": _plain(self.files)}

    @classmethod
    def from_json(cls, value: Any) -> "CodeRecord | None":
        """Parse a record; None for anything else, such as data from an older version."""
        try:
            if value["schema"] != SCHEMA:
                return None
            files = {
                str(name): CodeFile(path=one["path"], sha256=one["sha256"]) for name, one in value["files"].items()
            }
            return cls(files=files, absent=tuple(map(str, value["absent"])), covers=str(value["covers"]))
        except (KeyError, TypeError, AttributeError):
            return None

    @classmethod
    def from_identity(cls, identity: Mapping[str, Any]) -> "CodeRecord | None":
        """Return the record in a run's identity, or None."""
        return cls.from_json((identity.get("code") or {}).get("files"))

    def write(self, path: Path) -> None:
        write_durably(path, dump_line(self.to_json()).encode())

    @classmethod
    def read(cls, path: Path) -> "CodeRecord | None":
        """Read the record in this file; None if the file is missing or invalid. Raises OSError."""
        try:
            return cls.from_json(read_json(path))
        except (FileNotFoundError, ValueError):
            return None


def _plain(files: Mapping[str, CodeFile]) -> dict[str, dict[str, str]]:
    return {printable(name): {"path": printable(one.path), "sha256": one.sha256} for name, one in files.items()}


def printable(name: str) -> str:
    """Return a file's name as valid UTF-8; other bytes are replaced."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def changed_files(before: CodeRecord, now: CodeRecord) -> list[str]:
    """PURE: describe the changes in the code that both records cover.

    A module in only one record does not count as a change: either the module that imports it has changed, or it was
    imported for another reason.
    """
    changed = [f"{name} changed" for name in changed_digests(before, now) if name in before.files]
    gone = [f"{name} is gone" for name in before.files if name in now.absent]
    new = [f"{name} is new" for name in before.absent if name in now.files]
    return [*changed, *gone, *new]


def changed_digests(before: CodeRecord, now: CodeRecord) -> dict[str, str]:
    """PURE: return the present digests of files that have changed, or that were missing before."""
    return {
        name: one.sha256
        for name, one in now.files.items()
        if name in before.absent or (name in before.files and before.files[name].sha256 != one.sha256)
    }
