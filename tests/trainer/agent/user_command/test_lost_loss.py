"""A data-parallel script whose loss becomes NaN: it starts again from a checkpoint before that."""

import json
import sys
from pathlib import Path

import pytest

from trainer.protocol.events import EventKind
from trainer.protocol.run_dir import AttemptDir

pytestmark = pytest.mark.multi

PROGRAM = """
import json, math, os, pathlib, time
import orch
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, resume = dist.get_rank(), os.environ.get("ORCH_RESUME_PATH", "")
model = torch.nn.Linear(4, 1)
ddp = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
step = 0
if resume:
    state = torch.load(resume)
    step = state["step"]
    model.load_state_dict(state["model"])
if not rank:
    with open("starts.jsonl", "a") as file:
        file.write(json.dumps([resume and os.path.basename(resume), bool(torch.isnan(model.weight).any())]) + "\\n")
while step < 60:
    step += 1
    bad = step == 25 and os.environ["ORCH_GENERATION"] == "1"
    loss = ddp(torch.full((2, 4), math.nan if bad else 1.0)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    orch.step(step, loss=float(loss))
    if step % 10 == 0 and not rank:
        torch.save({"model": model.state_dict(), "step": step}, f"out/step_{step}.pt")
    # After the loss is lost, there is enough time until the last step for orch to notice it.
    time.sleep(0.5 if torch.isnan(model.weight).any() else 0.01)
dist.barrier()
dist.destroy_process_group()
"""


def run(job, folder: Path, action: str):
    (folder / "train.py").write_text(PROGRAM)
    (folder / "out").mkdir()
    return job(
        nodes=1, ranks=2, command=[sys.executable, str(folder / "train.py")], watch={"action": action},
        checkpoints={"path": str(folder / "out"), "pattern": "step_*.pt"},
        env={"ORCH_SUBMIT_DIR": str(folder), "OMP_NUM_THREADS": "1"}, detection={"preflight": {"on": False}},
    ).ends(0, seconds=200.0)  # fmt: skip


def starts(folder: Path) -> list[list[object]]:
    return [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]


@pytest.mark.proof
def test_a_program_that_has_lost_its_loss_continues_from_before(job, tmp_path: Path) -> None:
    work = run(job, tmp_path, "restart")
    (incident,) = work.events(EventKind.INCIDENT)
    assert (incident.data["kind"], incident.data["step"], incident.data["rank"]) == ("numeric", 25, None)
    assert incident.data["reason"].startswith("the loss has been NaN or infinite since step 25, ")
    assert incident.data["reason"].endswith(" times in a row: ranks 0, 1")
    evidence = json.loads((work.run.path / incident.data["evidence"] / "verdict.json").read_text())
    assert [one["rank"] for one in evidence["ranks"]] == [0, 1]
    assert starts(tmp_path) == [["", False], ["step_20.pt", False]]
    ended = [event.data["failure"] for event in work.events(EventKind.GENERATION_ENDED)]
    assert [one and one["kind"] for one in ended] == ["numeric", None]
    attempt: AttemptDir = work.attempt
    assert attempt.outcome.exists()


@pytest.mark.proof
def test_an_observed_loss_is_only_reported(job, tmp_path: Path) -> None:
    work = run(job, tmp_path, "observe")
    (incident,) = work.events(EventKind.INCIDENT)
    assert (incident.data["kind"], incident.data["observed"]) == ("numeric", True)
    assert starts(tmp_path) == [["", False]]
