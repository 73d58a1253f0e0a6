"""A real Slurm with a topology: nodes under one switch have neighbouring ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.user import User
from tests.slurm.lab import SlurmLab, temporary_lab
from trainer.protocol.rank_readings import RankReadings

pytestmark = [pytest.mark.slurm, pytest.mark.proof, pytest.mark.multi, pytest.mark.timeout(400)]
INTERLEAVED = "SwitchName=s1 Nodes=n1,n3\nSwitchName=s2 Nodes=n2,n4\nSwitchName=top Switches=s1,s2\n"
SMALL = [
    "cluster.nodes=4", "cluster.ranks_per_node=1", "cluster.cpus_per_task=1", "cluster.partition=low",
    "cluster.time=10", "parallel.tp=1", "parallel.dp_replicate=2", "parallel.dp_shard=2", "recovery.backoff=0.5",
    "model.layers=1", "train.seq_len=32", "train.batch_size=8", "train.steps=10", "checkpoint.every=0",
    "+cluster.sbatch.switches=2@1:00",
]  # fmt: skip


@pytest.fixture
def tree(suite: str) -> Iterator[SlurmLab]:
    def connect(lab: SlurmLab) -> None:
        (lab.folder / "topology.conf").write_text(INTERLEAVED)

    with temporary_lab(suite, connect, extra="TopologyPlugin=topology/tree\n") as made:
        yield made


def test_shard_groups_are_under_one_switch_each(tree: SlurmLab, tmp_path: Path) -> None:
    user = User(tmp_path, "slurm", tree.environment())
    try:
        run = user.submit("tiny-gpt", *SMALL)["run"]
        script = tree.ask("scontrol", "show", "job", user.status(run)["job_id"]).stdout
        assert user.wait(run) == 0
    finally:
        user.leave()
    assert "Switches=2@00:01:00" in script
    ranks = RankReadings.read(user.run_dir(run).attempt(1).ranks).ranks
    assert {one.rank: one.node for one in ranks} == {0: "n1", 1: "n3", 2: "n2", 3: "n4"}
