"""Settings of restore tests of a run's checkpoints."""

import math
import re
from dataclasses import dataclass, field
from typing import Any

from trainer.protocol.time_spans import parse_span

OFF, NIGHTLY = "off", "nightly"
SAME = "same"
_LONGEST = 10 * 365 * 86400.0
_LAYOUT = re.compile(rf"{SAME}|[1-9]\d*(x[1-9]\d*)?")
SAMPLES = ("unproven", "newest", "oldest", "random")


@dataclass(frozen=True, kw_only=True)
class RestoreTestsConfig:
    """Restore tests of this run's checkpoints: separate jobs that restore one and train a few steps from it."""

    every: str = "1d"
    """`1d`, `6h`, `30m`: after this much training, then at this interval; `nightly`; a crontab line (`0 3 * * *`); or
    `off`.

    The last checkpoint of a successful run is also tested once."""

    sample: str = "unproven"
    """Checkpoint to test: `unproven` (the newest not yet restored by a test), `newest`, `oldest` or `random`."""

    tier: str = ""
    """Path of the tier whose copies are tested; empty: the tier of the commit, if all nodes see it."""

    layouts: tuple[str, ...] = (SAME,)
    """Layouts to test, each one: `same` as the run, ranks on one node (`1`), or nodes x ranks per node (`2x4`)."""

    steps: int = 3
    """Steps to train from the checkpoint and compare with the run's own."""

    level: int = 4
    """Level of the `orch ckpt verify` that runs first: 2 checks every byte, 3 the structure, 4 every value."""

    budget: float = 0.005
    """Largest share of the run's rank-hours that its restore tests may use."""

    max_parallel: int = 1
    """Most restore tests that may be active at once, over all runs."""

    cluster: dict[str, Any] = field(default_factory=dict)
    """Keys of `cluster` that differ in tests (`partition`, `qos`, `time`, `mem`); `layouts` sets the size."""

    command: tuple[str, ...] = ()
    """For a `command`: the program that restores $ORCH_CHECKPOINT (docs/restore-tests.md)."""

    def __post_init__(self) -> None:
        if self.sample not in SAMPLES:
            raise ValueError(f"restore_tests.sample={self.sample}: must be one of {', '.join(SAMPLES)}")
        if len(set(self.layouts)) < len(self.layouts):
            raise ValueError("restore_tests.layouts: one of them is named twice")
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
    """Return the seconds of an interval; None for any other schedule."""
    return None if every.endswith("s") else parse_span(every)  # seconds are too short between jobs


def _is_cron(every: str) -> bool:
    from datetime import datetime

    from cronsim import CronSim, CronSimError  # optional: only crontab lines need it

    try:
        return len(every.split()) == 5 and bool(CronSim(every, datetime(2026, 1, 1)))
    except CronSimError:
        return False
