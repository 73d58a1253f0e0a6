"""Settings for a run's restore tests, and the config values that a test's layout implies."""

import math
import re
from dataclasses import dataclass, field
from typing import Any

from trainer.parallel.data import Strategy
from trainer.parallel.dimension import Splits
from trainer.parallel.parallel_config import DIMENSIONS
from trainer.protocol.config import JobConfig
from trainer.protocol.time_spans import parse_span

OFF, NIGHTLY = "off", "nightly"
SAME = "same"
_LONGEST = 10 * 365 * 86400.0
_LAYOUT = re.compile(rf"{SAME}|[1-9]\d*(x[1-9]\d*)?")
SAMPLES = ("unproven", "newest", "oldest", "random")


@dataclass(frozen=True, kw_only=True)
class RestoreTestsConfig:
    """Restore tests of this run's checkpoints: separate jobs that restore a checkpoint and train a few more steps."""

    every: str = "1d"
    """An interval (`1d`, `6h`, `30m`; the first test comes after that much training), `nightly`, a crontab line
    (`0 3 * * *`), or `off`.

    The last checkpoint of a successful run is also tested once."""

    sample: str = "unproven"
    """Checkpoint to test: `unproven` (the newest not yet restored by a test), `newest`, `oldest` or `random`."""

    tier: str = ""
    """Path of the tier whose copies are tested; empty: the tier where checkpoints are committed, if all nodes can read
    it."""

    layouts: tuple[str, ...] = (SAME,)
    """Layouts to test: `same` (the run's), a number of ranks on one node (`1`), or nodes x ranks per node (`2x4`)."""

    steps: int = 3
    """Number of steps to train from the checkpoint and compare with the run's own."""

    level: int = 4
    """Level of the `orch ckpt verify` that runs first: 2 checks every byte, 3 the structure, 4 every value."""

    budget: float = 0.005
    """Maximum share of the run's rank-hours that its restore tests may use."""

    max_parallel: int = 1
    """Maximum number of restore tests that may be active at the same time, across all runs."""

    cluster: dict[str, Any] = field(default_factory=dict)
    """Keys of `cluster` that differ in tests (`partition`, `qos`, `time`, `mem`); `layouts` sets the size."""

    command: tuple[str, ...] = ()
    """For runs of a `command`: a program that restores $ORCH_CHECKPOINT, instead of the command itself."""

    def __post_init__(self) -> None:
        if self.sample not in SAMPLES:
            raise ValueError(f"restore_tests.sample={self.sample}: must be one of {', '.join(SAMPLES)}")
        if len(set(self.layouts)) < len(self.layouts):
            raise ValueError("restore_tests.layouts: a layout is named twice")
        for layout in self.layouts:
            if not _LAYOUT.fullmatch(layout):
                raise ValueError(f"restore_tests.layouts: {layout}: must be same, a number of ranks, or NODESxRANKS")
        if not self.layouts:
            raise ValueError("restore_tests.layouts: is empty; name at least `same`, or set restore_tests.every=off")
        if not 1 <= self.steps <= 1000:
            raise ValueError(f"restore_tests.steps={self.steps}: must be from 1 to 1000")
        if not 2 <= self.level <= 4:
            raise ValueError(f"restore_tests.level={self.level}: must be 2, 3 or 4")
        if not 0 <= self.budget < math.inf:
            raise ValueError(f"restore_tests.budget={self.budget}: must be 0 or a share (0.005 is half a percent)")
        if self.max_parallel < 1:
            raise ValueError(f"restore_tests.max_parallel={self.max_parallel}: must be at least 1")
        if not is_schedule(self.every):
            raise ValueError(
                f"restore_tests.every={self.every}: must be off, nightly, an interval (30m, 6h, 1d) or a crontab line"
            )


def is_schedule(every: str) -> bool:
    """Return whether the text is a valid `restore_tests.every`."""
    if every in (OFF, NIGHTLY):
        return True
    seconds = interval_seconds(every)
    return 0 < seconds <= _LONGEST if seconds is not None else _is_cron(every)


