"""What to type when the operating system refuses a file or a folder."""

import errno
import os
import pwd
import re
import shlex
from pathlib import Path

_AGAIN = "then type the same command again"
_STATE = re.compile(r"(ORCH_HOME|XDG_STATE_HOME)=")


def cure(error: OSError) -> str:
    """The command or the variable that mends it, with the place."""
    name = str(error.filename or "")
    if named := _STATE.match(name):
        return f"export {named[1]}=FOLDER, a folder in which you may write; {_AGAIN}"
    if not name:
        return f"mend that, {_AGAIN}"
    home = os.environ.get("HOME", "")
    if home and Path(name).is_relative_to(home) and not os.path.isdir(home):
        return f"HOME={home} is no folder: export HOME=FOLDER, or ORCH_HOME=FOLDER for orch alone; {_AGAIN}"
    place = _nearest(Path(name))
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{_opened(_closed(place))}; {_AGAIN}"
    if error.errno == errno.ENOENT and place != Path(name).parent:
        return f"`mkdir -p {shlex.quote(str(Path(name).parent))}`, {_AGAIN}"
    if error.errno == errno.EROFS:
        return f"{place} is mounted read-only: name another place"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"make room in {place if place.is_dir() else place.parent}, {_AGAIN}"
    return f"mend that, {_AGAIN}"


def _nearest(path: Path) -> Path:
    """The path, or the lowest folder above it that is there."""
    return next((place for place in (path, *path.parents) if os.path.lexists(place)), Path("/"))


def _closed(place: Path) -> Path:
    """The highest of the folders on the way that cannot be entered, else what may not be written."""
    ways = [folder for folder in reversed(place.parents) if not os.access(folder, os.X_OK)]
    if ways:
        return ways[0]
    return place if not os.access(place, os.W_OK) or place.is_dir() else place.parent


def _opened(place: Path) -> str:
    try:
        owner = place.stat().st_uid
    except OSError:
        return f"name a place in which you may write, not {place}"
    if owner == os.getuid():
        return f"`chmod u+rwX {shlex.quote(str(place))}`"
    try:
        who = pwd.getpwuid(owner).pw_name
    except KeyError:
        who = str(owner)
    return f"{place} belongs to {who}: name a place of your own"
