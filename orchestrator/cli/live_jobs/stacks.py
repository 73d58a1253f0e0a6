"""Stacks of ranks as they lie in an evidence folder, read back: newest frames last, as Python prints them."""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_RANK = re.compile(r"rank-(\d+)(\.py-spy)?\.txt")
_THREAD = re.compile(r"^(Current thread|Thread) (\S+)(.*?)(?: \(most recent call first\))?:?\s*(\".*\")?$")
_FRAME = re.compile(r'^\s+File "(.*)", line (\d+|\?\?\?) in (.*)$')
_OUTSIDE = re.compile(r"^\s+(.+?) \((.+):(\d+)\)$")


@dataclass(frozen=True)
class Frame:
    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f'File "{self.file}", line {self.line}, in {self.function}'


@dataclass(frozen=True)
class Thread:
    """One thread of one rank; `frames` with the newest one last."""

    rank: int
    name: str
    frames: tuple[Frame, ...]

    def to_json(self) -> dict[str, Any]:
        return {"rank": self.rank, "thread": self.name, "frames": [asdict(frame) for frame in self.frames]}


def read_stacks(folder: Path) -> list[Thread]:
    """Every thread of every rank, by rank; what py-spy saw from outside where the rank could not be asked."""
    files: dict[int, Path] = {}
    for path in sorted(folder.glob("rank-*.txt")):
        match = _RANK.fullmatch(path.name)
        if match is not None and (match[2] is None or int(match[1]) not in files):
            files[int(match[1])] = path
    return [thread for rank, path in sorted(files.items()) for thread in parse(rank, path.read_text(errors="replace"))]


def parse(rank: int, text: str) -> Iterator[Thread]:
    """The threads in what faulthandler or py-spy wrote."""
    name: str | None = None
    frames: list[Frame] = []
    for line in text.splitlines():
        head = _THREAD.match(line)
        frame = _frame(line)
        if head is not None:
            if name is not None:
                yield Thread(rank, name, tuple(reversed(frames)))
            name, frames = _name(head), []
        elif frame is not None and name is not None:
            frames.append(frame)
    if name is not None:
        yield Thread(rank, name, tuple(reversed(frames)))


def _name(head: re.Match[str]) -> str:
    words = [head[2], head[3].strip().rstrip(":"), head[4] or ""]
    return " ".join(word for word in words if word) + (" (current)" if head[1].startswith("Current") else "")


def _frame(line: str) -> Frame | None:
    ours, outside = _FRAME.match(line), _OUTSIDE.match(line)
    if ours is not None:
        return Frame(ours[1], int(ours[2]) if ours[2].isdigit() else 0, ours[3])
    return Frame(outside[2], int(outside[3]), outside[1]) if outside is not None else None
