"""Place and names of the checkpoints of a user's own program."""

import re
from dataclasses import dataclass

SET_ASIDE = ".orch-set-aside"
"""Folder for checkpoints that were set aside; it is beside their folder, or in the run's folder."""


@dataclass(frozen=True, kw_only=True)
class CommandCheckpointsConfig:
    """Checkpoints of a `command:`. orch reads its progress from them, and sets a torn one aside."""

    path: str = ""
    """Folder of the checkpoints of all ranks of the command, absolute or relative to where it runs; empty: unknown."""
    pattern: str = "checkpoint-*"
    """Names of the files or folders there; the last `*` is the step (a whole number), other `*` match anything.
    Other entries with the same step belong to the same checkpoint."""

    def __post_init__(self) -> None:
        if "*" not in self.pattern or "/" in self.pattern:
            raise ValueError(
                f"checkpoints.pattern={self.pattern}: must be one name with a `*` for the step, like checkpoint-*"
            )

    def step_of(self, name: str) -> int | None:
        """Return the step in a checkpoint's name; None for any other name."""
        found = self._match(name)
        return int(found[1]) if found is not None else None

    def prefix_of(self, name: str) -> str:
        """Return what is before the step in a checkpoint's name."""
        found = self._match(name)
        assert found is not None
        return name[: found.start(1)]

    def _match(self, name: str) -> re.Match[str] | None:
        before, _, after = self.pattern.rpartition("*")
        expression = "[^/]*".join(map(re.escape, before.split("*"))) + r"(\d{1,18})" + re.escape(after)
        return None if name.startswith(SET_ASIDE) else re.fullmatch(expression, name, re.ASCII)
