"""Moves a user program's checkpoint out of the folder that the program scans, and back, completely or not at all.
A file that names the checkpoint as the newest (DeepSpeed's `latest`, Megatron's `latest_checkpointed_iteration.txt`, a
symbolic link `last.ckpt`) is changed to name an older one.
"""

import os
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from checkpointing.storage.durable import fsync_dir, write_durably
from trainer.agent.user_command.checkpoints import CommandCheckpoint, counterpart, find_digits, read_again
from trainer.protocol.command_progress import SET_ASIDE, CommandCheckpointsConfig
from trainer.protocol.run_dir import RunDir

_POINTER_NAMES = re.compile(r"(?<![a-z])(latest|last|newest|current)", re.IGNORECASE)
"""Words in the names of files that name the newest checkpoint."""
_TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file, whose number is a checkpoint's step. Those of others may be epochs, or anything else."""
_LARGEST_POINTER = 4096


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """A file or symbolic link that names the newest checkpoint, with its content before and after a repair."""

    path: str
    before: str
    after: str  # empty: there is no other checkpoint to name, so the file is moved away
    link: bool = False

    @property
    def words(self) -> str:
        """Return a description of the repair."""
        name = Path(self.path).name
        return f"{name} now names {Path(self.after.strip()).name}" if self.after else f"{name} is moved too"


def find_target(one: CommandCheckpoint, run: RunDir, attempt: int, generation: int) -> Path | None:
    """Return a path to move a checkpoint to: next to its folder, or in the run's own folder.
    The path is on the checkpoint's file system. Return None if no such folder is writable. Raises OSError.
    """
    folder = Path(os.path.realpath(one.path.parent))
    name = f"{one.step}.{attempt:03d}-{generation:03d}"
    device = os.lstat(one.path).st_dev
    places = [(folder.parent, folder.parent / SET_ASIDE / run.name)] if folder.parent != folder else []
    for there, place in [*places, (run.path, run.path / SET_ASIDE)]:
        if os.stat(there).st_dev == device and os.access(there, os.W_OK | os.X_OK):
            return place / name
    return None


def set_aside(one: CommandCheckpoint, target: Path, config: CommandCheckpointsConfig) -> bool:
    """Move a checkpoint aside. Return False if it has changed since it was examined or cannot be moved."""
    try:
        now = read_again(one, config)
        if now is None or (now.files, now.siblings) != (one.files, one.siblings) or os.path.lexists(target):
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(one.path, target)
        if not move_siblings(one.path, target, one.siblings):
            put_back(target, one.path, one.siblings)
            return False
    except OSError:
        return False
    _fsync(target.parent, one.path.parent)
    return True


def move_siblings(original: Path, aside: Path, siblings: Sequence[str]) -> bool:
    """Move a checkpoint's other entries, following the first one, and return whether all that exist were moved."""
    place = _siblings_folder(aside)
    if not siblings or not os.path.lexists(aside):
        return True
    try:
        place.mkdir(exist_ok=True)
        for name in siblings:
            # The program may have written a new one in the meantime.
            if not os.path.lexists(place / name) and os.path.lexists(original.parent / name):
                os.rename(original.parent / name, place / name)
    except OSError:
        return False
    _fsync(place, original.parent)
    return True


def _siblings_folder(aside: Path) -> Path:
    return aside.with_name(f"{aside.name}.beside")


def put_back(aside: Path, original: Path, siblings: Sequence[str] = ()) -> bool:
    """Move a checkpoint back unless one of its names is taken, and return whether it was moved. Raises OSError."""
    place = _siblings_folder(aside)
    moved = [name for name in siblings if os.path.lexists(place / name)]
    taken = (original, *(original.parent / name for name in moved))
    if any(map(os.path.lexists, taken)) or not os.path.lexists(aside):
        return False
    for name in moved:
        os.rename(place / name, original.parent / name)
    os.rename(aside, original)  # comes last, since the checkpoint counts as set aside until then
    _fsync(original.parent)
    _tidy(aside)
    return True


def _tidy(place: Path) -> None:
    for folder in (_siblings_folder(place), place.parent, place.parent.parent):
        with suppress(OSError):  # not empty
            folder.rmdir()


def _fsync(*folders: Path) -> None:
    for folder in folders:
        with suppress(OSError):
            fsync_dir(folder)


def pointers_to(one: CommandCheckpoint, instead: CommandCheckpoint | None) -> list[Pointer]:
    """Return the files that name this checkpoint as the newest and must name `instead`.
    Raises OSError, and LookupError for a file that names an entry without a counterpart in `instead`.
    """
    found = [_pointer(one.path.parent / name, one, instead) for name in os.listdir(one.path.parent)]
    return sorted((pointer for pointer in found if pointer is not None), key=lambda pointer: pointer.path)


