"""Requests from users and the controller to a live job, sent as small files."""

import os
import secrets
import stat
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from checkpointing.storage.durable import dump_line, only_own_files, read_json, write_durably


class RequestKind(StrEnum):
    """Kinds of request. Agent 0 reads the folder once a second and answers each request with an event."""

    STOP = "stop"  # save at the next agreed step boundary, then exit
    SAVE = "save"  # save at the next agreed step boundary, then continue
    DEADLINE = "deadline"  # `value` is the job's actual end, seconds since the epoch; `detail`: seconds since its start
    STACKS = "stacks"  # stacks of every thread; `value` is one rank, `detail` one node's index; neither: all ranks
    DRILL = "drill"  # injected fault; `detail` is its kind, `value` the affected rank (or node)


@dataclass(frozen=True, kw_only=True)
class Request:
    """Request to an attempt, identified by its file name `name`."""

    kind: RequestKind
    attempt: int
    reason: str
    value: float | None = None
    detail: str = ""
    name: str = ""

    def write(self, folder: Path) -> str:
        """Write the request into `folder` and return its name."""
        name = f"{self.kind}.{self.attempt:03d}.{secrets.token_hex(4)}.json"
        fields = {key: value for key, value in asdict(self).items() if key != "name"}
        write_durably(folder / name, dump_line(fields).encode(errors="backslashreplace"))
        return name


MOST_BYTES = 1 << 16
"""Maximum size of a request in bytes."""
LARGEST = float(1 << 40)
"""Largest value in a request. As a time, it is 30,000 years in the future."""

REFUSED = "refused: "
"""Prefix of an answer that refuses a request."""


def pending(folder: Path, attempt: int, answered: set[str]) -> list[Request]:
    """Return the unanswered requests for `attempt`, oldest first. Files that are not requests are ignored."""
    found = []
    for name in _by_age(folder):
        if name in answered or not name.endswith(".json") or name.startswith("."):
            continue
        try:
            if not _is_plain_file(folder / name):
                continue
            with only_own_files():
                fields = read_json(folder / name, MOST_BYTES)
            request = Request(**{**fields, "kind": RequestKind(fields["kind"]), "name": name})
        except (OSError, ValueError, TypeError, KeyError):
            continue
        if _is_sound(request) and request.attempt == attempt:
            found.append(request)
    return found


def _is_plain_file(path: Path) -> bool:
    """Return whether this is a regular file with only one name, not a symbolic link."""
    status = os.lstat(path)
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def _is_sound(request: Request) -> bool:
    """Return whether every field has the right type and the value can be a time or a rank."""
    value = request.value
    if type(request.attempt) is not int or type(request.detail) is not str or type(request.reason) is not str:
        return False
    return value is None or (type(value) in (int, float) and 0 <= value <= LARGEST)  # excludes NaN


def _by_age(folder: Path) -> list[str]:
    """Return the file names in the order they were written, because a later request may correct an earlier one."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return [name for _, name in sorted((_written(entry), entry.name) for entry in entries)]


def _written(entry: "os.DirEntry[str]") -> int:
    try:
        return entry.stat(follow_symlinks=False).st_mtime_ns
    except FileNotFoundError:
        return 0
