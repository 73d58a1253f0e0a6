"""Requests: small files with which people and the controller ask something of a live job."""

import os
import secrets
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from checkpointing.storage.durable import dump_line, read_json, write_durably


class RequestKind(StrEnum):
    """What can be asked; agent 0 reads the folder once a second and answers by an event."""

    STOP = "stop"  # save at the next agreed step boundary, then exit
    SAVE = "save"  # save at the next agreed step boundary, then go on
    DEADLINE = "deadline"  # `value` is the job's true end, seconds since the epoch
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


REFUSED = "refused: "
"""How an answer begins that says no."""


def pending(folder: Path, attempt: int, answered: set[str]) -> list[Request]:
    """Requests for `attempt` that are not answered yet, oldest first; files that are no request are ignored."""
    found = []
    for name in _by_age(folder):
        if name in answered or not name.endswith(".json") or name.startswith("."):
            continue
        try:
            fields = read_json(folder / name)
            request = Request(**{**fields, "kind": RequestKind(fields["kind"]), "name": name})
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            continue
        if type(request.detail) is not str or type(request.value) not in (int, float, type(None)):
            continue
        if request.attempt == attempt:
            found.append(request)
    return found


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
