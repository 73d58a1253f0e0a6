"""A private view of a node, in which a program may act without effects on anything that lasts or runs.

To be made as PID 1 of new namespaces (`NAMESPACES`). Overlays take what is written to some folders and to the temporary
ones, /dev/shm begins empty, and other file systems are read-only. Processes and shared memory outside are invisible.
All of it disappears with the namespaces.
"""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

NAMESPACES = ("unshare", "-rmpi", "--fork", "--kill-child")
"""Words that start a process as PID 1 of user, mount, PID and IPC namespaces of its own."""
_SHARED_MEMORY = "/dev/shm"  # noqa: S108
_WRITABLE = ("/dev", "/run", "/proc", "/sys")  # these stay writable
_FLAGS = frozenset({"nosuid", "nodev", "noexec", "noatime", "nodiratime", "relatime", "nosymfollow"})
"""Flags of a mount that a remount must repeat."""


class ViewError(Exception):
    """Reason why no private view can be made here."""


def make_private(folders: Iterable[str | Path], needed: Path, kept: Iterable[Path], scratch: Path) -> None:
    """Put overlays on folders, keep the `kept` ones as they are, and make all other file systems read-only.

    A folder that cannot have an overlay, such as one with mounts inside, is read-only; `needed` and the temporary
    folders must have one. `scratch`, a folder on this node's disk, gets what is written. Raises ViewError.
    """
    temporary = {Path(os.path.realpath(one)) for one in (tempfile.gettempdir(), "/tmp", "/var/tmp")}  # noqa: S108
    wanted = {Path(os.path.realpath(one)) for one in folders} | temporary
    # All of them are opened first, because one mount may hide another folder.
    opened = {one: os.open(one, os.O_PATH) for one in sorted(wanted) if one.is_dir()}
    originals = {Path(os.path.realpath(one)): os.open(one, os.O_PATH) for one in kept if one.is_dir()}
    above = os.open(scratch, os.O_PATH)
    _mount("-t", "proc", "proc", "/proc")
    if os.path.isdir(_SHARED_MEMORY):
        # Semaphores of old C libraries need a tmpfs there, not an overlay.
        _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", _SHARED_MEMORY)
    covered: list[Path] = []
    refusals: dict[Path, str] = {}
    for number, (folder, lower) in enumerate(opened.items()):
        if not any(_is_inside(folder, outer) for outer in covered):
            try:
                _cover(folder, lower, above, str(number))
                covered.append(folder)
            except ViewError as error:
                refusals[folder] = str(error)
    for target in (Path(os.path.realpath(needed)), *sorted(temporary & opened.keys())):
        if not any(_is_inside(target, outer) for outer in covered):
            raise ViewError(f"{target} cannot have an overlay: {refusals.get(target, 'it is missing')}")
    for place, descriptor in originals.items():
        place.mkdir(parents=True, exist_ok=True)  # it may have been in the hidden /dev/shm
        _mount("--no-canonicalize", "--rbind", f"/proc/self/fd/{descriptor}", place, descriptors=[descriptor])
    own = {_SHARED_MEMORY, *map(str, (*originals, *covered))}
    for mounted, flags in _writable_mounts():
        if mounted not in own and not any(mounted == root or mounted.startswith(root + os.sep) for root in _WRITABLE):
            _mount("-o", ",".join(("remount", "bind", "ro", *flags)), mounted)


def _is_inside(folder: Path, outer: Path) -> bool:
    """Return whether an overlay on `outer` also covers `folder`, which it does on the same file system."""
    return folder.is_relative_to(outer) and os.stat(folder).st_dev == os.stat(outer).st_dev


def _cover(folder: Path, lower: int, above: int, name: str) -> None:
    """Put an overlay on a folder that is open as `lower`. Its own files are in a folder of `above`."""
    if folder == Path("/"):
        raise ViewError("it is the root of all files")
    scratch = f"/proc/self/fd/{above}/{name}"
    for path in ("upper", "work"):
        os.makedirs(f"{scratch}/{path}")
    folder.mkdir(parents=True, exist_ok=True)  # it may have been in the hidden /dev/shm
    options = f"lowerdir=/proc/self/fd/{lower},upperdir={scratch}/upper,workdir={scratch}/work,userxattr"
    _mount("-t", "overlay", "overlay", "-o", options, folder, descriptors=[lower, above])


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
