"""Lustre: over how many storage targets the files of a checkpoint's folder are spread."""

import os
import shutil
import subprocess
from pathlib import Path

from checkpointing.storage.backends import LocalStorage
from checkpointing.storage.durable import make_folder
from checkpointing.tiers.tier import ResolvedTier

MOUNTS = Path("/proc/self/mounts")
_SECONDS = 20.0


def make_striped_folder(place: ResolvedTier, name: str, mounts: Path = MOUNTS) -> str | None:
    """Make the folder of a checkpoint, before anybody writes into it, with the tier's stripe count.

    Once, by one rank. Elsewhere than on Lustre with `lfs` nothing is done: folders come with their first file. Returns
    a warning when `lfs` did not do what it was asked for: the checkpoint is then striped as the site does by default.
    """
    storage = place.storage
    lfs = shutil.which("lfs") if place.stripes and isinstance(storage, LocalStorage) else None
    if lfs is None or not isinstance(storage, LocalStorage) or not on_lustre(storage.root, mounts):
        return None
    folder = storage.root / name
    make_folder(folder)
    return _set_stripes(lfs, folder, place.stripes)


def _set_stripes(lfs: str, folder: Path, count: int) -> str | None:
    command = [lfs, "setstripe", "-c", str(count), str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{' '.join(command)}: {error}"
    if done.returncode:
        return f"{' '.join(command)} failed ({done.returncode}): {done.stderr.strip() or done.stdout.strip()}"
    return None


def on_lustre(folder: Path, mounts: Path = MOUNTS) -> bool:
    """Whether a folder, which need not exist yet, lies on Lustre by the mount table; an unreadable one says no."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    table = [fields for line in lines if len(fields := line.split()) >= 3]
    place = Path(os.path.realpath(folder))
    above = [(Path(_unescaped(point)), kind) for _, point, kind, *_ in table]
    # The longest mount point wins, of two on the same point the later one.
    covering = [(len(point.parts), at, kind) for at, (point, kind) in enumerate(above) if place.is_relative_to(point)]
    return max(covering, default=(0, 0, ""))[2] == "lustre"


def _unescaped(point: str) -> str:
    """Blanks in the mount table are octal."""
    for code, letter in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        point = point.replace(code, letter)
    return point
