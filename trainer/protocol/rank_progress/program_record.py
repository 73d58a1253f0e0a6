"""State of the start-up module in a user's program, in the free area of its progress cell."""

import mmap
import struct
from dataclasses import dataclass
from enum import IntFlag

PROGRAM_AT = 3072
_HEAD = struct.Struct("<IIiI")
_FRAMEWORKS_AT, _FRAMEWORKS_SIZE = PROGRAM_AT + _HEAD.size, 240
_ERROR_AT, _ERROR_SIZE = _FRAMEWORKS_AT + _FRAMEWORKS_SIZE, 512
_LOSSES, _LOSSES_AT = struct.Struct("<qd"), _ERROR_AT + _ERROR_SIZE


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
    unusable_losses: int = 0  # newest losses in a row that are NaN or infinite
    unusable_since: int = 0  # step of the first of them
    finite_until: float = 0.0  # time of the last finite loss, in seconds since the epoch; 0: none yet


def unpack_program(cell: mmap.mmap | bytes) -> ProgramRecord | None:
    """Return the record in a cell, or None if no start-up module has written one."""
    pid, flags, rank, unusable = _HEAD.unpack_from(cell, PROGRAM_AT)
    if not pid:
        return None
    since, finite_until = _LOSSES.unpack_from(cell, _LOSSES_AT)
    return ProgramRecord(
        pid=pid,
        flags=ProgramFlags(flags),
        rank=rank if rank >= 0 else None,
        frameworks=tuple(filter(None, _text(cell, _FRAMEWORKS_AT, _FRAMEWORKS_SIZE).split(","))),
        error=_text(cell, _ERROR_AT, _ERROR_SIZE),
        unusable_losses=unusable,
        unusable_since=since,
        finite_until=finite_until,
    )


def _text(cell: mmap.mmap | bytes, at: int, size: int) -> str:
    return cell[at : at + size].partition(b"\0")[0].decode(errors="replace")
