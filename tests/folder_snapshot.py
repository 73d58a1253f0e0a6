"""What is below a folder, to show that nothing there was changed."""

import os
from pathlib import Path


def snapshot(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Size, time of change and inode of everything below it."""
    found = {}
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            status = os.stat(os.path.join(place, name))
            found[os.path.join(place, name)] = (status.st_size, status.st_mtime_ns, status.st_ino)
    return found
