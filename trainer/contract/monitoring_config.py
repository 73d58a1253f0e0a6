"""Configuration of what watches a job from inside: hangs, stragglers, loss spikes, the examination of nodes."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class HangConfig:
    """When a rank that does not move is taken for hung, and what is kept of it before it is killed."""

    on: bool = True
    """Watch for hangs."""
    factor: float = 25.0
    """A phase may take so many times its 99th percentile in this run."""
    least: float = 8.0
    """Seconds that any phase may take."""
    slow: float = 120.0
    """Seconds without a sign of life allowed in start, compile, restore, save, evaluation and a first step."""
    most: float = 3600.0
    """Seconds after which signs of life no longer excuse a rank that does not move."""
    stopped: float = 3.0
    """Seconds after which a rank whose process is stopped (SIGSTOP) while its peers wait counts as hung."""
    evidence: float = 10.0
    """Longest time in seconds for collecting evidence before the kill."""
    agent: float = 75.0
    """Seconds for which a node's agent may stand still (stopped, or stuck in the kernel) before its node ends it."""
    heartbeat: float = 900.0
    """Seconds without a heartbeat or growth of any file of a running attempt before orch ends its job; 0: never."""

    def __post_init__(self) -> None:
        if self.factor < 2:
            raise ValueError(f"recovery.hang.factor={self.factor}: must be at least 2, or ordinary steps look hung")
        if not 0 <= self.heartbeat < float("inf"):
            raise ValueError(f"recovery.hang.heartbeat={self.heartbeat}: must be 0 or more seconds")
        for name in ("least", "slow", "most", "stopped", "evidence", "agent"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"recovery.hang.{name}={getattr(self, name)}: must be above 0 seconds")


@dataclass(frozen=True, kw_only=True)
class StragglerConfig:
    """When a rank counts as slower than its peers."""

    on: bool = True
    """Compare the ranks' own work."""
    ratio: float = 1.07
    """A rank is slow when its work takes more than so many times that of its peers, in several windows in a row."""
    windows: int = 3
    """Windows in a row that must agree."""
    replace_after: int = 2
    """Attempts in which a node must have been slow before the next restart does without it; 0: never."""

    def __post_init__(self) -> None:
        if self.ratio <= 1:
            raise ValueError(f"recovery.straggler.ratio={self.ratio}: must be above 1")
        if self.windows < 2 or self.replace_after < 0:
            raise ValueError("recovery.straggler: windows must be at least 2, replace_after at least 0")


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """When a loss counts as exploded; NaN and infinity always do."""

    deviations: float = 20.0
    """A loss so many robust standard deviations above the window's median is a spike; 0 looks for NaN only."""
    window: int = 50
    """Steps that the median and the deviation are taken from; nothing is judged before they are full."""
    roll_backs: int = 3
    """Rollbacks allowed in one attempt; each leaves out the batch of its step."""

    def __post_init__(self) -> None:
        if self.deviations < 0 or self.window < 8 or self.roll_backs < 0:
            raise ValueError("recovery.spike: deviations and roll_backs must be at least 0, window at least 8")


@dataclass(frozen=True, kw_only=True)
class PreflightConfig:
    """The examination of nodes before they train."""

    on: bool = True
    """Measure matrix multiplication, memory and the network; the quick checks of folders and limits always run."""
    seconds: float = 60.0
    """Seconds after which nothing more is measured over the network, and missing figures are not waited for."""
    slowest: float = 0.6
    """A node whose measured speed is below this share of its peers' median is suspect. In a Slurm job also one below
    this share of the median of this run's earlier attempts, where at least two of them have measured and agree."""
    skew: float = 30.0
    """Largest difference between nodes' clocks in seconds."""

    def __post_init__(self) -> None:
        if not 0 < self.slowest < 1 or self.seconds <= 0 or self.skew <= 0:
            raise ValueError("recovery.preflight: slowest must be between 0 and 1, seconds and skew above 0")
