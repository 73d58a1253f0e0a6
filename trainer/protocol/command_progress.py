"""Configuration of a command's checkpoints and progress, and its working folder."""

import re
from dataclasses import dataclass

SET_ASIDE = ".orch-set-aside"
"""Folder for checkpoints that were set aside, next to their folder or in the run's folder."""


def parse_digits(digits: str) -> int:
    """Return the number in a name as a step.

    Only the first 18 digits count, for example of a time stamp, because the registry cannot store larger
    numbers.
    """
    return int(digits.lstrip("0")[:18] or "0")


@dataclass(frozen=True, kw_only=True)
class CommandCheckpointsConfig:
    """Checkpoints of a `command:`. orch reads its progress from them, and sets a torn checkpoint aside."""

    path: str = ""
    """Folder with the checkpoints of all the command's ranks, absolute or relative to where it runs; empty: unknown."""
    pattern: str = "checkpoint-*"
    """Names of the files or folders there; the last `*` is the step (a whole number), other `*` match anything."""

    def __post_init__(self) -> None:
        if "*" not in self.pattern or "/" in self.pattern:
            raise ValueError(
                f"checkpoints.pattern={self.pattern}: must be one name with a `*` for the step, like checkpoint-*"
            )

    def parse_step(self, name: str) -> int | None:
        """Return the step in a checkpoint's name; None for any other name."""
        found = self._match(name)
        return None if found is None else parse_digits(found[1])

    def name_prefix(self, name: str) -> str:
        """Return the part of a checkpoint's name before the step."""
        found = self._match(name)
        assert found is not None
        return name[: found.start(1)]

    def _match(self, name: str) -> re.Match[str] | None:
        before, _, after = self.pattern.rpartition("*")
        expression = "[^/]*".join(map(re.escape, before.split("*"))) + r"(\d+)" + re.escape(after)
        return None if name.startswith(SET_ASIDE) else re.fullmatch(expression, name, re.ASCII)


FOLDER_VARIABLE = "ORCH_SUBMIT_DIR"
"""Entry of `env` with the folder in which the command runs; default: the folder of the submit."""


GROUPS = ("step", "total", "loss")

PROGRESS_SECONDS = 1800.0
"""Seconds of running that count as progress of a command whose checkpoints are unknown."""


@dataclass(frozen=True, kw_only=True)
class CommandProgressConfig:
    """Source of a `command:`'s current step, for display; without it, orch shows a dash."""

    path: str = ""
    """File with the program's progress, absolute or relative to where it runs; empty: rank 0's log."""
    pattern: str = ""
    """Regular expression with a group `step`, and optionally `total` and `loss`: `(?P<step>[0-9]+)/(?P<total>[0-9]+)`.

    The newest matching line counts. Empty: the step is unknown.
    """

    def __post_init__(self) -> None:
        if not self.pattern:
            if self.path:
                raise ValueError(f"progress.path={self.path}: needs progress.pattern, like step (?P<step>[0-9]+)")
            return
        try:
            groups = re.compile(self.pattern).groupindex
        except re.error as error:
            raise ValueError(f"progress.pattern={self.pattern}: is not a regular expression: {error}") from error
        if "step" not in groups or set(groups) - set(GROUPS):
            raise ValueError(
                f"progress.pattern={self.pattern}: must have a group (?P<step>[0-9]+), and no groups except "
                f"{', '.join(GROUPS)}"
            )
