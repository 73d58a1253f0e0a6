"""Moving a checkpoint of a user's own program out of the folder that the program scans, and back.

A file there that names this checkpoint as the newest one (DeepSpeed's `latest`, Megatron's
`latest_checkpointed_iteration.txt`, a symbolic link `last.ckpt`) is made to name an older one.
"""

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from checkpointing.storage.durable import fsync_dir, write_durably
from trainer.agent.user_command.checkpoints import CommandCheckpoint, read_again
from trainer.contract.run_dir import RunDir
from trainer.contract.user_command.command_checkpoints import SET_ASIDE

_POINTER_NAMES = re.compile(r"(latest|last|newest)", re.IGNORECASE)
"""Name prefixes of files that name the newest checkpoint."""
_LARGEST_POINTER = 4096


@dataclass(frozen=True, kw_only=True)
class Pointer:
    """A file or symbolic link that names the newest checkpoint, with its content before and after a repair."""

    path: str
    before: str
    after: str  # empty: without another checkpoint to name, the file is moved away
    link: bool = False

    @property
    def words(self) -> str:
        """A description of the repair."""
        name = Path(self.path).name
        return f"{name} names {Path(self.after.strip()).name} from now on" if self.after else f"{name} is moved too"


def find_target(one: CommandCheckpoint, run: RunDir, attempt: int, generation: int) -> Path | None:
    """Return a path to move a checkpoint to: beside its folder, or in the run's own folder.

    The path is on the file system of the checkpoint. None if neither folder is, or is writable. Raises OSError.
    """
    folder = Path(os.path.realpath(one.path.parent))
    name = f"{one.step}.{attempt:03d}-{generation:03d}"
    device = os.lstat(one.path).st_dev
    places = [(folder.parent, folder.parent / SET_ASIDE / run.name)] if folder.parent != folder else []
    for there, place in [*places, (run.path, run.path / SET_ASIDE)]:
        if os.stat(there).st_dev == device and os.access(there, os.W_OK | os.X_OK):
            return place / name
    return None


def set_aside(one: CommandCheckpoint, target: Path) -> bool:
    """Move a checkpoint; return False if it has changed since it was examined, or cannot be moved."""
    now = read_again(one)
    if now is None or now.files != one.files or os.path.lexists(target):
        return False
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        os.rename(one.path, target)
    except OSError:
        return False
    _fsync(target.parent, one.path.parent)
    return True


def put_back(aside: Path, original: Path) -> bool:
    """Move a checkpoint back, unless its name is taken by now. Raises OSError."""
    if os.path.lexists(original) or not os.path.lexists(aside):
        return False
    os.rename(aside, original)
    _fsync(original.parent)
    _tidy(aside)
    return True


def _tidy(place: Path) -> None:
    for folder in (place.parent, place.parent.parent):
        with suppress(OSError):  # not empty
            folder.rmdir()


def _fsync(*folders: Path) -> None:
    for folder in folders:
        with suppress(OSError):
            fsync_dir(folder)


def pointers_to(one: CommandCheckpoint, instead: CommandCheckpoint | None) -> list[Pointer]:
    """Return the files that name this checkpoint as the newest and must name `instead`. Raises OSError."""
    found = [_pointer(Path(entry.path), one, instead) for entry in os.scandir(one.path.parent)]
    return sorted((pointer for pointer in found if pointer is not None), key=lambda pointer: pointer.path)


def _pointer(path: Path, one: CommandCheckpoint, instead: CommandCheckpoint | None) -> Pointer | None:
    if path == one.path or not _POINTER_NAMES.match(path.name):
        return None
    if (before := _content(path)) is None:
        return None
    after = _replace_name(before, one, instead)
    return None if after is None else Pointer(path=str(path), before=before, after=after, link=path.is_symlink())


def _content(path: Path) -> str | None:
    """Return the text of a small file, or the target of a symbolic link; None for anything else."""
    try:
        if path.is_symlink():
            return os.readlink(path)
        if path.is_file() and path.stat().st_size <= _LARGEST_POINTER:
            return path.read_text()
    except (OSError, UnicodeDecodeError):
        pass
    return None


def _replace_name(text: str, one: CommandCheckpoint, instead: CommandCheckpoint | None) -> str | None:
    """Return the text with the name of `instead`; None unless it names this checkpoint alone."""
    said, name = text.strip(), one.path.name
    if said == name or said.endswith(f"/{name}"):
        new = f"{said.removesuffix(name)}{instead.path.name}" if instead is not None else ""
    elif said.isascii() and said.isdigit() and int(said) == one.step:
        width = len(said) if said.startswith("0") else 0
        new = str(instead.step).zfill(width) if instead is not None else ""
    else:
        return None
    return text.replace(said, new) if new else ""


def retarget(pointer: Pointer, scratch: Path, *, back: bool = False) -> bool:
    """Make a pointer name the other checkpoint (`back`: the first one), unless it was changed. Raises OSError.

    `scratch` is a path on the same file system, outside of the folder that the program scans.
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
