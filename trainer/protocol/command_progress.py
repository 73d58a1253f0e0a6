"""Configuration of a command's checkpoints, progress and working folder."""

import math
import re
from dataclasses import dataclass

SET_ASIDE = ".orch-set-aside"
"""Folder for checkpoints that were set aside. It is next to the checkpoint folder or in the run folder."""


def parse_digits(digits: str) -> int:
    """Return the step given by the digits in a checkpoint name.

    Only the first 18 digits count (a timestamp may have more), because the registry cannot store larger numbers.
    """
    return int(digits.lstrip("0")[:18] or "0")


AUTO = "auto"
ADAPTERS = ("hf", "lightning", "accelerate", "deepspeed", "megatron", "dcp", "plain")
"""Names of the adapters (`trainer.agent.adapters.registry.NAMES`)."""


@dataclass(frozen=True, kw_only=True)
class CommandCheckpointsConfig:
    """Checkpoints written by a `command:`. orch reads the run's progress from them and sets torn checkpoints aside."""

    path: str = ""
    """Folder with the checkpoints of all ranks, absolute or relative to the working folder. Empty: unknown."""
    pattern: str = "checkpoint-*"
    """Name pattern of the checkpoint files or folders. The last `*` is the step (an integer); others match anything."""

    adapter: str = AUTO
    """Framework whose rules tell complete checkpoints from incomplete ones: `auto` (the framework that has saved),
    `hf`, `lightning`, `accelerate`, `deepspeed`, `megatron`, `dcp`, or `plain` (files of `torch.save`)."""

    save_minutes: float = 0.0
    """Minutes after its last save at which a program is asked to save, if its framework can be asked; 0: never."""

    def __post_init__(self) -> None:
        if not 0 <= self.save_minutes < math.inf:
            raise ValueError(f"checkpoints.save_minutes={self.save_minutes}: must be 0 or a number of minutes")
        if self.adapter not in (AUTO, *ADAPTERS):
            raise ValueError(f"checkpoints.adapter={self.adapter}: must be {AUTO}, {', '.join(ADAPTERS[:-1])} or plain")
        if "*" not in self.pattern or "/" in self.pattern:
            raise ValueError(
                f"checkpoints.pattern={self.pattern}: must be one name with a `*` for the step, like checkpoint-*"
            )

    def parse_step(self, name: str) -> int | None:
        """Return the step in a checkpoint's name, or None for any other name."""
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
"""Variable in `env` with the command's working folder. The default is the folder where `orch submit` ran."""


GROUPS = ("step", "total", "loss")

PROGRESS_SECONDS = 1800.0
"""Seconds of running time that count as progress for a command whose checkpoints are unknown."""


@dataclass(frozen=True, kw_only=True)
class CommandProgressConfig:
    """Place from which orch reads the current step of a `command:`, for display. Without it, orch shows a dash."""

    path: str = ""
    """File with the program's progress, absolute or relative to its working folder. Empty: rank 0's log."""
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
