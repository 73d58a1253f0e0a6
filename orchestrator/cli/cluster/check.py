"""A finding of `orch doctor`."""

from collections.abc import Callable
from dataclasses import dataclass

OK, INFO, WARN, FAIL = "ok", "info", "warn", "fail"
CommandRunner = Callable[[list[str]], str]
"""Function that runs a Slurm command and returns its output. Raises OrchError."""


@dataclass(frozen=True)
class Check:
    """Result of a check. A `fail` must be fixed before runs can continue; a `warn` is worth knowing about."""

    name: str
    level: str
    text: str
    hint: str = ""
