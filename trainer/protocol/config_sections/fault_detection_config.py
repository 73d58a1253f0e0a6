"""Configuration of fault detection and of drills."""

from dataclasses import dataclass, field

from trainer.protocol.config_sections.limits import require_least, require_positive


@dataclass(frozen=True, kw_only=True)
class HangConfig:
    """Limits after which a rank counts as hung, and evidence collection before it is killed."""

    on: bool = True
    """Whether to watch for hangs."""
    factor: float = 25.0
    """Timeout of a phase, as a multiple of its 99th-percentile duration in this run."""
    least: float = 8.0
    """Minimum timeout for any phase, in seconds."""
    slow: float = 120.0
    """Seconds allowed without a sign of life during startup, compilation, restore, save, evaluation or a first step."""
    most: float = 3600.0
    """Seconds without progress after which a rank counts as hung despite signs of life."""
    stopped: float = 3.0
    """Seconds after which a stopped (SIGSTOP) rank counts as hung while its peers are waiting."""
    evidence: float = 10.0
    """Seconds for collecting evidence before the kill."""
    agent: float = 75.0
    """Seconds a node's agent may be frozen (stopped, or stuck in the kernel) before its watchdog kills it."""
    heartbeat: float = 900.0
    """Seconds a running attempt may go without a heartbeat or a growing file before orch ends its job; 0: no limit."""

    def __post_init__(self) -> None:
        if self.factor < 2:
            raise ValueError(f"detection.hang.factor={self.factor}: must be at least 2, or ordinary steps look hung")
        require_least("detection.hang", self, heartbeat=0)
        require_positive("detection.hang", self, "least", "slow", "most", "stopped", "evidence", "agent")


@dataclass(frozen=True, kw_only=True)
class StragglerConfig:
    """Limits above which a rank counts as a straggler."""

    on: bool = True
    """Whether to compare the ranks' own work."""
    ratio: float = 1.07
    """A rank is a straggler if its work takes more than this many times as long as its peers', in several windows."""
    windows: int = 3
    """Number of consecutive windows that must agree."""

    def __post_init__(self) -> None:
        if self.ratio <= 1:
            raise ValueError(f"detection.straggler.ratio={self.ratio}: must be above 1")
        require_least("detection.straggler", self, windows=2)


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """Limits above which a loss counts as a spike. NaN and infinity always do."""

    deviations: float = 20.0
    """A loss is a spike if it exceeds the window's median by more than this many robust deviations and by more than
    half of the median, and its logarithm does so by more than half as many deviations; 0: only check for NaN."""
    window: int = 50
    """Number of steps over which the median and deviation are computed. No loss is judged until the window is full."""
    roll_backs: int = 3
    """Rollbacks allowed in an attempt without a new checkpoint. Each one skips the bad step's batch."""

    def __post_init__(self) -> None:
        require_least("detection.spike", self, deviations=0, window=8, roll_backs=0)


@dataclass(frozen=True, kw_only=True)
class PreflightConfig:
    """Node checks before training."""

    on: bool = True
    """Measure matrix multiplication, memory and network. The quick checks of folders and limits always run."""
    seconds: float = 60.0
    """Seconds after which network tests stop. Missing results are ignored."""
    slowest: float = 0.6
    """A node is suspect if its speed is below this share of its peers' median, or, in a Slurm job, of the median of the
    run's earlier attempts."""
    skew: float = 30.0
    """Largest allowed difference between nodes' clocks, in seconds. If it is exceeded, the node farthest from the
    median is suspect or, with only two nodes, the one that disagrees with the file server.
    """

    def __post_init__(self) -> None:
        require_positive("detection.preflight", self, "seconds", "slowest", "skew")
        if self.slowest >= 1:
            raise ValueError(f"detection.preflight.slowest={self.slowest}: must be below 1")


@dataclass(frozen=True, kw_only=True)
class DetectionConfig:
    """Settings for fault detection on ranks and nodes."""

    hang: HangConfig = field(default_factory=HangConfig)
    straggler: StragglerConfig = field(default_factory=StragglerConfig)
    spike: SpikeConfig = field(default_factory=SpikeConfig)
    preflight: PreflightConfig = field(default_factory=PreflightConfig)


KINDS = {
    "kill-rank": "SIGKILL to itself",
    "stop-rank": "SIGSTOP to itself",
    "raise": "an exception in the training loop",
    "slow-rank": "more work in this step and every later one",
    "hang-in-data": "waits while it loads its batch",
    "hang-in-forward": "sleeps in the forward pass",
    "hang-in-save": "waits in a save",
    "hang-in-collective": "never joins a collective, while its peers wait in it",
    "hold-lock": "never releases Python's interpreter lock",
    "desync-shape": "calls the next collective with a tensor of a different shape",
    "desync-order": "calls its collectives in a different order from its peers",
    "nan": "the loss of this step is NaN",
    "spike": "the loss of this step is a thousand times too large",
    "hang-in-send": "in a pipeline: hangs before it sends its results to another stage",
    "skip-send": "in a pipeline: skips one message to another stage and continues",
}
"""All kinds of faults that a rank can inject into itself. Progress cells store indices, so new kinds must come last."""
BETWEEN_STAGES = ("hang-in-send", "skip-send")
"""Kinds that need a pipeline."""


@dataclass(frozen=True, kw_only=True)
class DrillEvent:
    """An injected fault."""

    kind: str = "kill-rank"
    """Kind of fault. See docs/watching.md for the kinds."""
    rank: int = 0
    """Affected rank."""
    step: int = 1
    """Step in which it occurs. `kill-rank`, `stop-rank` and `raise` occur after the step."""
    attempt: int = 1
    """Attempt in which it occurs; 0: every attempt."""
    generation: int = 1
    """Generation of the attempt in which it occurs; 0: every generation."""
    value: float = 0.0
    """For `slow-rank`: seconds of work added to every step. For `hang-` kinds and `hold-lock`: seconds; 0: forever. For
    `desync-shape`: number of elements in the wrong tensor; 0: one."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"drill.events: kind={self.kind} must be one of {', '.join(KINDS)}")


@dataclass(frozen=True, kw_only=True)
class DrillConfig:
    """Deliberately injected faults to test recovery."""

    events: tuple[DrillEvent, ...] = ()
    """Faults to inject. Each occurs once."""
