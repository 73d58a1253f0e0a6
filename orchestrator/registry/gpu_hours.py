"""GPU-hours used by the attempts in the registry, compared with budgets; uses only the standard library."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.config.budgets_config import BudgetConfig, period_start
from orchestrator.registry.fast_queries import select_rows

WARN_FROM = 0.8  # share of a budget
_ATTEMPTS = """
SELECT attempts.started_at AS start, attempts.ended_at AS end, runs.tags AS tags,
    json_extract(configs.data, '$.cluster.account') AS account,
    coalesce(json_extract(configs.data, '$.cluster.gpus_per_node'), 0)
    * (coalesce(json_extract(configs.data, '$.cluster.nodes'), 1)
    + coalesce(json_extract(configs.data, '$.cluster.spare_nodes'), 0)) AS gpus
FROM attempts JOIN runs ON runs.name = attempts.run JOIN configs
    ON configs.digest = CASE attempts.config_digest WHEN '' THEN runs.config_digest ELSE attempts.config_digest END
WHERE attempts.started_at IS NOT NULL AND (attempts.ended_at IS NULL OR attempts.ended_at > ?)
"""
_NEWEST = """
SELECT json_extract(configs.data, '$.budgets') AS budgets FROM runs JOIN configs
    ON configs.digest = runs.config_digest ORDER BY runs.id DESC LIMIT 1
"""


@dataclass(frozen=True, kw_only=True)
class BudgetUse:
    """A budget and the GPU-hours used in its current period."""

    budget: BudgetConfig
    used: float

    @property
    def share(self) -> float:
        return self.used / self.budget.gpu_hours

    @property
    def words(self) -> str:
        """Return the use in words: `account x has used 4,100.0 of 5,000 GPU-hours (82 %) this month`."""
        when = "in total" if self.budget.per == "total" else "today" if self.budget.per == "day" else ""
        when = when or f"this {self.budget.per}"
        used = f"{self.used:,.1f} of {self.budget.gpu_hours:,g} GPU-hours ({100 * self.share:.0f} %)"
        return f"{self.budget.owner} has used {used} {when}"


def measure_budgets(path: Path, budgets: Sequence[BudgetConfig], now: float) -> list[BudgetUse]:
    """Return the use of each budget. Runs that were removed from the registry do not count."""
    starts = [period_start(budget.per, now) for budget in budgets]
    used = [0.0] * len(budgets)
    for row in select_rows(path, _ATTEMPTS, (min(starts),)) if budgets else ():
        account, tags = row["account"] or "", tuple(json.loads(row["tags"]))
        for index, (budget, start) in enumerate(zip(budgets, starts, strict=True)):
            if budget.covers(account, tags):
                end = now if row["end"] is None else row["end"]
                used[index] += row["gpus"] * max(0.0, end - max(start, row["start"])) / 3600
    return [BudgetUse(budget=budget, used=hours) for budget, hours in zip(budgets, used, strict=True)]


def newest_budgets(path: Path) -> list[BudgetConfig]:
    """Return the budgets in the newest run's configuration, which is as new as the last `orch submit`."""
    rows = select_rows(path, _NEWEST, ())
    known = json.loads(rows[0]["budgets"]) if rows and rows[0]["budgets"] else []
    return [BudgetConfig(**budget) for budget in known]
