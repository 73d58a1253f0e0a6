"""Record of the user's code and packages in one attempt, with a digest for every file, and the response to changes."""

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import dump_line, read_json, write_durably
from trainer.protocol.plain_data import build
from trainer.protocol.user_code.installed_packages import changed_versions, provided_names

SCHEMA = "orch.code/1"


@dataclass(frozen=True, kw_only=True)
class CodeFile:
    """A file's path, and its digest when it was read."""

    path: str
    sha256: str

    @classmethod
    def read(cls, path: Path) -> "CodeFile":
        """Read the file. If it is unreadable, the reason replaces the digest."""
        try:
            with path.open("rb") as stream:
                return cls(path=str(path), sha256=hashlib.file_digest(stream, "sha256").hexdigest())
        except OSError as error:
            return cls(path=str(path), sha256=f"unreadable: {error.strerror}")


@dataclass(frozen=True, kw_only=True)
class CodeRecord:
    """Record of the training code, with the scope that it covers."""

    files: Mapping[str, CodeFile] = field(default_factory=dict)
    """Files keyed by module name, or by a script's path as given in the command."""
    absent: tuple[str, ...] = ()
    """Missing modules that the code tries to import: top-level modules and parts of its packages."""
    covers: str = ""
    """Description of which files the record covers."""
    packages: Mapping[str, str] | None = None
    """Versions of all installed distributions, keyed by normalized name; None: unknown."""
    imported: tuple[str, ...] = ()
    """Third-party top-level modules that the code imports, or that its process had imported."""
    site_folders: tuple[str, ...] = ()
    """Folders in which the distributions are installed, in the order of the import path."""
    late: tuple[str, ...] = ()
    """Names of files that were recorded because a rank had imported them by its first step."""
    folders: tuple[str, ...] = ()
    """Folders recorded with all their Python files, because code in them imports modules by other means."""

    @property
    def digest(self) -> str:
        """Return the SHA-256 of all file names and digests, without folders, or "" if there are no files."""
        if not self.files:
            return ""
        total = hashlib.sha256()
        for name in sorted(self.files):
            total.update(f"{name}\0{self.files[name].sha256}\0".encode(errors="surrogateescape"))
        return total.hexdigest()

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "digest": self.digest, **asdict(self), "files": _plain(self.files)}

    @classmethod
    def from_json(cls, value: Any) -> "CodeRecord | None":
        """Parse a record. Return None for anything else, such as data from an older version."""
        try:
            return build(cls, value) if value["schema"] == SCHEMA else None
        except (KeyError, TypeError, AttributeError):
            return None

    @classmethod
    def from_identity(cls, identity: Mapping[str, Any]) -> "CodeRecord | None":
        """Return the record from a run's identity, or None."""
        return cls.from_json((identity.get("code") or {}).get("files"))

    def write(self, path: Path) -> None:
        write_durably(path, dump_line(self.to_json()).encode())

    @classmethod
    def read(cls, path: Path) -> "CodeRecord | None":
        """Read the record in this file, or return None if it is missing or invalid. Raises OSError."""
        try:
            return cls.from_json(read_json(path))
        except (FileNotFoundError, ValueError):
            return None


def _plain(files: Mapping[str, CodeFile]) -> dict[str, dict[str, str]]:
    return {printable(name): {"path": printable(one.path), "sha256": one.sha256} for name, one in files.items()}


def printable(name: str) -> str:
    """Return a file name with bytes that are not UTF-8 replaced."""
    return name.encode(errors="surrogateescape").decode(errors="replace")


def changed_files(before: CodeRecord, now: CodeRecord) -> list[str]:
    """Describe the changes in the code that both records cover.

    A module in only one record does not count as a change, because either the module that imports it has changed, or it
    was imported for another reason. A new file in a folder that was recorded in full is a change.
    """
    changed = [f"{name} changed" for name in changed_digests(before, now) if name in before.files]
    gone = [f"{name} is gone" for name in before.files if name in now.absent]
    new = [f"{name} is new" for name in before.absent if name in now.files]
    return [*changed, *gone, *new, *(f"{name} is new" for name in _new_beside(before, now))]


