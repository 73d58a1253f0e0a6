"""A framework that saves rank 0's part of an adapter only (accelerate issue 4206): the restore test reports it."""

from pathlib import Path

import pytest

from tests.end_to_end.user import User

pytestmark = [pytest.mark.multi, pytest.mark.timeout(600)]

# Each rank's slice of the adapter is filled with its rank. The faulty program saves rank 0's slice for all ranks.
TRAIN = """
import os, pathlib, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, faulty, tests = dist.get_rank(), sys.argv[1] == "faulty", "ORCH_CHECKPOINT" in os.environ
adapter = torch.nn.Parameter(torch.full((8,), float(rank)))
optimizer = torch.optim.SGD([adapter], lr=0.0)
place = os.environ.get("ORCH_RESUME_PATH")
if place:
    adapter.data.copy_(torch.load(os.path.join(place, f"adapter-rank{rank}.pt")))
for _ in range(3):
    adapter.sum().backward()
    optimizer.step()
    dist.barrier()
if not tests:
    folder = pathlib.Path("out/step-3")
    folder.mkdir(parents=True, exist_ok=True)
    parts = [torch.empty(8) for _ in range(2)]
    dist.all_gather(parts, adapter.data)
    torch.save(parts[0 if faulty else rank], folder / f"adapter-rank{rank}.pt")
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("kind", "code"), [("faulty", 7), pytest.param("whole", 0, marks=pytest.mark.proof)], ids=["faulty", "whole"]
)
def test_a_rank_whose_part_was_lost_makes_a_checkpoint_suspect(tmp_path: Path, kind: str, code: int) -> None:
    user = User(tmp_path, "local")
    (tmp_path / "train.py").write_text(TRAIN)
    command = f"[python, train.py, {kind}]"
    settings = ["checkpoints.path=out", "checkpoints.pattern=step-*", "cluster.nodes=1", "cluster.ranks_per_node=2"]
    try:
        run = user.submit("torchrun-script", f"command={command}", f"restore_tests.command={command}", *settings)["run"]
        assert user.wait(run) == 0
        user.until(lambda: user.ask("ckpt", "ls", run), 60, "its checkpoint")
        done = user.run("ckpt", "restore-test", run, "--wait")
        assert done.returncode == code, done.stdout + done.stderr
        expected = "the parameters of rank 1 differ" if code else "all 2 ranks that saved have the parameters of step-3"
        assert expected in " ".join(done.stdout.split()), done.stdout
    finally:
        user.leave()
