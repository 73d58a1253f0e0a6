"""What a user may say about checkpoints."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """How often a run is saved and how many checkpoints are kept."""

    every: int = 100
    """Save after every so many steps; 0 saves only at the end and when the run is stopped."""

    keep: int = 3
    """Keep the newest so many committed checkpoints; at least 2, so that a damaged newest one has a substitute."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"checkpoint.every={self.every}: must be 0 (only at the end) or a number of steps")
        if self.keep < 2:
            raise ValueError(f"checkpoint.keep={self.keep}: keep at least 2, or a damaged newest one loses the run")
