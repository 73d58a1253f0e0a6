"""A private view of the file system, in which a program may write without effects on anything that lasts.

To be made in a user and mount namespace of its own (`unshare -rm`). Overlays take what is written to some folders, and
disappear with the namespace. Other file systems are read-only, except temporary ones.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_TEMPORARY = ("/tmp", "/var/tmp", "/dev", "/run", "/proc", "/sys")  # noqa: S108  # these stay writable
_FLAGS = frozenset({"nosuid", "nodev", "noexec", "noatime", "nodiratime", "relatime", "nosymfollow"})
"""Flags of a mount that a remount must repeat."""
_UNSUITABLE = re.compile(r"[:,\\]")
"""Characters that separate a mount's options."""


class ViewError(Exception):
    """Reason why no private view can be made here."""


def make_private(folders: Iterable[str | Path], needed: Path, kept: Sequence[Path], scratch: Path) -> None:
    """Put overlays on folders, keep the `kept` ones as they are, and make all other file systems read-only.

    A folder that cannot have an overlay, such as one with mounts inside, is read-only; `needed` must have one.
    `scratch`, a folder on this node's disk, gets what is written. Raises ViewError.
    """
    temporary = {os.path.realpath(path) for path in (tempfile.gettempdir(), "/tmp", "/var/tmp")}  # noqa: S108
    for place in sorted(temporary):
        _mount("--rbind", place, place)
    originals = {os.path.realpath(path): os.open(path, os.O_PATH) for path in kept}
    covered: list[Path] = []
    refusals: dict[Path, str] = {}
    for number, folder in enumerate(sorted({Path(os.path.realpath(one)) for one in folders if os.path.isdir(one)})):
        if not any(_is_inside(folder, outer) for outer in covered):
            try:
                _cover(folder, scratch / str(number))
                covered.append(folder)
            except ViewError as error:
                refusals[folder] = str(error)
    target = Path(os.path.realpath(needed))
    if not any(_is_inside(target, outer) for outer in covered):
        raise ViewError(refusals.get(target, f"{target} cannot have an overlay"))
    for place, descriptor in originals.items():  # an overlay may have hidden it
        _mount("--no-canonicalize", "--rbind", f"/proc/self/fd/{descriptor}", place, descriptors=[descriptor])
    own = {*temporary, *originals, *map(str, covered)}
    for place, flags in _writable_mounts():
        if place not in own and not any(place == root or place.startswith(root + os.sep) for root in _TEMPORARY):
            _mount("-o", ",".join(("remount", "bind", "ro", *flags)), place)


def _is_inside(folder: Path, outer: Path) -> bool:
    """Return whether an overlay on `outer` also covers `folder`, which it does on the same file system."""
    return folder.is_relative_to(outer) and os.stat(folder).st_dev == os.stat(outer).st_dev


def _cover(folder: Path, scratch: Path) -> None:
    upper, work = scratch / "upper", scratch / "work"
    for path in (upper, work):
        path.mkdir(parents=True)
    if folder == Path("/") or _UNSUITABLE.search(f"{folder}{scratch}"):
        raise ViewError(f"{folder} cannot have an overlay: its name has a comma, colon or backslash, or it is /")
    _mount("-t", "overlay", "overlay", "-o", f"lowerdir={folder},upperdir={upper},workdir={work},userxattr", folder)


def _writable_mounts() -> Iterator[tuple[str, list[str]]]:
    """Yield all writable mount points, with the flags that a remount must repeat."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as stream:
        rows = [line.split() for line in stream]
    for row in rows:
        flags = row[5].split(",")
        if "rw" in flags and row[row.index("-") + 1] != "autofs":
            place = re.sub(r"\\(\d{3})", lambda found: chr(int(found[1], 8)), row[4])
            yield place, [flag for flag in flags if flag in _FLAGS]


def _mount(*words: object, descriptors: Sequence[int] = ()) -> None:
    command = ["mount", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, pass_fds=descriptors)
    if done.returncode:
        raise ViewError(" ".join(done.stderr.split()) or f"mount ends with exit code {done.returncode}")
