"""Commands that start their own ranks: each node starts one, and its ranks are found, watched, blamed and restarted."""

import sys
from pathlib import Path

import pytest

from tests.end_to_end.user import User

pytestmark = [pytest.mark.multi, pytest.mark.timeout(600)]

TRAIN = """
import os, sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

def train(folder, steps):
    rank = dist.get_rank()
    print("rank", rank, "of", dist.get_world_size(), flush=True)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step, path = 0, os.path.join(folder, "last.pt")
    if os.path.exists(path):
        saved = torch.load(path)
        step = saved["step"]
        model.load_state_dict(saved["model"])
    while step < steps:
        model(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if os.path.exists(os.path.join(folder, "slow")):
            time.sleep(0.2)
        if step % 20 == 0 and rank == 0:
            torch.save({"step": step, "model": model.state_dict()}, path + ".new")
            os.replace(path + ".new", path)
        dist.barrier()
    dist.destroy_process_group()
"""
BY_TORCHRUN = f"""{TRAIN}
dist.init_process_group("gloo")
train(sys.argv[1], int(sys.argv[2]))
"""
BY_SPAWN = f"""{TRAIN}
import torch.multiprocessing as mp

def main(rank, store, folder, steps):
    dist.init_process_group("gloo", init_method=f"file://{{store}}", rank=rank, world_size=2)
    train(folder, steps)

if __name__ == "__main__":
    import tempfile
    with tempfile.TemporaryDirectory() as shared:
        mp.spawn(main, args=(shared + "/store", sys.argv[1], int(sys.argv[2])), nprocs=2)
"""
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def submit(user: User, text: str, launcher: list[str], *, nodes: int) -> str:
    """Submit a program with two ranks whose steps are slow as long as a file exists."""
    script, folder = user.folder / "train.py", user.folder / "saves"
    script.write_text(text)
    folder.mkdir()
    (folder / "slow").touch()
    words = ", ".join(f"'{word}'" for word in [*launcher, str(script), str(folder), "120"])
    shape = [f"cluster.nodes={nodes}", f"cluster.ranks_per_node={2 // nodes}"]
    return str(user.submit("torchrun-script", f"command=[{words}]", *shape, "recovery.backoff=0.2")["run"])


def wait_for_save(folder: Path, user: User) -> None:
    user.until((folder / "last.pt").exists, 120, "a checkpoint of the program", every=0.05)


def finish(user: User, run: str) -> dict[str, object]:
    (user.folder / "saves" / "slow").unlink()
    assert user.wait(run, 300) == 0
    return dict(user.show(run))


def test_a_rank_of_torchrun_that_is_killed_is_blamed_and_starts_again(user: User) -> None:
    run = submit(user, BY_TORCHRUN, TORCHRUN, nodes=1)
    wait_for_save(user.folder / "saves", user)
    drill = user.ask("drill", run, "kill-rank", "--rank", "1")
    assert (drill["culprit_right"], drill["failure"]) == (True, "rank_killed"), drill
    shown = finish(user, run)
    (attempt,) = shown["attempts"]
    assert attempt["generations"] == 2
    log = user.run("logs", run, "--rank", "1").stdout
    assert "rank 0 of 2" in log
    assert "rank 1 of 2" in log


@pytest.mark.proof
@pytest.mark.parametrize(
    ("text", "launcher", "nodes"),
    [(BY_TORCHRUN, TORCHRUN, 2), (BY_SPAWN, [sys.executable], 1), (BY_TORCHRUN, TORCHRUN, 1)],
    ids=["torchrun on two nodes", "spawn", "torchrun"],
)
@pytest.mark.parametrize("fault", ["kill-rank", "stop-rank"])
def test_each_launcher_and_fault(user: User, text: str, launcher: list[str], nodes: int, fault: str) -> None:
    run = submit(user, text, launcher, nodes=nodes)
    wait_for_save(user.folder / "saves", user)
    drill = user.ask("drill", run, fault, "--rank", "1")
    failure = "hang" if fault == "stop-rank" else "rank_killed"
    assert (drill["culprit_right"], drill["failure"]) == (True, failure), drill
    finish(user, run)
