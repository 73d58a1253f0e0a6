"""Site and user configs: stronger than presets, weaker than the run's own file and overrides."""

from pathlib import Path

import pytest

from orchestrator.config.compose import compose


@pytest.fixture
def standing(tmp_path: Path) -> dict[str, str]:
    site, home = tmp_path / "site.yaml", tmp_path / "home" / ".config" / "orch"
    home.mkdir(parents=True)
    site.write_text("cluster: {mem: 1G, time: 10, cpus_per_task: 7}\nenv: {SITE: 1}\n")
    (home / "config.yaml").write_text("cluster: {mem: 2G, time: 20}\n")
    return {"HOME": str(tmp_path / "home"), "ORCH_SITE_CONFIG": str(site)}


def test_a_users_and_a_sites_config_beat_presets(standing: dict[str, str], tmp_path: Path) -> None:
    composed = compose("slurm-first-run", environ=standing)
    cluster = composed.config.cluster
    assert (cluster.mem, cluster.time, cluster.cpus_per_task, cluster.ranks_per_node) == ("2G", "20", 7, 2)
    assert composed.origins["cluster.mem"] == f"{tmp_path}/home/.config/orch/config.yaml:1"
    assert composed.origins["cluster.cpus_per_task"] == f"{tmp_path}/site.yaml:1"
    assert composed.origins["cluster.ranks_per_node"].endswith("configs/cluster/slurm-cpu.yaml:5")
    typed = compose("slurm-first-run", ["cluster.mem=3G"], environ=standing)
    assert (typed.config.cluster.mem, typed.origins["cluster.mem"]) == ("3G", "override #1: cluster.mem=3G")


def test_a_file_of_ones_own_beats_both_and_what_it_includes_of_ones_own_too(
    standing: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "base.yaml").write_text("cluster: {time: 40}\n")
    mine = tmp_path / "mine.yaml"
    mine.write_text("includes: [slurm-first-run, ./base.yaml]\ncluster: {mem: 4G}\n")
    composed = compose(str(mine), environ=standing)
    cluster = composed.config.cluster
    assert (cluster.mem, cluster.time, cluster.cpus_per_task) == ("4G", "40", 7)
    assert composed.origins["cluster.mem"] == f"{mine}:2"
    assert composed.origins["cluster.time"] == f"{tmp_path / 'base.yaml'}:1"


def test_a_preset_that_the_users_config_includes_is_the_users(standing: dict[str, str], tmp_path: Path) -> None:
    home = tmp_path / "home" / ".config" / "orch" / "config.yaml"
    home.write_text("includes: [cluster/slurm-a100-8]\n")
    assert compose("slurm-first-run", ["train.batch_size=32"], environ=standing).config.cluster.gpus_per_node == 8


def test_a_demo_is_the_same_everywhere(standing: dict[str, str], tmp_path: Path) -> None:
    home = tmp_path / "home" / ".config" / "orch" / "config.yaml"
    home.write_text("cluster: {nodes: 64, ranks_per_node: 8, kind: slurm, account: me}\ntrain: {steps: 9}\n")
    config = compose("demo", environ=standing, preset_wins=True).config
    assert (config.cluster.nodes, config.cluster.kind, config.train.steps) == (2, "local", 30)
    assert config.cluster.account == "me"
