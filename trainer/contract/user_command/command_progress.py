"""Which step a user's own program says it is at, in its log or in a file."""

import re
from dataclasses import dataclass

GROUPS = ("step", "total", "loss")

PROGRESS_SECONDS = 1800.0
"""Seconds of running that count as progress of a command whose checkpoints are unknown."""


@dataclass(frozen=True, kw_only=True)
class CommandProgressConfig:
    """Where a `command:` says which step it is at. orch then shows it; without it there is a dash."""

    path: str = ""
    """File with the program's progress, absolute or relative to where it runs; empty: rank 0's log."""
    pattern: str = ""
    """Regular expression with a group `step`, and `total` and `loss` if you like: `(?P<step>[0-9]+)/(?P<total>[0-9]+)`.

    The newest line that has it counts. Empty: the step is not known."""

    def __post_init__(self) -> None:
        if not self.pattern:
            if self.path:
                raise ValueError(f"progress.path={self.path}: needs progress.pattern, like step (?P<step>[0-9]+)")
            return
        try:
            groups = re.compile(self.pattern).groupindex
        except re.error as error:
            raise ValueError(f"progress.pattern={self.pattern}: is no regular expression: {error}") from error
        if "step" not in groups or set(groups) - set(GROUPS):
            raise ValueError(
                f"progress.pattern={self.pattern}: must have a group (?P<step>[0-9]+), and no others than "
                f"{', '.join(GROUPS)}"
            )
