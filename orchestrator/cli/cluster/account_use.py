"""Checks of `orch doctor`: fair share, limits with their use, and budgets of GPU-hours."""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from checkpointing.storage.trusted_path import user_name
from orchestrator.cli.cluster.check import INFO, OK, WARN, Check, CommandRunner
from orchestrator.config.budgets_config import BudgetConfig
from orchestrator.errors import OrchError
from orchestrator.registry.gpu_hours import WARN_FROM, measure_budgets
from orchestrator.scheduler.slurm.account_limits import read_limits
from orchestrator.scheduler.slurm.fair_share import SSHARE_FIELDS, read_fair_shares

_MOST_ACCOUNTS = 5


def account_use(ask: CommandRunner) -> Iterator[Check]:
    """Report the fair share of each of this user's accounts, and its limits with their use now."""
    me = (user_name(os.geteuid()), str(os.geteuid()))
    try:
        shares = read_fair_shares(ask(["sshare", "-h", "-P", "-U", "-u", me[0], "-o", ",".join(SSHARE_FIELDS)]))
        for share in shares[:_MOST_ACCOUNTS]:
            records = read_limits(ask(["scontrol", "show", "assoc_mgr", "flags=assoc", f"accounts={share.account}"]))
            own = [one for one in records if one.account == share.account and one.user in ("", *me)]
            limits = [limit for record in own for limit in record.limits if limit.used is not None]
            is_spent = any(limit.used is not None and limit.used >= limit.allowed for limit in limits)
            text = "; ".join([share.describe(), *(limit.describe() for limit in limits)])
            yield Check("account", INFO if is_spent else OK, text, "a run beyond a limit waits" if is_spent else "")
    except OrchError as error:
        yield Check("account", WARN, f"cannot report fair share and use: {error.what}")
        return
    if len(shares) > _MOST_ACCOUNTS:
        yield Check("account", INFO, f"{len(shares) - _MOST_ACCOUNTS} more accounts: `sshare -U`")


def budget_use(registry: Path, budgets: Sequence[BudgetConfig]) -> Iterator[Check]:
    """Report the use of each budget of the configuration."""
    for use in measure_budgets(registry, budgets, time.time()):
        hint = "`orch submit` refuses runs with GPUs when all are used; '~budgets' submits them anyway"
        yield Check("budget", WARN if use.share >= WARN_FROM else OK, use.words, hint if use.share >= WARN_FROM else "")
