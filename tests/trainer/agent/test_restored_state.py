"""Programs whose ranks restore all that they saved, or only what rank 0 saved (as in accelerate issue 4206)."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.trainer.agent.job import LocalJob
from trainer.agent.instrument import program_rank, restored_state
from trainer.agent.instrument.cell_writer import CellWriter
from trainer.agent.user_command.program_saves import ProgramSave
from trainer.agent.user_command.restored_states import RestoredRanks, find_states
from trainer.protocol.events import EventKind
from trainer.protocol.rank_progress.progress import ProgressCell

# Every rank has a slice of its own, and saves it. The faulty program restores rank 0's slice on all ranks.
PROGRAM = """
import os, pathlib, sys, torch, torch.distributed as dist
out, faulty = pathlib.Path(sys.argv[1]), sys.argv[2] == "faulty"
dist.init_process_group("gloo")
rank = dist.get_rank()
adapter = torch.nn.Parameter(torch.full((4,), float(rank)))
frozen = torch.nn.Parameter(torch.randn(4), requires_grad=False)
optimizer = torch.optim.SGD([adapter, frozen], lr=0.0)
place = os.environ.get("ORCH_RESUME_PATH")
if place:
    saved = torch.load(os.path.join(place, f"adapter-rank{0 if faulty else rank}.pt"))
    adapter.data.copy_(saved["adapter"])
    frozen.data.copy_(saved["frozen"])
for step in range(1, 4):
    loss = (adapter * adapter).sum()
    loss.backward()
    optimizer.step()
    dist.barrier()
if not place:
    folder = out / "step-3"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({"adapter": adapter.data, "frozen": frozen.data}, folder / f"adapter-rank{rank}.pt")
    dist.barrier()
    sys.exit(3)
import time
events = pathlib.Path(os.environ["ORCH_RUN_DIR"], "attempts", "001", "events")
while not any("program.restored" in path.read_text() for path in events.glob("*.jsonl")):
    time.sleep(0.05)
