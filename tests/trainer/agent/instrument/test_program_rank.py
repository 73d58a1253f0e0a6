"""The start-up module in real programs: steps, phases, process groups, children, and other start-up modules."""

import json
import os
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trainer.agent.instrument import ddp_program
from tests.trainer.agent.instrument.instrumented import STARTUP, Instrumented, instrumented
from trainer.agent.instrument import cell_writer
from trainer.protocol.rank_progress.progress import Phase, ProgressCell

STEPS = ddp_program.EPOCHS * ddp_program.SAMPLES // (2 * ddp_program.BATCH)
STEP = """
import torch
weight = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
def step():
    weight.sum().backward()
    optimizer.step()
"""


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Instrumented]:
    with instrumented(tmp_path) as made:
        yield made


def run_text(program: Instrumented, text: str, *options: str, ranks: int = 1, **variables: str) -> str:
    """Run a program of this text, and return the output of rank 0."""
    done = program.run(*options, "-c", textwrap.dedent(text), ranks=ranks, **variables)
    assert [one.returncode for one in done] == [0] * ranks, done[0].stderr
    return done[0].stdout


def read_step(program: Instrumented, rank: int = 0) -> int:
    reading = program.cells[rank].read()
    assert reading is not None
    return reading.step


@pytest.mark.parametrize("workers", ["0", "2"])
def test_an_unchanged_data_parallel_script_reports_its_steps_and_phases(program: Instrumented, workers: str) -> None:
    done = program.run("-W", "ignore", str(ddp_program.__file__), WORKERS=workers)
    assert [(one.returncode, one.stdout) for one in done] == [(0, "trained\n")] * 2, done[0].stderr
    for rank, cell in enumerate(program.cells):
        reading = cell.read()
        assert reading is not None
        assert (reading.step, reading.generation, program.error(rank)) == (STEPS, 3, "")
        assert {Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER} <= set(cell.times())
        assert program.frameworks(rank).startswith("torch,")
        assert cell.last_tick_ns() > 0


def test_groups_are_listed_for_flight_records(program: Instrumented, tmp_path: Path) -> None:
    done = program.run("-W", "ignore", str(ddp_program.__file__))
    assert [one.returncode for one in done] == [0, 0], done[0].stderr
    groups = json.loads((tmp_path / "flight-1.groups").read_text())
    assert [0, 1, 1] in [runs for group in groups.values() for runs in group["runs"]]


def test_a_program_that_alternates_optimizers_counts_those_that_step_most_often(program: Instrumented) -> None:
    text = (
        STEP
        + """
other = torch.optim.SGD([weight], lr=0.1)
for number in range(12):
    step()
    if number % 3 == 0:
        other.step()
"""
    )
    run_text(program, text)
    assert read_step(program) == 12


def test_a_restored_optimizer_continues_its_count(program: Instrumented) -> None:
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
"""
    run_text(program, text)
    assert read_step(program) == 71


def test_forks_and_other_interpreters_of_a_program_report_nothing(program: Instrumented) -> None:
    text = (
        STEP
        + """
import os, subprocess, sys
step()
child = os.fork()
if not child:
    for _ in range(5):
        step()
    os._exit(0)
os.waitpid(child, 0)
assert subprocess.run([sys.executable, "-c", sys.argv[1]]).returncode == 0
"""
    )
    child = STEP + "import sys\nsys.argv\nfor _ in range(9):\n    step()\n"
    done = program.run("-c", textwrap.dedent(text), child, ranks=1)
    assert done[0].returncode == 0, done[0].stderr
    assert read_step(program) == 1


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
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        program.environment.pop(name, None)
    done = program.run("-W", "ignore", str(script), ranks=1, LOCAL_RANK="", RANK="", WORLD_SIZE="")
    assert done[0].returncode == 0, done[0].stderr
    assert [read_step(program, rank) for rank in range(2)] == [4, 5]


def test_the_programs_own_start_up_module_runs_and_its_errors_are_as_without_orch(
    program: Instrumented, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.STARTED = __file__\n1 / 0\n")
    path = os.pathsep.join([str(STARTUP), str(tmp_path)])
    (done,) = program.run("-c", f"{STEP}\nstep()\nprint(STARTED)", ranks=1, PYTHONPATH=path)
    assert done.stdout.strip() == str(tmp_path / "sitecustomize.py")
    assert "ZeroDivisionError" in done.stderr
    assert read_step(program) == 1


def test_a_program_without_torch_starts_nothing(program: Instrumented) -> None:
    shown = run_text(program, "import sys\nprint([name for name in sys.modules if name.startswith('orch')])")
    assert shown.strip() == "['orch_import_hook']"
    assert program.cells[0].read() is None or read_step(program) == 0


def test_an_internal_error_disables_the_module_and_is_reported(program: Instrumented) -> None:
    text = (
        STEP
        + """
import sys
step()
sys.modules["orch_program_rank"].current()._cell.enter = None
step()
step()
print("trained")
"""
    )
    assert run_text(program, text) == "trained\n"
    assert program.error(0).startswith("TypeError: ")


def test_an_error_that_a_signal_handler_raises_reaches_the_program(program: Instrumented) -> None:
    text = (
        STEP
        + """
import signal, sys
def interrupt(*_):
    raise TimeoutError("the program's own")
signal.signal(signal.SIGUSR1, interrupt)
step()
rank = sys.modules["orch_program_rank"].current()
enter = rank._cell.enter
rank._cell.enter = lambda *words: (signal.raise_signal(signal.SIGUSR1), enter(*words))
try:
    step()
except TimeoutError:
    print("raised")
"""
    )
    assert run_text(program, text) == "raised\n"
    assert program.error(0) == ""


@pytest.mark.parametrize("options", [("-S",), ("-I",), ("-E",)], ids=str)
def test_an_interpreter_that_ignores_start_up_modules_runs_as_without_orch(
    program: Instrumented, options: tuple[str, ...]
) -> None:
    places = [entry for entry in sys.path if "site-packages" in entry]
    text = f"import sys\nsys.path += {places!r}\n{STEP}\nstep()\nprint('trained')"
    assert run_text(program, text, *options) == "trained\n"
    assert program.frameworks(0) == ""


def test_writer_and_reader_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = ProgressCell.create(), ProgressCell.create()
    writer = cell_writer.CellWriter(f"/proc/self/fd/{ours.descriptor}")
    for name, cell in (("ours", writer), ("theirs", theirs)):
        ticks = iter(range(5_000_000_000, 9_000_000_000, 70_000_000))
        monkeypatch.setattr("time.monotonic_ns", lambda ticks=ticks: next(ticks))
        if name == "ours":
            writer.claim(os.getpid(), 0)
        cell.update(generation=3, phase=cell_writer.PHASES["init"])
        cell.update(step=7, restored_step=6, loss=1.5, saved_step=4, total_steps=90, step_seconds=0.25)
        if name == "ours":
            writer.warm = True
        else:
            theirs.start_timing()
        for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.CHECKPOINT, Phase.EVAL):
            cell.enter(phase)
        cell.tick()
    assert ours._map[:3072] == theirs._map[:3072]
    ours.ask_stop(3, 12.5)  # type: ignore[arg-type]
    assert writer.read_stop_request() == (3, 12.5)
    assert [cell_writer.PHASES[phase.name.lower()] for phase in Phase] == list(Phase)
