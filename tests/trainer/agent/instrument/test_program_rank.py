"""The start-up module in real programs: steps, phases, process groups and ranks."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.agent.instrument import ddp_program
from tests.trainer.agent.instrument.instrumented import STEP, ForkServer, Instrumented, instrumented
from trainer.protocol.messages.ranks import STACKS
from trainer.protocol.rank_progress.progress import Phase

STEPS = ddp_program.EPOCHS * ddp_program.SAMPLES // (2 * ddp_program.BATCH)
_PHASES = "from orch_program_rank import current\nphase = lambda: current().phase()\n"


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Instrumented]:
    with instrumented(tmp_path) as made:
        yield made


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    made = ForkServer()
    yield made
    made.close()


def test_an_unchanged_data_parallel_script_reports_its_steps_and_phases(program: Instrumented) -> None:
    done = program.run("-W", "ignore", str(ddp_program.__file__), WORKERS="2")
    assert [(one.returncode, one.stdout) for one in done] == [(0, "trained\n")] * 2, done[0].stderr
    for rank, cell in enumerate(program.cells):
        reading, record = program.reading(rank), program.record(rank)
        assert (reading.step, reading.generation, record.error) == (STEPS, 3, "")
        assert (record.rank, record.frameworks) == (rank, ("torch", "plain", "torch.distributed"))
        assert {Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER} <= set(cell.times())
        assert reading.collective > 0
        assert cell.last_tick_ns() > 0
        assert cell.work().steps == STEPS - (STEPS - 1) % 8  # the last step that was timed
    groups = json.loads((program.folder / "flight-1.groups").read_text())
    assert [0, 1, 1] in [runs for group in groups.values() for runs in group["runs"]]


def test_ranks_that_a_program_spawns_claim_their_own_cells(program: Instrumented, tmp_path: Path) -> None:
    script = tmp_path / "spawns.py"
    script.write_text(
        STEP
        + """
import torch.distributed as dist
import torch.multiprocessing
def train(rank):
    dist.init_process_group("gloo", init_method="env://", rank=rank, world_size=2)
    for _ in range(4 + rank):
        step()
    dist.barrier()
if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=2)
"""
    )
    (done,) = program.run("-W", "ignore", str(script), ranks=1, LOCAL_RANK="", RANK="", WORLD_SIZE="")
    assert done.returncode == 0, done.stderr
    assert [(program.reading(rank).step, program.record(rank).rank) for rank in range(2)] == [(4, 0), (5, 1)]


def test_the_optimizer_that_steps_most_often_counts(program: Instrumented, server: ForkServer) -> None:
    text = (
        STEP
        + """
other = torch.optim.SGD([weight], lr=0.1)
for number in range(12):
    step()
    if number % 3 == 0:
        step(other)
"""
    )
    program.run_text(server, text)
    assert program.reading().step == 12


def test_an_optimizer_that_replaces_another_continues_its_count(program: Instrumented, server: ForkServer) -> None:
    text = (
        STEP
        + """
for epoch in range(3):
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(4):
        step(optimizer)
"""
    )
    program.run_text(server, text)
    assert program.reading().step == 12


def test_a_restored_optimizer_continues_its_count(program: Instrumented, server: ForkServer) -> None:
    text = """
import torch
weight = torch.zeros(1, requires_grad=True)
first, second = (torch.optim.Adam([weight], lr=0.1) for _ in range(2))
weight.sum().backward()
first.step()
state = first.state_dict()
state["state"][0]["step"] = torch.tensor(70.0)
second.load_state_dict(state)
second.step()
second.step()
"""
    program.run_text(server, text)
    assert program.reading().step == 72


def test_a_program_that_counts_its_steps_overrides_the_optimizers(program: Instrumented, server: ForkServer) -> None:
    text = (
        STEP
        + """
from orch_program_rank import current
for number in range(500, 505):
    step(), step()
    current().step(number=number, loss=0.5, total=900)
"""
    )
    program.run_text(server, text)
    found = program.reading()
    assert (found.step, found.restored_step, found.loss, found.total_steps) == (504, 499, 0.5, 900)


def test_phases_of_a_program(program: Instrumented, server: ForkServer) -> None:
    text = (
        STEP
        + _PHASES
        + """
model = torch.nn.Linear(1, 1)
frozen = torch.nn.Linear(1, 1).requires_grad_(False)
model.eval(), model.train()
seen = [phase()]
step()
class Data(torch.utils.data.IterableDataset):
    def __iter__(self):
        seen.append(phase())
        yield 1
batches = list(torch.utils.data.DataLoader(Data()))
seen.append(phase())
frozen.eval()
seen.append(phase())
weight.register_hook(lambda gradient: seen.append(phase()))
model.eval()
seen.append(phase())
batches = list(torch.utils.data.DataLoader(Data()))
model.train()
seen.append(phase())
step()
model.eval()
seen.append(phase())
step()
seen.append(phase())
print(seen)
"""
    )
    shown = program.run_text(server, text)
    names = [Phase(number).name.lower() for number in json.loads(shown)]
    before = ["init", "data", "forward", "forward", "eval", "eval", "forward"]
    assert names == [*before, "backward", "eval", "backward", "forward"]


def test_compilations_are_a_phase(program: Instrumented, server: ForkServer) -> None:
    text = (
        STEP
        + _PHASES
        + """
