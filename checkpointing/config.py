"""User settings for checkpoints."""

import math
from dataclasses import dataclass, field

AUTO = "auto"
RUN = "run"
MEMORY = "memory"
"""The implicit tier for copies in the ranks' memory. It cannot be configured, but is reported like any other tier."""
BY_NODE = "node"


@dataclass(frozen=True, kw_only=True)
class TierConfig:
    """A location for checkpoints. A run's first tier receives every save; the others receive copies."""

    path: str = RUN
    """A folder, an fsspec URL (`s3://bucket/prefix`), or `run` for the run's own folder. orch adds the run's name."""

    every: int = 0
    """Copy a checkpoint here if it is at least this many steps newer than the newest checkpoint here. 0 copies all."""

    keep: int = 3
    """Number of newest checkpoints to keep here; at least 2."""

    shared: bool = True
    """False for node-local disks, where each node keeps the files of its own ranks."""

    bandwidth: float = 0.0
    """Maximum MiB/s that each rank may write to this tier. 0 means no limit."""

    stripes: int = 1
    """Lustre stripe count for the folder, applied if `lfs` is installed. 0 means the site's default."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("checkpoint.tiers: path is empty; name a folder, a URL, or `run`")
        if self.keep < 2:
            raise ValueError(f"checkpoint.tiers: {self.path}: keep={self.keep}: must be at least 2")
        if self.every < 0 or self.stripes < 0 or not 0 <= self.bandwidth < math.inf:
            raise ValueError(f"checkpoint.tiers: {self.path}: every, stripes and bandwidth must be 0 or more")
        if not self.shared and "://" in self.path:
            raise ValueError(f"checkpoint.tiers: {self.path}: a URL is not a node's own disk; leave `shared` out")


@dataclass(frozen=True, kw_only=True)
class RetentionConfig:
    """Rules for keeping checkpoints in addition to the newest `keep`. Pinned checkpoints are always kept."""

    every: int = 0
    """Keep every checkpoint whose step is a multiple of this number. 0 keeps none."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"checkpoint.retention.every={self.every}: must be 0 or a number of steps")


@dataclass(frozen=True, kw_only=True)
class BestConfig:
    """The best checkpoints by a metric, kept in addition to the newest. The run also saves after each validation."""

    metric: str = ""
    """A number that the workload's `validate` or `metrics` returns, or `loss`. If empty, no best ones are kept."""

    mode: str = "min"
    """`min` if a smaller number is better, `max` if a larger one is."""

    keep: int = 1
    """Number of best checkpoints to keep."""

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise ValueError(f"checkpoint.best.mode={self.mode}: must be min or max")
        if self.keep < 1:
            raise ValueError(
                f"checkpoint.best.keep={self.keep}: must be at least 1; to keep none, set checkpoint.best.metric="
            )


@dataclass(frozen=True, kw_only=True)
class StagingConfig:
    """Settings for staging a rank's state for the writer."""

    mode: str = "block"
    """`block`: training waits for the copy. `lazy`: the state is copied during the next forward and backward pass."""

    host_memory: float = 0.0
    """Maximum GiB of host memory for one rank's copies. 0 means enough for two copies.

    If there is too little memory for one copy, training waits for the disk, failed saves are not retried, and no copy
    stays in memory.
    """

    files: int = 1
    """Number of files that each rank writes."""

    def __post_init__(self) -> None:
        if self.mode not in ("block", "lazy"):
            raise ValueError(f"checkpoint.staging.mode={self.mode}: must be block or lazy")
        if not 0 <= self.host_memory < math.inf:
            raise ValueError(f"checkpoint.staging.host_memory={self.host_memory}: must be 0 or a number of GiB")
        if not 1 <= self.files <= 64:
            raise ValueError(f"checkpoint.staging.files={self.files}: must be from 1 to 64")


