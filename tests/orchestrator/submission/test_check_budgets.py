"""Budgets of GPU-hours: their use in the registry, warnings, refusals and the override."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from checkpointing.storage.durable import dump_line
from orchestrator.cli.runs import submit
from orchestrator.config.budgets_config import BudgetConfig, period_start
from orchestrator.config.compose import compose
from orchestrator.config.run_config import RunConfig
from orchestrator.errors import ConfigError, Precondition
from orchestrator.home import registry_path
from orchestrator.registry.gpu_hours import measure_budgets, newest_budgets
from orchestrator.states import AttemptState
from orchestrator.submission.check_budgets import check_budgets
from tests.orchestrator.cli.conftest import Seeds, Type, home, orch, seeds

__all__ = ["home", "orch", "seeds"]
HOUR = 3600.0
WITH_GPUS = ("cluster.nodes=2", "cluster.ranks_per_node=4", "cluster.gpus_per_node=4", "parallel.dp_shard=0")


def seed(seeds: Seeds, *, hours: float, account: str = "x", budgets: Any = (), spare: int = 0, **more: Any) -> str:
    """Record a run with an attempt on 2 nodes with 4 GPUs each that ended just now."""
    shape = {"nodes": 2, "gpus_per_node": 4, "spare_nodes": spare, "account": account}
    seeds.digest = seeds.store.put_config({"name": "tiny", "cluster": shape, "budgets": list(budgets), "n": str(more)})
    run = seeds.run()
    now = time.time()
    seeds.store.move_attempt(
        run, 1, AttemptState.ENDED, "done", epoch=seeds.epoch, now=now, ended_at=now, started_at=now - hours * HOUR
    )
    return run


def budget(**changes: Any) -> BudgetConfig:
    return BudgetConfig(**{"account": "x", "gpu_hours": 100.0, "per": "total", **changes})


def config(*overrides: str) -> RunConfig:
    return compose("tiny-gpt", [*WITH_GPUS, "cluster.account=x", *overrides], environ={}).config


def test_attempts_count_with_all_their_nodes_by_account_and_tag(seeds: Seeds) -> None:
    first = seed(seeds, hours=5, n=1)
    seed(seeds, hours=1, account="y", spare=1, n=2)
    seeds.store.change_tags(first, ["team/ann"], [])
    asked = [budget(), budget(account="y"), budget(account="", tag="team/ann"), budget(account="y", tag="team/ann")]
    used = [round(use.used) for use in measure_budgets(registry_path(), asked, time.time())]
    assert used == [40, 12, 40, 0]


def test_a_running_attempt_counts_so_far_and_only_within_the_period(seeds: Seeds) -> None:
    run = seed(seeds, hours=0)
    now, start = time.time(), period_start("day", time.time())
    seeds.store.note_attempt(run, 1, epoch=seeds.epoch, started_at=start - 10 * HOUR, ended_at=None)
    total, today = (use.used for use in measure_budgets(registry_path(), [budget(), budget(per="day")], now))
    assert total - today == pytest.approx(80)
    assert today == pytest.approx(8 * (now - start) / HOUR)


def test_periods_begin_at_midnight_utc() -> None:
    now = datetime(2026, 11, 28, 13, 5, tzinfo=UTC).timestamp()
    starts = {per: datetime.fromtimestamp(period_start(per, now), UTC).strftime("%m-%d %H") for per in ("day", "week")}
    assert starts == {"day": "11-28 00", "week": "11-23 00"}
    assert datetime.fromtimestamp(period_start("month", now), UTC).day == 1
    assert period_start("total", now) == 0


def test_a_submit_is_warned_about_at_80_percent_and_refused_at_100(seeds: Seeds) -> None:
    seed(seeds, hours=10.1)  # 80.8 GPU-hours
    said: list[str] = []
    entry = "budgets=[{account: x, gpu_hours: 100, per: total}]"
    check_budgets(config(entry), (), registry_path(), time.time(), said.append)
    assert said == ["account x has used 80.8 of 100 GPU-hours (81 %) in total"]
    seed(seeds, hours=2.5, n=2)
    with pytest.raises(Precondition) as refused:
        check_budgets(config(entry), (), registry_path(), time.time(), said.append)
    assert refused.value.what == "the budget is used up: account x has used 100.8 of 100 GPU-hours (101 %) in total"
    assert "'~budgets' on the command line" in refused.value.hint
    for change in ("~budgets", "cluster.account=y", "cluster.gpus_per_node=0"):
        check_budgets(config(entry, change), (), registry_path(), time.time(), said.append)
    assert len(said) == 1


def test_submit_refuses_before_anything_is_recorded_and_status_warns(
    orch: Type, seeds: Seeds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"account": "x", "gpu_hours": 10, "per": "month"}
    user = tmp_path / "config" / "orch" / "config.yaml"
    user.parent.mkdir(parents=True)
    user.write_text(dump_line({"budgets": [entry], "cluster": {"account": "x"}}))
    seed(seeds, hours=2, budgets=[entry])
    monkeypatch.setattr(submit, "check", lambda *_: None)  # this machine has no GPU
    done = orch("submit", "tiny-gpt", *WITH_GPUS, f"cluster.root={tmp_path / 'runs'}", "--cluster", "local")
    assert done.code == 4, done.err
    assert "the budget is used up: account x has used 16.0 of 10 GPU-hours (160 %) this month" in done.err
    assert len(orch("status", "--json").data) == 1
    assert newest_budgets(registry_path()) == [BudgetConfig(account="x", gpu_hours=10.0)]
    assert "account x has used 16.0 of 10 GPU-hours (160 %) this month" in orch("status").err


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("{gpu_hours: 5}", "names neither an account nor a tag"),
        ("{account: x}", "gpu_hours=0.0: must be above 0"),
        ("{account: x, gpu_hours: 5, per: fortnight}", "per=fortnight: must be one of day, week, month, year, total"),
        ("{account: x, gpu_hours: many}", "`gpu_hours`"),
        ("{acount: x, gpu_hours: 5}", "unknown key `budgets.acount`"),
    ],
)
def test_wrong_budgets_are_refused(entry: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        compose("tiny-gpt", [f"budgets=[{entry}]"])
    assert said in f"{refused.value.what} {refused.value.hint}"