def backend(graph, inputs):
    print(phase())
    return graph.forward
step()
torch.compile(lambda x: x + 1, backend=backend)(weight)
print(phase())
"""
    )
    assert program.run_text(server, text).split() == [str(int(Phase.COMPILE)), str(int(Phase.FORWARD))]


def test_a_compiled_optimizer_compiles_as_without_orch(program: Instrumented, server: ForkServer) -> None:
    text = (
        STEP
        + """
graphs = []
step_optimizer = torch.compile(lambda: optimizer.step(), backend=lambda graph, inputs: graphs.append(1) or graph)
for _ in range(3):
    weight.sum().backward()
    step_optimizer()
print(len(graphs), weight.item())
"""
    )
    shown = [program.run_text(server, text, ORCH_INSTRUMENT=mode) for mode in ("auto", "off")]
    assert shown[0] == shown[1]
    assert program.record().error == ""


def test_a_fork_reports_nothing(program: Instrumented, server: ForkServer) -> None:
    text = (
        STEP
        + """
import os
step()
child = os.fork()
if not child:
    for _ in range(5):
        step()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    )
    program.run_text(server, text)
    assert program.reading().step == 1


def test_a_rank_that_trains_takes_its_cell_back_from_a_child(program: Instrumented, server: ForkServer) -> None:
    text = (
        STEP
        + """
import os
if not os.fork():
    step()
    os._exit(0)
os.wait()
for _ in range(3):
    step()
"""
    )
    program.run_text(server, text)
    assert program.reading().step == 3


def test_stacks_are_dumped_on_the_agents_signal(program: Instrumented, server: ForkServer) -> None:
    text = (
        STEP
        + """
import os, signal, time
def wait_in_a_loop():
    os.kill(os.getpid(), signal.SIGRTMIN + 6)
wait_in_a_loop()
"""
    )
    assert signal.SIGRTMIN + 6 == STACKS
    program.run_text(server, text)
    assert b"in wait_in_a_loop" in os.pread(program.stacks[0], 10_000, 0)


def test_a_save_is_listed(program: Instrumented, server: ForkServer) -> None:
    text = (
        STEP
        + """
from orch_program_rank import current
step()
current().saved(7, "out/step-7.pt")
current().save_failed(8, "/out/step-8.pt", "disk full")
print(current().stop_request())
"""
    )
    assert program.run_text(server, text) == "(0, 0.0)\n"
    assert program.reading().saved_step == 7
    rows = [json.loads(line) for line in (program.folder / "saves.jsonl").read_text().splitlines()]
    assert [(row["rank"], row["generation"], row["step"], row["failed"]) for row in rows] == [
        (0, 3, 7, ""), (0, 3, 8, "disk full"),
    ]  # fmt: skip
    assert rows[0]["path"] == os.path.join(os.getcwd(), "out/step-7.pt")


def test_files_of_torch_save_are_listed_under_their_last_names(program: Instrumented, server: ForkServer) -> None:
    text = """
import os, torch
from pathlib import Path
torch.save({"layer.weight": 0}, "step_1.pt")
torch.save({"layer.weight": 0}, "step_2.pt.new")
os.replace("step_2.pt.new", "step_2.pt")
torch.save({"layer.weight": 0}, "step_3.tmp")
Path("step_3.tmp").rename("step_3.pt")
os.mkdir("tmp")
torch.save({"layer.weight": 0}, "tmp/model.pt")
os.rename("tmp", "step_4")
torch.save({"layer.weight": 0}, open("step_5.pt", "wb"))
os.rename("step_5.pt", "step_6.pt")
"""
    program.run_text(server, f"import os; os.chdir({str(program.folder)!r})\n{text}")
    rows = [json.loads(line) for line in (program.folder / "saves.jsonl").read_text().splitlines()]
    listed = [(row["step"], str(Path(row["path"]).relative_to(program.folder))) for row in rows]
    finals = [(1, "step_1.pt"), (2, "step_2.pt"), (3, "step_3.pt"), (-1, "step_4/model.pt")]
    assert listed == [finals[0], (2, "step_2.pt.new"), *finals[1:]]


def test_data_that_is_written_with_torch_save_is_no_checkpoint(program: Instrumented, server: ForkServer) -> None:
    text = """
import torch
layer = torch.nn.Linear(2, 1)
torch.save({"observations": torch.zeros(2), "steps": [1, 2]}, "rollout_iter_1.pt")
torch.save([torch.zeros(2)], "preds_epoch_2.pt")
torch.save({"rewards": torch.zeros(2)}, "ckpt_3.pt")
torch.save(layer, "model_4.pt")
torch.save(layer.state_dict(), "model_5.pt")
torch.save({"epoch": 1, "nets": [{name: value.clone() for name, value in layer.state_dict().items()}]}, "step_6.pt")
torch.save({"a": {"b": torch.optim.SGD(layer.parameters(), 0.1).state_dict()}}, "step_7.pt")
torch.save({"module.weight": torch.zeros(2)}, "step_8.pt")
"""
    program.run_text(server, f"import os; os.chdir({str(program.folder)!r})\n{text}")
    rows = [json.loads(line) for line in (program.folder / "saves.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if not row["is_data"]] == [3, 4, 5, 7, 8], "6 has no names of parameters"
    assert [row["step"] for row in rows if row["is_data"]] == [1, 2, 6]
