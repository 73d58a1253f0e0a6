"""Check of a new run against the budgets of GPU-hours in its configuration."""

from collections.abc import Callable
from pathlib import Path

from orchestrator.config.run_config import RunConfig
from orchestrator.errors import Precondition
from orchestrator.registry.gpu_hours import WARN_FROM, measure_budgets


def check_budgets(
    config: RunConfig, tags: tuple[str, ...], registry: Path, now: float, warn: Callable[[str], None]
) -> None:  # fmt: skip
    """Raise Precondition for a run with GPUs whose budget is used up; call `warn` for one that is nearly used up."""
    if not config.cluster.gpus_per_node:
        return
    budgets = [budget for budget in config.budgets if budget.covers(config.cluster.account, tags)]
    uses = measure_budgets(registry, budgets, now)
    for use in uses:
        if use.share >= 1:
            raise Precondition(
                f"the budget is used up: {use.words}",
                where="budgets",
                hint="'~budgets' on the command line submits the run anyway; `orch doctor` lists the budgets",
            )
    for use in uses:
        if use.share >= WARN_FROM:
            warn(use.words)