@dataclass(frozen=True, kw_only=True)
class AutoConfig:
    """Bounds on the interval that `checkpoint.every: auto` chooses."""

    least: int = 10
    """Minimum number of steps between two saves, and before the first save."""

    most: int = 5000
    """Maximum number of steps between two saves."""

    node_days: float = 64.0
    """Initial estimate of node-days per failure. Failures observed on the cluster and in the run soon outweigh it."""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ValueError(f"checkpoint.auto.least={self.least}: must be from 1 to checkpoint.auto.most={self.most}")
        if not 0 < self.node_days < math.inf:
            raise ValueError(f"checkpoint.auto.node_days={self.node_days}: must be a number of days above 0")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Save interval, locations and number of checkpoints to keep."""

    every: int | str = 100
    """Steps between saves; `auto` lets orch choose. 0 saves only at the end and when stopped."""

    auto: AutoConfig = field(default_factory=AutoConfig)

    keep: int = 3
    """Number of newest checkpoints to keep; at least 2, so that there is a fallback if the newest is damaged."""

    max_unsaved_steps: int = 0
    """End the attempt after this many steps without a committed checkpoint. 0 means never, even if all saves fail."""

    plausibility: str = "refuse"
    """Response to NaN in a trainable weight, or to replicas that differ: `refuse`, `warn` or `off`."""

    files: str = "rank"
    """`rank`: each rank writes its own files. `node`: the ranks of a node share one file, to save inodes.

    Each rank's region in a shared file begins at a multiple of 8 MiB.
    """

    staging: StagingConfig = field(default_factory=StagingConfig)

    tiers: tuple[TierConfig, ...] = ()
    """Locations for checkpoints, fastest first. Empty means only the run's own folder."""

    retention: RetentionConfig = field(default_factory=RetentionConfig)

    best: BestConfig = field(default_factory=BestConfig)

    def __post_init__(self) -> None:
        if isinstance(self.every, str) and self.every != AUTO:
            raise ValueError(f"checkpoint.every={self.every}: must be a number of steps, 0 (only at the end) or auto")
        if isinstance(self.every, int) and self.every < 0:
            raise ValueError(f"checkpoint.every={self.every}: must be 0 (only at the end) or a number of steps")
        if self.keep < 2:
            raise ValueError(f"checkpoint.keep={self.keep}: keep at least 2, in case the newest is damaged")
        if self.max_unsaved_steps < 0:
            raise ValueError(f"checkpoint.max_unsaved_steps={self.max_unsaved_steps}: must be 0 (no limit) or more")
        if self.plausibility not in ("refuse", "warn", "off"):
            raise ValueError(f"checkpoint.plausibility={self.plausibility}: must be refuse, warn or off")
        if self.files not in ("rank", BY_NODE):
            raise ValueError(f"checkpoint.files={self.files}: must be rank or node")
        if self.files == BY_NODE and self.tiers and "://" in self.tiers[0].path:
            raise ValueError(
                f"checkpoint.files=node: several ranks cannot write to one object in {self.tiers[0].path}; name a "
                f"mounted file system as the first tier, or set checkpoint.files=rank"
            )
        if isinstance(self.every, int) and 0 < self.max_unsaved_steps < self.every:
            raise ValueError(
                f"checkpoint.max_unsaved_steps={self.max_unsaved_steps}: must be 0 or at least checkpoint.every"
                f"={self.every}, preferably twice that, because a save takes time"
            )
        if self.every == AUTO and 0 < self.max_unsaved_steps < 2 * self.auto.least:
            raise ValueError(
                f"checkpoint.max_unsaved_steps={self.max_unsaved_steps}: must be 0 or at least twice "
                f"checkpoint.auto.least={self.auto.least}"
            )
        if self.tiers and not any(tier.shared for tier in self.tiers):
            raise ValueError(
                "checkpoint.tiers: no tier is shared, so a job on other nodes would find no checkpoint; add {path: run}"
            )
        paths = [tier.path for tier in self.tiers]
        if len(set(paths)) != len(paths):
            raise ValueError("checkpoint.tiers: two tiers have the same path")
