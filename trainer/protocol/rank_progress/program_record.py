"""State of the start-up module in a user's program, in the free area of its progress cell."""

import mmap
import struct
from dataclasses import dataclass
from enum import IntFlag

PROGRAM_AT = 3072
_HEAD = struct.Struct("<IIi4x")
_FRAMEWORKS_AT, _FRAMEWORKS_SIZE = PROGRAM_AT + _HEAD.size, 240
_ERROR_AT, _ERROR_SIZE = _FRAMEWORKS_AT + _FRAMEWORKS_SIZE, 512


class ProgramFlags(IntFlag):
    """State of the start-up module."""

    INSTRUMENTED = 1  # it has found torch and reports steps
    DISABLED = 2  # an internal error has disabled it
    ANSWERS = 4  # the program reads stop requests itself, saves and exits
    KNOWS_LOSS = 16  # the loss in the cell is the program's


def is_instrumented(flags: int) -> bool:
    """Return whether a rank with these flags reports its steps."""
    return bool(flags & ProgramFlags.INSTRUMENTED) and not flags & ProgramFlags.DISABLED


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramRecord:
    """State of the start-up module in one rank."""

    pid: int
    flags: ProgramFlags
    rank: int | None = None  # given to `init_process_group`, or in RANK
    frameworks: tuple[str, ...] = ()
    error: str = ""  # why the module is disabled


def unpack_program(cell: mmap.mmap | bytes) -> ProgramRecord | None:
    """Return the record in a cell, or None if no start-up module has written one."""
    pid, flags, rank = _HEAD.unpack_from(cell, PROGRAM_AT)
    if not pid:
        return None
    return ProgramRecord(
        pid=pid,
        flags=ProgramFlags(flags),
        rank=rank if rank >= 0 else None,
        frameworks=tuple(filter(None, _text(cell, _FRAMEWORKS_AT, _FRAMEWORKS_SIZE).split(","))),
        error=_text(cell, _ERROR_AT, _ERROR_SIZE),
    )


def _text(cell: mmap.mmap | bytes, at: int, size: int) -> str:
    return cell[at : at + size].partition(b"\0")[0].decode(errors="replace")
