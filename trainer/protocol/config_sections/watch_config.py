"""Configuration of how a user's own program is watched."""

from dataclasses import dataclass

AUTO, OFF = "auto", "off"
RESTART, OBSERVE = "restart", "observe"


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Settings for watching a `command:`."""

    instrument: str = AUTO
    """`auto`: a start-up module on PYTHONPATH reports the steps of Python programs that import torch; `off`: programs
    are watched from outside only."""
    action: str = RESTART
    """`restart`: ranks that hang are killed and started again; `observe`: a hang is only reported."""

    def __post_init__(self) -> None:
        for key, value, allowed in (
            ("instrument", self.instrument, (AUTO, OFF)),
            ("action", self.action, (RESTART, OBSERVE)),
        ):
            if value not in allowed:
                raise ValueError(f"watch.{key}={value}: must be {' or '.join(allowed)}")
