"""Budgets of GPU-hours, usually in the site's or the user's file."""

import math
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

PERIODS = ("day", "week", "month", "year", "total")


@dataclass(frozen=True, kw_only=True)
class BudgetConfig:
    """GPU-hours that the runs of one account, or with one tag, may use in a period."""

    account: str = ""
    """Account (`cluster.account`) whose runs count; empty: every account."""
    tag: str = ""
    """Tag of the runs that count; empty: every run."""
    gpu_hours: float = 0.0
    """GPU-hours for one period. `orch submit` warns from 80 % on, and refuses a run with GPUs when all are used."""
    per: str = "month"
    """Period, which begins at 00:00 UTC: `day`, `week` (Monday), `month`, `year`, or `total` for all time."""

    def __post_init__(self) -> None:
        if not (self.account or self.tag):
            raise ValueError("budgets: an entry names neither an account nor a tag")
        if not 0 < self.gpu_hours < math.inf:
            raise ValueError(f"budgets: gpu_hours={self.gpu_hours}: must be above 0")
        if self.per not in PERIODS:
            raise ValueError(f"budgets: per={self.per}: must be one of {', '.join(PERIODS)}")

    @property
    def owner(self) -> str:
        """Return the runs that count, in words: `account x`, `tag y`."""
        return " and ".join(
            f"{kind} {name}" for kind, name in (("account", self.account), ("tag", self.tag)) if name
        )  # fmt: skip

    def covers(self, account: str, tags: tuple[str, ...]) -> bool:
        """Return whether a run counts."""
        return self.account in ("", account) and (not self.tag or self.tag in tags)


def period_start(per: str, now: float) -> float:
    """Return the beginning of the current period, in seconds since the epoch."""
    today = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    starts = {
        "day": today, "week": today - timedelta(days=today.weekday()), "month": today.replace(day=1),
        "year": today.replace(month=1, day=1),
    }  # fmt: skip
    return starts[per].timestamp() if per in starts else 0.0
