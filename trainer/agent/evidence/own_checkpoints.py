"""Checkpoints that a user's own program writes: which there are, which cannot be whole, and setting one aside."""

import os
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from checkpointing.durable import fsync_dir, read_json
from checkpointing.safetensors import Malformed, read_header
from trainer.contract.command_checkpoints import SET_ASIDE, CommandCheckpointsConfig

MOST = 20
"""Checkpoints that are looked into; of older ones only the names are known."""
_MOST_FILES, _DEEPEST = 2000, 3
_LARGEST_JSON = 64 << 20
_ARCHIVES = frozenset({".pt", ".pth", ".bin", ".ckpt", ".npz"})
_WEIGHTS = frozenset({".safetensors", ".distcp", ".json", ".pkl", ".npy", *_ARCHIVES})
"""Endings of files that are never empty in a whole checkpoint."""
_NUMBER = re.compile(r"\d+")
_INCOMPLETE = "checkpoint-is-incomplete.txt"
"""Hugging Face's Trainer leaves it in a checkpoint that it had no time to finish, and does not look for it later."""

Files = dict[str, tuple[int, int]]
"""Name within the checkpoint -> bytes and time of the last change (ns)."""


@dataclass(frozen=True, kw_only=True)
class OwnCheckpoint:
    """One checkpoint; `identity` tells it from another that got its name later, `damage` says why it is not whole."""

    step: int
    path: Path
    identity: str
    files: Files
    damage: str = ""

    @property
    def bytes(self) -> int:
        return sum(size for size, _ in self.files.values())


def find(folder: Path, config: CommandCheckpointsConfig) -> tuple[list[OwnCheckpoint], set[str]]:
    """The newest ones, newest step first, and the identities of all; none where the folder is missing.

    Raises OSError when it cannot be read.
    """
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return [], set()
    named = [(step, entry) for entry in entries if (step := config.step_of(entry.name)) is not None]
    named.sort(key=lambda each: (each[0], each[1].name), reverse=True)
    known = [(step, entry, f"{entry.name}.{entry.inode():x}") for step, entry in named]
    found = [_read(folder / entry.name, step, identity) for step, entry, identity in known[:MOST]]
    return [one for one in found if one is not None], {identity for _, _, identity in known}


def _read(path: Path, step: int, identity: str) -> OwnCheckpoint | None:
    try:
        files = {str(file.relative_to(path)): _state(file) for file in _files(path)} if path.is_dir() else None
        return OwnCheckpoint(
            step=step, path=path, identity=identity,
            files={"": _state(path)} if files is None else files,
        )  # fmt: skip
    except OSError:  # deleted by the program while it was looked at
        return None


def _state(file: Path) -> tuple[int, int]:
    known = file.stat()
    return known.st_size, known.st_mtime_ns


def _files(folder: Path) -> Iterator[Path]:
    count = 0
    for at, folders, names in os.walk(folder):
        if len(Path(at).relative_to(folder).parts) >= _DEEPEST:
            folders.clear()
        for name in names:
            count += 1
            if count > _MOST_FILES:
                return
            yield Path(at) / name


def examined(found: list[OwnCheckpoint], most: int = 4) -> list[OwnCheckpoint]:
    """The newest so many with what is wrong with them, the others as they are."""
    judged = [
        replace(one, damage=damage(one, found[index + 1] if index + 1 < len(found) else None))
        for index, one in enumerate(found[:most])
    ]
    return [*judged, *found[most:]]


def damage(one: OwnCheckpoint, older: OwnCheckpoint | None) -> str:
    """Why this checkpoint cannot be whole, by signs that are cheap to see; empty when there is none.

    `older`: another checkpoint of the same program, to compare the names of the files with.
    """
    if _INCOMPLETE in one.files:
        return f"is marked as incomplete by {_INCOMPLETE}"
    if not one.files:
        return "is an empty folder"
    # Numbers are of ranks and shards, of which there may be fewer.
    there = {_NUMBER.sub("#", name) for name in one.files}
    missing = sorted(name for name in (older.files if older else ()) if _NUMBER.sub("#", name) not in there)
    if missing and older is not None:
        return f"lacks {missing[0]}, which {older.path.name} has"
    for name in sorted(one.files):
        if reason := _torn(one.path / name if name else one.path, one.files[name][0]):
            return f"is damaged: {name or one.path.name} {reason}"
    return ""


def _torn(file: Path, size: int) -> str:
    if size == 0:
        return "is empty" if file.suffix in _WEIGHTS else ""
    try:
        if file.suffix == ".safetensors":
            with file.open("rb") as stream:
                read_header(stream, size)
        elif file.suffix in _ARCHIVES:
            return _cut_archive(file)
        elif file.suffix == ".json" and size <= _LARGEST_JSON:
            read_json(file)
    except Malformed as error:
        return f"is no whole safetensors file: {error}"
    except ValueError:
        return "is no whole JSON file"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    return ""


def _cut_archive(file: Path) -> str:
    """torch.save writes a zip archive, whose directory comes last; older formats cannot be told."""
    with file.open("rb") as stream:
        if stream.read(4) != b"PK\x03\x04":
            return ""
    try:
        with zipfile.ZipFile(file):
            return ""
    except zipfile.BadZipFile:
        return "is no whole archive of torch.save: its directory is missing, it was cut off"


def set_aside(one: OwnCheckpoint, config: CommandCheckpointsConfig, attempt: int, generation: int) -> Path | None:
    """Rename it within its folder so that no program finds it; None when somebody has changed it. Raises OSError."""
    now = _read(one.path, one.step, one.identity)
    if now is None or now.files != one.files:
        return None
    target = one.path.with_name(f"{SET_ASIDE}.{one.step}.{attempt:03d}-{generation:03d}")
    if target.exists():
        return None
    os.rename(one.path, target)
    fsync_dir(target.parent)
    return target


def put_back(aside: Path, original: Path) -> bool:
    """Give it its name again, if nobody has taken that meanwhile. Raises OSError."""
    if original.exists() or not aside.exists():
        return False
    os.rename(aside, original)
    fsync_dir(original.parent)
    return True
