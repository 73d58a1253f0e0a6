"""A rank killed by the real kernel's OOM killer: its failure kind, the remedy, and the restart in place."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.user import User
from tests.trainer.agent.processes.test_proc import cgroup_of

pytestmark = [pytest.mark.multi, pytest.mark.proof, pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[2]


def test_out_of_memory_kills_are_distinguished(user: User) -> None:
    words = [
        "submit", "tiny-gpt", "cluster.kind=local", f"cluster.root={user.root}", "cluster.nodes=1",
        "cluster.ranks_per_node=2", "train.steps=40", "train.dtype=float32", "checkpoint.every=5",
        "workload.target=tests.end_to_end.hungry_workload:Hungry", f"workload.path=[{ROOT}]",
        "+workload.args.width=8", f"+workload.args.taken={user.folder / 'taken'}", "parallel.tp=1", "--follow",
    ]  # fmt: skip
    with cgroup_of(2 << 30) as cgroup:
        done = subprocess.run(
            ["sh", "-c", f'echo $$ > {cgroup}/cgroup.procs; exec "$@"', "sh",
             sys.executable, "-P", "-m", "orchestrator.cli.main", *words],
            env=user.environment, cwd=user.folder, capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        run = user.ask("status")[0]["run"]
        user.leave()
        user.until(lambda: not (cgroup / "cgroup.procs").read_text().split(), 30, "an empty cgroup")
    (attempt,) = user.show(run)["attempts"]
    first = attempt["generation_list"][0]["failure"]
    assert (first["kind"], first["rank"], first["signal"]) == ("out_of_memory", 1, signal.SIGKILL)
    assert "ran out of memory: the kernel killed it; the limit of its cgroup is 2.0 GiB" in first["reason"]
    assert "give the job more (cluster.mem), or use less" in first["reason"]
    assert "rank 1 on local-0 ended: out of memory: the kernel killed it" in done.stderr
    assert os.path.exists(user.folder / "taken")
