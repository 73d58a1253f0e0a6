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
    """One file at one moment."""

    path: str
    sha256: str

    @classmethod
    def read(cls, path: Path) -> "CodeFile":
        """The file as it is now; one that cannot be read has the reason in place of its digest."""
        try:
            with path.open("rb") as stream:
                return cls(path=str(path), sha256=hashlib.file_digest(stream, "sha256").hexdigest())
        except OSError as error:
            return cls(path=str(path), sha256=f"unreadable: {error.strerror}")


@dataclass(frozen=True, kw_only=True)
class CodeRecord:
    """What is known of the code that trains, and how far that reaches."""

    files: Mapping[str, CodeFile] = field(default_factory=dict)
    """By the name of the module, or the path of a script as the command has it."""
    absent: tuple[str, ...] = ()
    """Top-level modules that the code names and that cannot be found."""
    covers: str = ""
    """Which files the record has, in words."""

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
        """None for what is no record, such as what an older version has left."""
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
        """The record in a run's identity; None where it has none."""
        return cls.from_json((identity.get("code") or {}).get("files"))

    def write(self, path: Path) -> None:
        write_durably(path, dump_line(self.to_json()).encode())

    @classmethod
    def read(cls, path: Path) -> "CodeRecord | None":
        """The record that this file holds; None when there is none. Raises OSError."""
        try:
            return cls.from_json(read_json(path))
        except (FileNotFoundError, ValueError):
            return None


def _plain(files: Mapping[str, CodeFile]) -> dict[str, dict[str, str]]:
    return {printable(name): {"path": printable(one.path), "sha256": one.sha256} for name, one in files.items()}


def printable(name: str) -> str:
    """A file's name as text that any file may hold: bytes that are no UTF-8 are replaced."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def changed_files(before: CodeRecord, now: CodeRecord) -> list[str]:
    """PURE: what of the code that both know is not as it was, in words.

    A module that only one side has is no change by itself: the module that names it has changed, or it was imported
    for another reason.
    """
    changed = [f"{name} changed" for name in changed_digests(before, now) if name in before.files]
    gone = [f"{name} is gone" for name in before.files if name in now.absent]
    new = [f"{name} is new" for name in before.absent if name in now.files]
    return [*changed, *gone, *new]


def changed_digests(before: CodeRecord, now: CodeRecord) -> dict[str, str]:
    """PURE: the present digests of the files that have changed, or that the code had named before they were there."""
    return {
        name: one.sha256
        for name, one in now.files.items()
        if name in before.absent or (name in before.files and before.files[name].sha256 != one.sha256)
    }
