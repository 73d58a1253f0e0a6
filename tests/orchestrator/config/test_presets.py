"""Every shipped preset can be used, alone or with added data."""

from pathlib import Path

import pytest

from orchestrator import home
from orchestrator.config import yaml_text
from orchestrator.config.compose import compose
from orchestrator.errors import ConfigError
from trainer.protocol.config_sections.scheduler_kinds import AUTO

RUNNABLE = [name for name in yaml_text.names() if "/" not in name]
GROUPS = [name for name in yaml_text.names() if "/" in name]


@pytest.mark.parametrize("name", RUNNABLE)
def test_a_runnable_preset_composes(name: str) -> None:
    composed = compose(name, environ={"HOME": "/nowhere"})
    assert composed.config.cluster.world_size > 1


@pytest.mark.parametrize("name", RUNNABLE)
def test_no_preset_overrides_where_a_user_runs(name: str, tmp_path: Path) -> None:
    mine = tmp_path / "mine.yaml"
    mine.write_text("cluster: {root: /shared/ann/runs, partition: gpu, account: phys}\n")
    cluster = compose(name, environ={"HOME": "/nowhere", "ORCH_USER_CONFIG": str(mine)}).config.cluster
    assert (cluster.root, cluster.partition, cluster.account) == ("/shared/ann/runs", "gpu", "phys")


@pytest.mark.parametrize("name", GROUPS)
def test_a_group_composes_with_data(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")  # for cluster/local-gpu
    compose(name, ["data.text=[python-stdlib]", "train.batch_size=64"], environ={"HOME": "/nowhere"})


def test_the_demo_kills_a_rank_between_two_checkpoints_in_mid_run() -> None:
    config = compose("demo", environ={"HOME": "/nowhere"}).config
    (event,) = config.drill.events
    assert (event.kind, event.rank) == ("kill-rank", 1)
    assert config.checkpoint.every < event.step < config.train.steps
    assert event.step % config.checkpoint.every


def test_every_preset_speaks_to_a_newcomer() -> None:
    for name in yaml_text.names():
        first = (home.shipped_folder("configs") / f"{name}.yaml").read_text().splitlines()[0]
        assert first.startswith("# "), name


def test_a_wheel_carries_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed = tmp_path / "orchestrator" / "data" / "configs"
    packed.mkdir(parents=True)
    monkeypatch.setattr(home, "__file__", str(tmp_path / "orchestrator" / "home.py"))
    assert home.shipped_folder("configs") == packed
    assert home.shipped_folder("sbatch_templates") == tmp_path / "sbatch_templates"


def test_a_rank_starts_for_each_gpu_that_this_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    cluster = compose("cluster/local-gpu", ["data.text=[python-stdlib]"], environ={"HOME": "/nowhere"}).config.cluster
    assert (cluster.kind, cluster.ranks_per_node, cluster.gpus_per_node) == ("local", 2, 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="this machine has no GPU: CUDA_VISIBLE_DEVICES=") as caught:
        compose("cluster/local-gpu", environ={"HOME": "/nowhere"})
    assert "docker run --gpus all" in caught.value.hint


def test_a_preset_for_a_command_uses_slurm_where_there_is_one() -> None:
    """A training script must not start on a login node."""
    for name in RUNNABLE:
        config = compose(name, environ={"HOME": "/nowhere"}).config
        if config.command:
            assert config.cluster.kind == AUTO, name