def _pointer(path: Path, one: CommandCheckpoint, instead: CommandCheckpoint | None) -> Pointer | None:
    if path.name in (one.path.name, *one.siblings) or (before := _content(path)) is None:
        return None
    # A link that leads to the checkpoint would lead nowhere, whatever its name.
    if not (_leads_to(path, one) if path.is_symlink() else _POINTER_NAMES.search(path.name)):
        return None
    after = _replace_name(before, one, instead)
    return None if after is None else Pointer(path=str(path), before=before, after=after, link=path.is_symlink())


def _leads_to(link: Path, one: CommandCheckpoint) -> bool:
    target = link.parent / os.readlink(link)
    return target.name in (one.path.name, *one.siblings) and os.path.realpath(target.parent) == os.path.realpath(
        one.path.parent
    )


def stale_pointers(newest: CommandCheckpoint, config: CommandCheckpointsConfig) -> list[Pointer]:
    """Return the files that name a checkpoint that does not exist, and must name `newest`. Raises OSError."""
    names = os.listdir(newest.path.parent)
    steps = {config.parse_step(name) for name in names}
    found = [_stale(newest.path.parent / name, newest, steps, config) for name in names]
    return [pointer for pointer in found if pointer is not None]


def _stale(
    path: Path, newest: CommandCheckpoint, steps: Collection[int | None], config: CommandCheckpointsConfig
) -> Pointer | None:  # fmt: skip
    if not _POINTER_NAMES.search(path.name) or (before := _content(path)) is None:
        return None
    target = before.strip()
    name = target.rpartition("/")[2]
    named: int | None
    if target.isascii() and target.isdigit():
        named, new = int(target), str(int(find_digits(newest.path.name, newest.step)))
        if path.name != _TRACKER:
            return None
    else:
        named, new = config.parse_step(name), f"{target.removesuffix(name)}{newest.path.name}"
    if named is None or named in steps:
        return None
    return Pointer(path=str(path), before=before, after=before.replace(target, new), link=path.is_symlink())


def _content(path: Path) -> str | None:
    """Return the text of a small file, or the target of a symbolic link, or None for anything else."""
    try:
        if path.is_symlink():
            return os.readlink(path)
        if path.is_file() and path.stat().st_size <= _LARGEST_POINTER:
            return path.read_text()
    except (OSError, UnicodeDecodeError):
        pass
    return None


def _replace_name(text: str, one: CommandCheckpoint, instead: CommandCheckpoint | None) -> str | None:
    """Return the text with the name of `instead`, or None unless it names only this checkpoint."""
    target = text.strip()
    name = target.rpartition("/")[2]
    if name in (one.path.name, *one.siblings):
        new = f"{target.removesuffix(name)}{_entry_like(name, one, instead)}" if instead is not None else ""
    elif target.isascii() and target.isdigit() and int(target) == int(find_digits(one.path.name, one.step)):
        width = len(target) if target.startswith("0") else 0
        new = str(int(find_digits(instead.path.name, instead.step))).zfill(width) if instead is not None else ""
    else:
        return None
    return text.replace(target, new) if new else ""


def _entry_like(name: str, one: CommandCheckpoint, instead: CommandCheckpoint) -> str:
    if name == one.path.name:
        return instead.path.name
    found = counterpart(name, one.path.name, instead.path.name, instead.siblings)
    if found is None:
        raise LookupError(f"{instead.path} has no counterpart of {name}")
    return found


def retarget(pointer: Pointer, scratch: Path, *, back: bool = False) -> bool:
    """Make a pointer name the other checkpoint (or the first, if `back`) unless it has changed. Return whether it now
    does. `scratch` is a path on the same file system, outside the folder that the program scans. Raises OSError.
    """
    path = Path(pointer.path)
    now, then = (pointer.after, pointer.before) if back else (pointer.before, pointer.after)
    if (_content(path) or "") != now:
        return False
    scratch = scratch.with_name(f"{scratch.name}.{path.name}")
    scratch.parent.mkdir(parents=True, exist_ok=True)
    if not then:
        os.replace(path, scratch)
    elif pointer.link:
        scratch.unlink(missing_ok=True)
        scratch.symlink_to(then)
        os.replace(scratch, path)
    else:
        mode = path.stat().st_mode & 0o777 if now else 0o644
        write_durably(scratch, then.encode(), mode=mode)
        os.replace(scratch, path)
    _fsync(path.parent)
    _tidy(scratch)
    return True
