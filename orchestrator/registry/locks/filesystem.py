"""On which file system a path lies, as /proc/self/mountinfo tells."""

import re
from dataclasses import dataclass
from pathlib import Path

LOCAL = frozenset(
    {
        "bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "jfs", "overlay", "ramfs", "reiserfs", "tmpfs",
        "ufs", "xfs", "zfs",
    }
)  # fmt: skip
"""File systems of one host only: shared memory and locks work, so write-ahead logging does.

Overlay is one of them, for its upper layer cannot lie on a network file system (kernel, filesystems/overlayfs.rst).
"""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    point: str
    kind: str
    options: frozenset[str]
    source: str = ""

    @property
    def is_local(self) -> bool:
        return self.kind in LOCAL


def _unescaped(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def mounts(text: str) -> list[Mount]:
    """Parse the text of /proc/self/mountinfo, in mount order."""
    found = []
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        front, back = left.split(" "), right.split(" ")
        options = frozenset({*front[5].split(","), *back[2].split(",")})
        found.append(Mount(point=_unescaped(front[4]), kind=back[0], options=options, source=_unescaped(back[1])))
    return found


def mount_of(path: Path, text: str) -> Mount | None:
    """The mount that holds `path`: the longest mount point above it, the later one where two are equal."""
    best = None
    for mount in mounts(text):
        above = path.is_relative_to(mount.point)
        if above and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def mounted(path: Path) -> Mount | None:
    """The mount that holds `path` on this machine; None where /proc does not tell."""
    try:
        text = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    except OSError:
        return None
    return mount_of(path.resolve(), text)
