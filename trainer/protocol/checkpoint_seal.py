"""Seals of a program's checkpoints. A seal has the size and the SHA-256 digest of every file of a complete checkpoint.

Seals are in the run's folder, because a program may list, move or delete everything in its own checkpoints.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from checkpointing.storage.durable import canonical, open_regular, read_json, write_durably
from trainer.protocol.failures.outcome import legible
from trainer.protocol.plain_data import build

_SCHEMA = "orch.seal/1"
BLOCK = 4 << 20
BESIDE = "../"
"""Prefix for the names of files in a checkpoint's other entries."""
_TEXTS = frozenset({".json", ".yaml", ".yml", ".toml", ".txt", ".md"})
"""Suffixes of files that a program may write once and keep when it saves again: settings, a vocabulary."""

_NOT_UTF_8 = "backslashreplace"
"""Encoding of file names that are not UTF-8, which Python reads as surrogates."""

Tick = Callable[[], None]
"""Called after every block of a file; it may raise an exception to stop the reading."""


@dataclass(frozen=True, kw_only=True)
class SealedFile:
    """Size, time of the last change, inode and digest of one file."""

    size: int
    changed: int  # ns
    inode: int
    sha256: str

    def is_untouched(self, now: os.stat_result) -> bool:
        """Return whether the file has the same size, time and inode as when it was sealed."""
        return (self.size, self.changed, self.inode) == (now.st_size, now.st_mtime_ns, now.st_ino)


@dataclass(frozen=True, kw_only=True)
class CheckpointSeal:
    """Record of a complete checkpoint. File names are relative to its path; an empty name is the path itself."""

    name: str
    step: int
    path: str
    sealed_at: float
    files: Mapping[str, SealedFile]
    siblings: tuple[str, ...] = ()  # names of other entries in its folder that belong to it

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def write(self, path: Path) -> None:
        """Write the seal with its own digest. Raises OSError."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = asdict(self)
        write_durably(path, canonical({"schema": _SCHEMA, "seal": text, "sha256": _digest(text)}, _NOT_UTF_8))

    @classmethod
    def read(cls, path: Path) -> "CheckpointSeal | None":
        """Return a stored seal, or None if there is none or it is damaged. Raises OSError for an unreadable one."""
        try:
            stored = read_json(path)
            if stored["sha256"] != _digest(stored["seal"]):
                return None
            return build(cls, stored["seal"])
        except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError, AttributeError):
            return None


def _digest(seal: object) -> str:
    return hashlib.sha256(canonical(seal, _NOT_UTF_8)).hexdigest()


def seal_file(seals: Path, name: str) -> Path:
    """Return the file with the seal of a checkpoint's entry."""
    return seals / f"{name}.json"


def list_files(path: Path, siblings: Sequence[str] = ()) -> dict[str, Path]:
    """Return the files of a checkpoint by name. Links to folders and broken links are left out. Raises OSError."""
    found = {name: file for name, file in _walk(path)}
    for sibling in siblings:
        entries = _walk(path.parent / sibling)
        found.update({f"{BESIDE}{sibling}{'/' if name else ''}{name}": file for name, file in entries})
    return dict(sorted(found.items()))


def _walk(path: Path) -> Iterator[tuple[str, Path]]:
    def refuse(error: OSError) -> None:
        raise error

    if not path.is_dir():
        path.lstat()  # raises if it is missing
        yield "", path
        return
    for at, _, names in os.walk(path, onerror=refuse):
        for name in names:
            file = Path(at, name)
            if file.is_file():
                yield str(file.relative_to(path)), file


class ChangedMeanwhile(Exception):  # noqa: N818  # no error: the program still writes
    """Raised if a checkpoint changes while it is read."""


def digest_files(files: Mapping[str, Path], known: Mapping[str, SealedFile], tick: Tick) -> dict[str, SealedFile]:
    """Return the digests of files. Untouched files in `known` are not read again. Raises OSError, ChangedMeanwhile."""
    found = dict(known)
    for name, path in files.items():
        if name not in known or not known[name].is_untouched(path.stat()):
            found[name] = _digest_file(path, tick)
    return {name: found[name] for name in files}


def _digest_file(path: Path, tick: Tick) -> SealedFile:
    total, block = hashlib.sha256(), memoryview(bytearray(BLOCK))
    with open_regular(path) as stream:
        before = os.fstat(stream.fileno())
        while count := stream.readinto(block):  # type: ignore[attr-defined]  # a buffered reader
            total.update(block[:count])
            tick()
    file = SealedFile(
        size=before.st_size, changed=before.st_mtime_ns, inode=before.st_ino, sha256=total.hexdigest()
    )  # fmt: skip
    if not file.is_untouched(path.stat()):
        raise ChangedMeanwhile(path)
    return file


def find_mismatch(seal: CheckpointSeal, path: Path, tick: Tick) -> str:
    """Return the first difference between a checkpoint and its seal, or "". Additional files are no difference.
    Raises OSError if a file cannot be read.
    """
    places = {name: _place(path, name) for name in seal.files}
    for name, file in seal.files.items():
        shown = _shown(name, path)
        try:
            size = places[name].stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return f"lacks {shown}, which it had when it was sealed"
        if size != file.size:
            return f"does not match its seal: {shown} has {size} bytes instead of {file.size}"
    for name, file in seal.files.items():
        with suppress(ChangedMeanwhile):
            if _digest_file(places[name], tick).sha256 == file.sha256:
                continue
        return f"does not match its seal: {_shown(name, path)} has other bytes than when it was sealed"
    return ""


def _place(path: Path, name: str) -> Path:
    return path.parent / name.removeprefix(BESIDE) if name.startswith(BESIDE) else path / name if name else path


def _shown(name: str, path: Path) -> str:
    return legible(name.removeprefix(BESIDE) or path.name)


def is_rewritten(seal: CheckpointSeal, path: Path, until: int | None = None) -> bool:
    """Return whether the program has written a sealed checkpoint again, or added to it. Raises OSError.

    It has if no sealed file is as it was. Else none may be missing, and all that are no texts must have been written
    again. While ranks run (no `until`), files may also be extended, or replaced by newer ones; a save that a kill
    has ended may have done this to some files only. No rank has written after `until`, in the clock of the files.
    """
    untouched, changed, in_place = [], [], False
    for name, file in seal.files.items():
        try:
            now = _place(path, name).stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        if file.is_untouched(now):
            untouched.append(name)
            continue
        changed.append(name)
        is_newer = now.st_mtime_ns > file.changed
        if until is not None and not (is_newer and now.st_mtime_ns <= until):
            return False
        in_place |= not (now.st_ino != file.inode and is_newer or now.st_size > file.size)
    if not untouched:
        return bool(changed)
    if len(untouched) + len(changed) < len(seal.files):
        return False
    is_whole = any(map(_is_data, changed)) and not any(map(_is_data, untouched))
    return is_whole or (until is None and not in_place)


def _is_data(name: str) -> bool:
    return Path(name).suffix not in _TEXTS
