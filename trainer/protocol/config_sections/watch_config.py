"""Configuration of how a user's own program is watched."""

from dataclasses import dataclass

AUTO, OFF = "auto", "off"
RESTART, OBSERVE = "restart", "observe"
STOP_SIGNALS = ("TERM", "INT", "HUP", "USR1", "USR2")


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Settings for watching a `command:`."""

    instrument: str = AUTO
    """`auto`: a start-up module on PYTHONPATH reports the steps of Python programs that import torch; `off`: programs
    are watched from outside only."""
    action: str = RESTART
    """`restart`: ranks that hang are killed and started again; `observe`: a hang is only reported."""
    stop_signal: str = "TERM"
    """Signal that asks each rank of a program to save and exit, where orch cannot ask its framework: `TERM`, `INT`,
    `HUP`, `USR1` or `USR2`."""

    def __post_init__(self) -> None:
        for key, value, allowed in (
            ("instrument", self.instrument, (AUTO, OFF)),
            ("action", self.action, (RESTART, OBSERVE)),
            ("stop_signal", self.stop_signal, STOP_SIGNALS),
        ):
            if value not in allowed:
                raise ValueError(f"watch.{key}={value}: must be {', '.join(allowed[:-1])} or {allowed[-1]}")