def interval_seconds(every: str) -> float | None:
    """Return an interval in seconds; None for any other schedule."""
    return None if every.endswith("s") else parse_span(every)  # an interval in seconds is too short for jobs


def _is_cron(every: str) -> bool:
    from datetime import datetime

    from cronsim import CronSim, CronSimError  # optional: only crontab lines need it

    try:
        return len(every.split()) == 5 and bool(CronSim(every, datetime(2026, 1, 1)))
    except CronSimError:
        return False


def with_layout(data: dict[str, Any], layout: str) -> dict[str, Any]:
    """Return the config sections that change for `layout`: `same`, `RANKS` or `NODESxRANKS`.

    Tensor, context and expert parallelism and replication are kept as far as they fit. Pipeline parallelism is turned
    off, and the model is sharded over the remaining ranks. The micro-batch size is kept, or reduced to a divisor of a
    rank's share.
    """
    cluster, parallel = dict(data["cluster"]), dict(data["parallel"])
    cluster |= {"spare_nodes": 0, "min_nodes": 0}
    more = {}
    if layout != SAME:
        nodes, ranks = nodes_and_ranks(layout)
        cluster |= {"nodes": nodes, "ranks_per_node": ranks, "gpus_per_node": ranks if cluster["gpus_per_node"] else 0}
        tp = math.gcd(parallel["tp"], ranks)
        left = nodes * ranks // tp
        sizes = {"tp": tp}
        for key in (dimension.key for dimension in DIMENSIONS if dimension.splits is Splits.SEQUENCE):
            sizes[key] = math.gcd(parallel.get(key, 1), left)
            left //= sizes[key]
        replicas = parallel["dp_replicate"] if left % parallel["dp_replicate"] == 0 else 1
        strategy = parallel.get("strategy", Strategy.AUTO)
        if strategy == Strategy.DDP:  # its single replica degree covers all ranks
            replicas = 1
        if strategy == Strategy.HSDP and replicas == 1:
            strategy = Strategy.AUTO
        if "pipeline" in parallel:
            parallel["pipeline"] = {**parallel["pipeline"], "stages": 1, "stages_per_rank": 0, "micro_batches": 0}
        ep = _ep(data, nodes * ranks // replicas)
        parallel |= {"strategy": str(strategy), **sizes, "ep": ep, "dp_replicate": replicas, "dp_shard": 0}
        if "train" in data:
            more["train"] = {**data["train"], "micro_batch_size": _micro_batch_size(data["train"], left)}
    return {"cluster": cluster, "parallel": parallel, **more}


def _micro_batch_size(train: dict[str, Any], ranks: int) -> int:
    """Return the largest size, at most the configured one, that divides each of `ranks` equal shares of the batch."""
    asked: int = train["micro_batch_size"]
    share, rest = divmod(train["batch_size"], ranks)
    if rest or not asked:
        return asked
    return max(size for size in range(1, min(asked, share) + 1) if share % size == 0)


def _ep(data: dict[str, Any], sharding: int) -> int:
    """Return the largest divisor of the expert-parallel degree that fits `sharding` ranks and the experts' width."""
    asked = math.gcd(data["parallel"].get("ep", 1), sharding)
    width = data.get("model", {}).get("experts", {}).get("ffn_dim", 1)
    return next(ep for ep in range(asked, 0, -1) if asked % ep == 0 and (ep == 1 or width % (sharding // ep) == 0))


def nodes_and_ranks(layout: str) -> tuple[int, int]:
    """Return the number of nodes and the number of ranks per node."""
    nodes, times, ranks = layout.partition("x")
    return (int(nodes), int(ranks)) if times else (1, int(nodes))


def rank_count(layout: str, config: JobConfig) -> int:
    """Return the number of ranks in a test on `layout`."""
    if layout == SAME:
        return config.cluster.world_size
    nodes, ranks = nodes_and_ranks(layout)
    return nodes * ranks
