"""Sample of a user's program in one rank: its start-up module, the rhythm of its log and steps, and its stacks."""

import math
import re
from collections import deque
from dataclasses import dataclass, field

from trainer.protocol.messages.agents import ProgramRow
from trainer.protocol.rank_progress.program_record import is_instrumented


@dataclass(frozen=True, slots=True)
class ProgramSample:
    """Facts about one rank that orch's own workloads need not show."""

    flags: int = 0  # `ProgramFlags` of its start-up module; 0: none has reported
    longest: float = 0.0  # longest time between two writes of its cell in this generation
    log_age: float = 0.0  # seconds since it printed; 0: never
    log_gap: float = 0.0  # usual longest pause between two prints; 0: unknown
    loop: str = ""  # function in which all of its newest stacks are; "" if they differ or are unknown
    own_rank: int = -1  # its rank in the program's own world; -1: unknown

    @property
    def reports_steps(self) -> bool:
        return is_instrumented(self.flags)

    def to_row(self, rank: int) -> ProgramRow:
        return (rank, self.flags, self.longest, self.log_age, self.log_gap, self.loop, self.own_rank)

    @classmethod
    def from_row(cls, row: ProgramRow) -> "ProgramSample":
        """Return a row's sample. Raises ValueError for an impossible time."""
        one = cls(*row[1:])
        if not all(math.isfinite(seconds) and seconds >= 0 for seconds in (one.longest, one.log_age, one.log_gap)):
            raise ValueError(f"the sample of rank {row[0]}'s program has impossible times")
        return one


_FRAME = re.compile(r'^  File "(?P<file>[^"\n]*)", line (?P<line>\d+) in (?P<function>.*)$')
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3\.\d+/|^<frozen ")
"""Places of code that is not the program's own. What it does there cannot be judged from one function's name."""
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
DUMPS = 5
"""Number of stack dumps in a row that must show the same function."""


def main_thread_place(dump: str) -> str:
    """Return the innermost function of the main thread in faulthandler's dump, or "" if it is not the program's own."""
    for thread in _THREAD.split(dump)[1:]:
        frames = [found for line in thread.splitlines() if (found := _FRAME.match(line))]
        if not frames or frames[-1]["function"] != "<module>":
            continue
        first = frames[0]
        return "" if _LIBRARY.search(first["file"]) else f"{first['function']} ({first['file']})"
    return ""


@dataclass(kw_only=True)
class LoopSearch:
    """The places in the newest stack dumps of one rank since its last step."""

    step_at: int = 0
    places: deque[str] = field(default_factory=lambda: deque(maxlen=DUMPS))

    def add(self, dump: str, step_at: int) -> None:
        """Add a dump. `step_at` is the time of the cell's newest write."""
        if step_at != self.step_at:
            self.places.clear()
            self.step_at = step_at
        self.places.append(main_thread_place(dump))

    def place(self, step_at: int) -> str:
        """Return the function in which all of the newest dumps are, or ""."""
        same = len(self.places) == DUMPS and len(set(self.places)) == 1 and step_at == self.step_at
        return self.places[0] if same else ""