dist.barrier()
"""


@pytest.mark.multi
@pytest.mark.parametrize("kind", ["faulty", "whole"])
def test_ranks_that_restore_other_parameters_than_they_saved_are_named(
    job: Callable[..., LocalJob], tmp_path: Path, kind: str
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    out = tmp_path / "out"
    work = job(
        nodes=2, ranks=1, recovery={"backoff": 0.1}, checkpoints={"path": str(out), "pattern": "step-*"},
        env={"ORCH_SUBMIT_DIR": str(tmp_path)},
        command=[sys.executable, str(tmp_path / "train.py"), str(out), kind],
    )  # fmt: skip
    work.ends(0, 0, seconds=180)
    (event,) = work.events(EventKind.PROGRAM_RESTORED)
    assert (event.data["agree"], event.data["differ"]) == (([0], [1]) if kind == "faulty" else ([0, 1], []))
    assert event.data["path"] == str(out / "step-3")
    expected = "parameters of rank 1 differ from those saved in step-3; 1 other rank" if kind == "faulty" else "bit for"
    assert expected in event.data["reason"]


def test_only_the_newest_save_of_the_same_number_of_ranks_is_compared() -> None:
    def save(rank: int, state: str, path: str = "/c/step-3") -> ProgramSave:
        return ProgramSave(step=3, path=path, rank=rank, state=state)

    saves = [save(0, "2:old"), save(0, "2:new"), save(1, "2:b"), save(1, "2:c", "/c/step-30"), save(0, "4:d")]
    assert find_states(saves, "/c/step-3", 2) == ("new", "b")
    assert find_states(saves, "/c/step-3", 4) == ("d", "", "", "")
    assert find_states(saves, "/c/step-4", 2) == ()
    assert find_states([save(0, "")], "/c/step-3", 2) == ()
    assert find_states([save(1, "2:own", "/c/step-3/rank1.pt")], "/c/step-3", 2) == ("", "own")


def test_the_sentence_says_what_was_compared() -> None:
    assert RestoredRanks(agree=(0,)).describe("x") == "the rank that saved has the parameters of x, bit for bit"
    many = RestoredRanks(agree=(0,), differ=tuple(range(1, 12))).describe("x")
    assert (
        many == "the parameters of ranks 1, 2, 3, 4, 5, 6, 7, 8, ... differ from those saved in x; 1 other rank agrees"
    )


def test_digests_take_a_hundredth_of_the_time_at_most_and_are_one_per_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now, made = 0.0, 0

    def digest(optimizer: object) -> str:
        nonlocal now, made
        now, made = now + 2.0, made + 1
        return str(made)

    monkeypatch.setattr(restored_state, "digest", digest)
    monkeypatch.setattr(restored_state, "_world_size", lambda: 4)
    monkeypatch.setattr(restored_state.time, "monotonic", lambda: now)
    state, optimizer = restored_state.RestoredState("", lambda agrees: None), torch.optim.SGD([torch.zeros(2)])
    state.note(optimizer)
    assert [state.describe(10), state.describe(10)] == ["4:1", "4:1"]
    assert state.describe(20) == ""
    now = 202.5
    assert [state.describe(20), state.describe(30)] == ["", "4:2"]


def test_the_digest_of_bits_depends_on_every_parameter_and_on_no_order_of_words() -> None:
    def digest(*values: torch.Tensor) -> str:
        return restored_state.digest(torch.optim.SGD([torch.nn.Parameter(one) for one in values]))

    one, other = torch.tensor([1.0, 2.0]), torch.tensor([3.0], dtype=torch.bfloat16)
    assert digest(one, other) == digest(one.clone(), other.clone()) != ""
    assert digest(one, other) != digest(one, other * 2)
    assert digest(one, other) != digest(one + 2**-22, other)
    assert digest(one[:1], one[1:]) != digest(one)
    assert digest(torch.tensor([1 + 2j])) != digest(torch.tensor([1 + 3j]))


def test_a_late_report_says_nothing_about_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cell = tmp_path / "saves.jsonl", ProgressCell.create("cell")
    monkeypatch.setenv("ORCH_SAVED", str(file))
    rank = program_rank.ProgramRank(CellWriter(f"/proc/self/fd/{cell.descriptor}"), 0)
    rank.describe_state = lambda step: "1:ab"
    rank.saved(3, "/out/step-3")
    rank.saved(4, "/out/step-4", late=True)
    cell.close()
    assert [json.loads(line)["state"] for line in file.read_text().splitlines()] == ["1:ab", ""]


def test_only_the_training_that_continues_is_compared() -> None:
    """A program that trains one model after the other, and continues with the second one."""
    reports: list[bool] = []
    models = [torch.optim.SGD([torch.nn.Parameter(torch.full((2,), float(number)))]) for number in range(3)]
    state = restored_state.RestoredState(restored_state.digest(models[1]), reports.append)
    for number, optimizer in enumerate(models):
        state.begin_training(number == 1)
        state.note(optimizer)
    assert reports == [True]


def test_saves_describe_the_model_that_trains_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restored_state, "digest", lambda optimizer: str(optimizer.defaults["lr"]))
    monkeypatch.setattr(restored_state, "_world_size", lambda: 1)
    monkeypatch.setattr(restored_state, "_PAUSE", 0)
    state = restored_state.RestoredState("", lambda agrees: None)
    for rate in (1.0, 2.0):
        optimizer = torch.optim.SGD([torch.zeros(2)], lr=rate)
        state.begin_training(False)
        state.note(optimizer)
        assert state.describe(10) == f"1:{rate}"


def test_reports_of_mixed_checkpoints_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, cell = tmp_path / "saves.jsonl", ProgressCell.create("cell")
    monkeypatch.setenv("ORCH_SAVED", str(file))
    rank = program_rank.ProgramRank(CellWriter(f"/proc/self/fd/{cell.descriptor}"), 0)
    rank.begin_training(resumes=False, mixed=False)
    rank.saved(3, "/out/step-3")
    rank.begin_training(resumes=False, mixed=True)
    rank.saved(4, "/out/step-4")
    cell.close()
    assert [json.loads(line)["mixed"] for line in file.read_text().splitlines()] == [False, True, True]