def _new_beside(before: CodeRecord, now: CodeRecord) -> list[str]:
    """Return new files next to known files in folders recorded in full. Files in new folders may be output."""
    if not before.folders:
        return []
    known = {os.path.dirname(one.path) for one in before.files.values()}
    paths = {one.path for one in before.files.values()}
    beside = {folder for folder in known if any(Path(folder).is_relative_to(whole) for whole in before.folders)}
    return [
        name
        for name, one in now.files.items()
        if name not in before.files and name not in before.absent and name not in now.late
        if one.path not in paths and os.path.dirname(one.path) in beside
    ]


def changed_digests(before: CodeRecord, now: CodeRecord) -> dict[str, str]:
    """Return the current digests of files that have changed or were missing before."""
    return {
        name: one.sha256
        for name, one in now.files.items()
        if name in before.absent or (name in before.files and before.files[name].sha256 != one.sha256)
    }


MOST_LISTED = 20
"""Maximum number of changed files whose digests an event lists."""


def listed_digests(before: CodeRecord, now: CodeRecord) -> dict[str, str]:
    """Return the current digests of the first changed files, for an event."""
    changed = [(printable(name), digest) for name, digest in changed_digests(before, now).items()]
    return dict(changed[:MOST_LISTED])


def changed_packages(before: CodeRecord, now: CodeRecord) -> dict[str, tuple[str, str]]:
    """Return the old and new versions of changed distributions that affect training ("none": not installed).

    The result is empty if either record does not know its packages. Metadata is read only for distributions that
    differ. User packages with files in both records are compared by their files.
    """
    if before.packages is None or now.packages is None:
        return {}
    old, new = before.packages, now.packages
    by_files = {name.partition(".")[0] for name in before.files} & {name.partition(".")[0] for name in now.files}
    imported = {*before.imported, *now.imported} - by_files
    folders = dict.fromkeys((*now.site_folders, *before.site_folders))
    changed = changed_versions(old, new, imported, lambda name: provided_names(name, folders))
    return {name: (old.get(name, "none"), new.get(name, "none")) for name in changed}


def package_words(changed: Mapping[str, tuple[str, str]]) -> list[str]:
    """Describe changed packages."""
    return [f"package {name} {old} -> {new}" for name, (old, new) in changed.items()]


SHOWN = 5
"""Maximum number of files named in a reason."""


class CodeDecision(StrEnum):
    """Response to an attempt's code, which is always recorded."""

    RECORD = "record"  # the code is as expected, or unknown
    WARN = "warn"  # training continues, with an event and a line in `show` and `status`
    REFUSE = "refuse"  # the user must accept the code first


class Occasion(StrEnum):
    """Occasion on which the code is compared."""

    START = "start"  # the first attempt of a submission starts
    NEXT = "next"  # orch starts the next attempt or generation unattended
    RESUME = "resume"  # the user continues the run


def judge_code(
    before: CodeRecord | None,
    now: CodeRecord | None,
    occasion: Occasion,
    since: str,
    *,
    accepted: bool = False,
    packages: Sequence[str] = (),
) -> tuple[CodeDecision, str]:
    """Return the response to the code, and the reason. `since` describes `before`, as in "attempt 1".

    `packages` describes changed packages, which are treated like changed code. An unattended run continues with a
    recorded change, because a stopped run would waste time until its user notices. A user who types `resume` can
    respond, so the change is refused until it is accepted.
    """
    if before is None or now is None:
        return CodeDecision.RECORD, "nothing to compare with"
    changed = [*changed_files(before, now), *packages]
    if not changed:
        return CodeDecision.RECORD, f"the code matches {since}"
    reason = f"{shorten(changed)} since {since}"
    # Only a user who is present can decide to continue with different code.
    if occasion is Occasion.RESUME and not accepted:
        return CodeDecision.REFUSE, reason
    return CodeDecision.WARN, reason


def shorten(words: list[str]) -> str:
    """Join the first items, and add the number of the remaining ones."""
    more = f", and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join(words[:SHOWN]) + more
