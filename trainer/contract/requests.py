"""Requests: small files with which people and the controller ask something of a live job."""

import os
import secrets
import stat
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from checkpointing.storage.durable import dump_line, only_own_files, read_json, write_durably


class RequestKind(StrEnum):
    """What can be asked; agent 0 reads the folder once a second and answers by an event."""

    STOP = "stop"  # save at the next agreed step boundary, then exit
    SAVE = "save"  # save at the next agreed step boundary, then go on
    DEADLINE = "deadline"  # `value` is the job's true end, seconds since the epoch; `detail`: seconds since its start
    STACKS = "stacks"  # where every thread stands; `value` is one rank, `detail` one node's index, else all
    DRILL = "drill"  # a fault on purpose; `detail` is its kind, `value` the rank (or the node) that it hits


@dataclass(frozen=True, kw_only=True)
class Request:
    """One question to one attempt; `name` is its file name and identity."""

    kind: RequestKind
    attempt: int
    reason: str
    value: float | None = None
    detail: str = ""
    name: str = ""

    def write(self, folder: Path) -> str:
        """Put the request into `folder`; returns its name."""
        name = f"{self.kind}.{self.attempt:03d}.{secrets.token_hex(4)}.json"
        fields = {key: value for key, value in asdict(self).items() if key != "name"}
        write_durably(folder / name, dump_line(fields).encode(errors="backslashreplace"))
        return name


MOST_BYTES = 1 << 16
"""Bytes of a request, at most: a reason is a sentence."""
LARGEST = float(1 << 40)
"""The largest value of a request: as a time it lies 30,000 years ahead."""

REFUSED = "refused: "
"""How an answer begins that says no."""


def pending(folder: Path, attempt: int, answered: set[str]) -> list[Request]:
    """Requests for `attempt` that are not answered yet, oldest first; files that are no request are ignored."""
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
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            continue
        if _is_sound(request) and request.attempt == attempt:
            found.append(request)
    return found


def _is_plain_file(path: Path) -> bool:
    """Whether it was written there: no link to a file that was meant for something else."""
    status = os.lstat(path)
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def _is_sound(request: Request) -> bool:
    """Whether every field is of its type, and the number one that a time or a rank can be."""
    value = request.value
    if type(request.attempt) is not int or type(request.detail) is not str or type(request.reason) is not str:
        return False
    return value is None or (type(value) in (int, float) and 0 <= value <= LARGEST)  # NaN is not within


def _by_age(folder: Path) -> list[str]:
    """Names in the folder by the time of their writing: a later request may correct an earlier one."""
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        return [name for _, name in sorted((_written(entry), entry.name) for entry in entries)]


def _written(entry: "os.DirEntry[str]") -> int:
    try:
        return entry.stat(follow_symlinks=False).st_mtime_ns
    except FileNotFoundError:
        return 0
