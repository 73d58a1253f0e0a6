"""Programs as people write them, with a torn newest checkpoint: plain DDP, Accelerate, DeepSpeed's layout."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.agent.fork_server.launch_order import free_port
from trainer.protocol.events import EventKind

pytestmark = [pytest.mark.multi, pytest.mark.proof, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[3]

DDP = """
import os, re, sys
import torch, torch.distributed as dist
folder = sys.argv[1]
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
steps = [int(re.findall(r"[0-9]+", name)[-1]) for name in os.listdir(folder) if name.startswith("step_")]
start = 0
if steps:
    state = torch.load(os.path.join(folder, f"step_{max(steps)}.pt"), weights_only=False)
    model.module.load_state_dict(state["model"]); start = state["step"]
print("from step", start, flush=True)
for step in range(start + 1, 9):
    model(torch.ones(2, 64)).sum().backward()
    if dist.get_rank() == 0:
        torch.save({"model": model.module.state_dict(), "step": step}, os.path.join(folder, f"step_{step}.pt"))
    dist.barrier()
"""

ACCELERATE = """
import os, sys
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
folder = sys.argv[1]
accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(folder, automatic_checkpoint_naming=True))
model = torch.nn.Linear(64, 64)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
kept = os.path.join(folder, "checkpoints")
start = 0
if os.path.isdir(kept) and os.listdir(kept):
    accelerator.load_state()
    start = int(optimizer.state_dict()["state"][0]["step"]) if optimizer.state_dict()["state"] else 0
    accelerator.project_configuration.iteration = start
print("from step", start, flush=True)
for step in range(start + 1, 9):
    optimizer.zero_grad(); accelerator.backward(model(torch.ones(2, 64)).sum()); optimizer.step()
    accelerator.save_state()
"""

DEEPSPEED = """
import os, sys, time
import torch
folder = sys.argv[1]
rank = os.environ["RANK"]
latest, start = os.path.join(folder, "latest"), 0
if os.path.isfile(latest):
    with open(latest) as file:
        tag = file.read().strip()
    state = torch.load(os.path.join(folder, tag, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"), weights_only=False)
    start = state["step"]
print("from step", start, flush=True)
for step in range(start + 1, 9):
    tag = f"global_step{step}"
    os.makedirs(os.path.join(folder, tag), exist_ok=True)
    state = {"step": step, "optimizer": torch.ones(999)}
    torch.save(state, os.path.join(folder, tag, f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
    if rank == "0":  # a barrier stands before this in DeepSpeed: each rank has its file
        while not os.path.exists(os.path.join(folder, tag, "zero_pp_rank_1_mp_rank_00_optim_states.pt")):
            time.sleep(0.02)
        with open(latest, "w") as file:
            file.write(tag)
"""

LAYOUTS = {
    "ddp": (DDP, ".", "step_*.pt", "step_8.pt", "step_8.pt"),
    "accelerate": (ACCELERATE, "checkpoints", "checkpoint_*", "checkpoint_7", "model.safetensors"),
    "deepspeed": (DEEPSPEED, ".", "global_step*", "global_step8", "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
}


@pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_torn_newest_checkpoint_costs_one_step(job, tmp_path, name, share):
    program, below, pattern, newest, torn = LAYOUTS[name]
    out, ranks = tmp_path / "work" / "out", 1 if name == "accelerate" else 2
    out.mkdir(parents=True)
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, str(tmp_path / "program.py"), str(out)]
    interop = {"PYTHONPATH": str(ROOT / ".venv" / "interop")} if name == "accelerate" else {}
    for rank in reversed(range(ranks)):  # rank 0 says last which one is the newest
        alone = {
            "RANK": str(rank),
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port("127.0.0.1")),
        }
        alone |= {"RANK": "0"} if name == "ddp" else {}
        subprocess.run(command, check=True, env={**os.environ, **alone, **interop}, capture_output=True)
    file = out / below / newest
    file = file / torn if file.is_dir() else file
    os.truncate(file, int(file.stat().st_size * share))
    kept = {"path": str(out / below), "pattern": pattern}
    work = job(nodes=1, ranks=ranks, command=command, checkpoints=kept, env=interop).ends(0, seconds=180)
    (aside,) = work.events(EventKind.CHECKPOINT_SET_ASIDE)
    assert aside.data["damaged"]
    lines = work.attempt.rank_log(0).read_text().splitlines()
    assert [line for line in lines if line.startswith("from step")][-1] == "from step 7"
    assert file.exists(), "it was saved anew"
    assert file.stat().st_size > 0
