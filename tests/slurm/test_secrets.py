"""Secrets on the real Slurm: every node has them; sbatch's command line and Slurm's own files do not."""

import pytest

from tests.end_to_end.canaries import FILE, SHELL, command_lines_watched, find_leaking_files
from tests.end_to_end.user import User
from tests.slurm.lab import SlurmLab

pytestmark = [pytest.mark.slurm, pytest.mark.proof, pytest.mark.timeout(500)]
SHAPE = [
    "cluster.nodes=2", "cluster.ranks_per_node=1", "cluster.cpus_per_task=1", "cluster.partition=low",
    "cluster.time=10", "recovery.backoff=0.5",
]  # fmt: skip


def test_every_node_has_them_and_slurm_has_not(lab: SlurmLab, user: User) -> None:
    tokens = user.folder / "tokens"
    tokens.write_text(f"WANDB_API_KEY={FILE}\n")
    tokens.chmod(0o600)
    user.environment |= {"HF_TOKEN": SHELL}
    look = "command=[sh,-c,'echo $RANK $HF_TOKEN $WANDB_API_KEY']"
    with command_lines_watched() as lines:
        run = user.submit("torchrun-script", look, *SHAPE, "env_from=[HF_TOKEN]", f"secrets_file={tokens}")
        assert user.wait(run["run"]) == 0
    assert lines == set()
    for rank in (0, 1):
        log = user.run_dir(run["run"]).attempt(1).rank_log(rank).read_text()
        assert f"{rank} ***HF_TOKEN*** ***WANDB_API_KEY***" in log
    assert set(find_leaking_files(user.folder)) == {f"runs/{run['run']}/secrets.json", "tokens"}
    assert find_leaking_files(lab.folder) == {}, "the states and logs of Slurm's daemons"
