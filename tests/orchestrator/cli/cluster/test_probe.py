"""`orch doctor --nodes`: the probe's configuration, its stored results and their comparison with needs."""

from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.cli.cluster.account_use import account_use, budget_use
from orchestrator.cli.cluster.probe import places, probe_config
from orchestrator.cli.cluster.probe_needs import compare_needs, find_needs
from orchestrator.config.budgets_config import BudgetConfig
from orchestrator.config.compose import compose
from orchestrator.errors import SlurmUnreachable
from orchestrator.registry.probe_results import StoredProbe, load_probes, save_probe
from trainer.protocol.probe import CollectiveRate, ProbeResult, StorageRate

WORLD = CollectiveRate(
    scope="world", operation="all-reduce", ranks=4, bytes=1 << 26, seconds=0.1, bus_bytes_per_s=1e9
)  # fmt: skip
ROOT = StorageRate(place="run root", path="/r", nodes=2, bytes=1, write_bytes_per_s=2e9, read_bytes_per_s=4e9)
DATA = StorageRate(place="data.path", path="/d", nodes=2, bytes=1, read_bytes_per_s=1e6)
RESULT = ProbeResult(
    at=1.0, nodes=2, ranks=4, backend="gloo", transport="gloo, TCP on lo", collectives=(WORLD,), storage=(ROOT, DATA)
)


def test_needs_of_the_built_in_model_are_compared_with_the_rates() -> None:
    config = compose("tiny-gpt", ["checkpoint.every=50"]).config
    needs = find_needs(config)
    assert needs.gradient_bytes is not None
    assert needs.checkpoint_bytes == 3 * needs.gradient_bytes
    assert needs.data_bytes == config.train.batch_size * config.train.seq_len * 4
    gradients, saves, tokens = compare_needs(needs, RESULT, 0.01)
    assert gradients.seconds == pytest.approx(needs.gradient_bytes * 1.5 / 1e9)
    assert saves.seconds == pytest.approx(needs.checkpoint_bytes / 2e9)
    assert saves.available == pytest.approx(0.5)
    assert tokens.seconds == pytest.approx(needs.data_bytes / 1e6)
    assert [one.enough for one in (gradients, saves, tokens)] == [True, True, needs.data_bytes / 1e6 <= 0.01]
    assert [one.enough for one in compare_needs(needs, RESULT, None)] == [None] * 3
    slow = replace(RESULT, collectives=(replace(WORLD, bus_bytes_per_s=1e6),))
    assert compare_needs(needs, slow, 0.01)[0].enough is False


def test_sizes_of_a_users_own_model_are_unknown() -> None:
    needs = find_needs(compose("torchrun-script", []).config)
    assert (needs.gradient_bytes, needs.checkpoint_bytes, needs.data_bytes) == (None, None, 0)
    assert compare_needs(needs, RESULT, 1.0) == []


def test_results_are_kept_beside_the_registry(tmp_path: Path) -> None:
    registry = tmp_path / "registry.db"
    assert load_probes(registry) == []
    for index in range(60):
        probe = StoredProbe(scheduler=f"s{index % 2}", partition="low", run=f"probe-{index}", result=RESULT)
        assert save_probe(registry, probe) == tmp_path / "probes.json"
    assert [one.run for one in load_probes(registry, "s1", "low")][-1] == "probe-59"
    assert len(load_probes(registry)) == 50
    assert load_probes(registry)[-1].result == RESULT
    (tmp_path / "probes.json").write_text("rubbish")
    assert load_probes(registry) == []


def test_the_probes_run_has_the_users_cluster_and_only_its_program(tmp_path: Path) -> None:
    overrides = (
        "cluster.partition=low", "cluster.spare_nodes=1", "+env.NCCL_DEBUG=WARN", "data.text=[]",
        f"data.path={tmp_path}", "checkpoint.tiers=[{path: /scratch/ckpt}, {path: run}, {path: 's3://bucket/x'}]",
    )  # fmt: skip
    config = probe_config("tiny-gpt", overrides, 3, tmp_path).config
    assert (config.cluster.nodes, config.cluster.spare_nodes, config.cluster.partition) == (3, 0, "low")
    assert config.cluster.ranks_per_node == 2
    assert config.env == {"NCCL_DEBUG": "WARN"}
    assert config.command[-1] == str(tmp_path / "order.json")
    measured = {place.name: (place.path, place.read_only) for place in places(compose("tiny-gpt", overrides).config)}
    assert measured["data.path"] == (str(tmp_path), True)
    assert measured["tier /scratch/ckpt"] == ("/scratch/ckpt", False)
    assert set(measured) == {"data.path", "run root", "tier /scratch/ckpt"}


def test_doctor_reports_fair_share_with_limits_and_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.cli.cluster.account_use.user_name", lambda uid: "ann")

    def ask(command: list[str]) -> str:
        if command[0] == "sshare":
            return "poor||0.1|1.0|\n poor|ann|0.100000|0.400000|0.111111\n"
        record = "ClusterName=lab Account=poor UserName=ann(7) Partition= ID=5\n    GrpJobs=N(1)\n    MaxJobs=1(1)\n"
        return record + record.replace("ann(7)", "bob(8)").replace("1(1)", "5(5)")

    (found,) = account_use(ask)
    assert (found.level, found.text) == (
        "info",
        "account poor: fair share 0.11 (40 % of the usage, 10 % of the shares); user ann in account poor: MaxJobs=1, "
        "1 in use",
    )

    def silent(command: list[str]) -> str:
        raise SlurmUnreachable("sshare gave no answer")

    assert [check.level for check in account_use(silent)] == ["warn"]
    (budget,) = budget_use(tmp_path / "none.db", [BudgetConfig(account="x", gpu_hours=5.0)])
    assert (budget.level, budget.text) == ("ok", "account x has used 0.0 of 5 GPU-hours (0 %) this month")
