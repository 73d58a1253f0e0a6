"""Output of a training program: where it started, its steps, and its final loss and weights."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_START = re.compile(r"start after step (\d+)")
_STEP = re.compile(r"step (\d+) loss ")
_FINAL = re.compile(r"final loss (\S+) weights (\w+)")


@dataclass(frozen=True, kw_only=True)
class ProgramStart:
    """A start of the program, and the steps that it has printed since."""

    after: int
    steps: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class ProgramLog:
    """All starts of a program, oldest first, and the final loss and weights that it has printed."""

    starts: tuple[ProgramStart, ...] = ()
    loss: str = ""
    weights: str = ""

    @property
    def step(self) -> int:
        """Return the step that was printed last."""
        return next((start.steps[-1] for start in reversed(self.starts) if start.steps), 0)

    @property
    def steps_lost(self) -> int:
        """Return how many steps were trained again, over all starts but the first."""
        lost, reached = 0, 0
        for start in self.starts:
            lost += max(0, reached - start.after)
            reached = start.steps[-1] if start.steps else min(reached, start.after)
        return lost


def parse_log(lines: Iterable[str]) -> ProgramLog:
    """Return the starts and the result in these lines, which other output may surround."""
    starts: list[ProgramStart] = []
    loss = weights = ""
    for line in lines:
        if found := _START.search(line):
            starts.append(ProgramStart(after=int(found[1])))
        elif (found := _STEP.search(line)) and starts:
            starts[-1].steps.append(int(found[1]))
        elif found := _FINAL.search(line):
            loss, weights = found[1], found[2]
    return ProgramLog(starts=tuple(starts), loss=loss, weights=weights)
