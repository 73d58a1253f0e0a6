"""Checkpoints that a program has reported: its folder and names without configuration, and its framework's rules."""

import asyncio
import json
import time
from pathlib import Path

import pytest

from tests.trainer.agent.user_command.command_attempt import Attempt, names
from trainer.agent.user_command.program_saves import ProgramSave, locate, read_saves
from trainer.protocol.events import EventKind

HF = "torch,hf,plain"


@pytest.mark.parametrize(
    ("paths", "frameworks", "place"),
    [
        ([(20, "/o/checkpoint-20")], HF, ("/o", "checkpoint-*")),
        ([(20, "/o/epoch=1-step=20.ckpt")], HF, ("/o", "epoch=*-step=*.ckpt")),
        ([(20, "/o/iter_0000020")], HF, ("/o", "iter_*")),
        ([(20, "/o/last")], HF, None),
        ([(10, "/o/step_10.pt")], "torch", None),
        ([(10, "/o/step_10.pt"), (20, "/o/step_20.pt")], "torch", ("/o", "step_*.pt")),
        ([(10, "/o/step_10.pt"), (10, "/o/step_10.pt")], "torch", None),
        ([(-1, "/o/ckpt-1/optimizer.pt"), (-1, "/o/ckpt-2/optimizer.pt")], "torch", ("/o", "ckpt-*")),
        ([(0, "/o/step5/rank0.pt"), (1, "/o/step5/rank1.pt"), (0, "/o/step6/rank0.pt")], "torch", ("/o", "step*")),
        ([(1, "/o/shard1.pt"), (2, "/o/shard2.pt")], "torch", None),
        ([], "", None),
    ],
)
def test_the_folder_and_the_pattern_follow_from_reported_saves(paths, frameworks, place):
    saves = [ProgramSave(step=step, path=path, frameworks=frameworks) for step, path in paths]
    found = locate(saves)
    assert (None if found is None else (found.config.path, found.config.pattern)) == place


def report(attempt: Attempt, step: int, path: Path, frameworks: str = HF) -> None:
    row = {"rank": 0, "generation": 1, "step": step, "path": str(path), "failed": "", "frameworks": frameworks}
    with attempt.dir.program_saves(0).open("a") as stream:
        stream.write(json.dumps({**row, "time": time.time()}) + "\n")


def report_mixed(attempt: Attempt) -> None:
    attempt.dir.program_saves(0).write_text(json.dumps({"rank": 0, "generation": 1, "time": 1.0, "mixed": True}) + "\n")


def trainer_checkpoint(out: Path, step: int) -> Path:
    folder = out / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return folder


def test_data_does_not_show_where_checkpoints_are() -> None:
    data = [ProgramSave(step=step, path=f"/o/rollout_iter_{step}.pt", is_data=True) for step in (1, 2, 3, 4)]
    state = [ProgramSave(step=step, path=f"/c/model_iter_{step}.pt") for step in (2, 4)]
    assert locate(data) is None
    found = locate(sorted([*data, *state], key=lambda save: save.step))
    assert found is not None
    assert (found.config.path, found.config.pattern) == ("/c", "model_iter_*.pt")


def test_a_folder_that_is_not_configured_is_watched_once_the_program_has_saved(tmp_path: Path, out: Path) -> None:
    """A checkpoint from before the run is not its own."""
    trainer_checkpoint(out, 99)
    attempt = Attempt(tmp_path, 1, path="")
    attempt.dir.coordinator.touch()
    attempt.stops()
    report(attempt, 10, trainer_checkpoint(out, 10))
    second = Attempt(tmp_path, 2, path="")
    asyncio.run(second.program.start_generation(1))
    assert second.program.resume == str(out / "checkpoint-10")


def test_checkpoints_in_the_runs_folder_are_not_the_programs_own(tmp_path: Path) -> None:
    attempt = Attempt(tmp_path, 1, path="")
    for step in (20, 40):
        report(attempt, step, attempt.dir.run.checkpoints / f"step-{step:08d}.001-60872058", "torch")
    assert read_saves([attempt.dir]) == []
    report(attempt, 60, tmp_path / "step_60.pt", "torch")
    assert [save.step for save in read_saves([attempt.dir])] == [60]


def test_a_frameworks_rules_refuse_a_checkpoint_before_the_start(tmp_path: Path, out: Path) -> None:
    attempt = Attempt(tmp_path, 1)
    report(attempt, 10, trainer_checkpoint(out, 10))
    trainer_checkpoint(out, 20)
    (out / "checkpoint-20" / "trainer_state.json").unlink()
    attempt.stops()
    assert names(out) == ["checkpoint-10"]
    (aside,) = attempt.told(EventKind.CHECKPOINT_SET_ASIDE)
    assert aside["reason"] == "it is incomplete: lacks trainer_state.json"


@pytest.mark.parametrize("before", [True, False])
def test_a_first_checkpoint_that_is_incomplete_moves_away_unless_the_run_has_saved(tmp_path, out, before):
    attempt = Attempt(tmp_path, 1)
    if before:
        report(attempt, 10, trainer_checkpoint(out, 10))
        attempt.stops()
        (out / "checkpoint-10").rename(tmp_path / "elsewhere")
    report(attempt, 20, trainer_checkpoint(out, 20))
    (out / "checkpoint-20" / "trainer_state.json").unlink()
    second = Attempt(tmp_path, 2)
    second.stops()
    assert names(out) == (["checkpoint-20"] if before else [])
    assert second.program.unusable == ""


@pytest.mark.parametrize(("adapter", "chosen"), [("auto", 20), ("hf", 10), ("plain", 20)])
def test_the_configured_adapter_replaces_the_guess(tmp_path: Path, out: Path, adapter: str, chosen: int) -> None:
    attempt = Attempt(tmp_path, 1, adapter=adapter)
    for step in (10, 20):
        trainer_checkpoint(out, step)
    (out / "checkpoint-20" / "trainer_state.json").unlink()  # complete, except for a Trainer
    if adapter == "plain":
        report(attempt, 20, out / "checkpoint-20")
    asyncio.run(attempt.program.start_generation(1))
    assert attempt.program.resume == str(out / f"checkpoint-{chosen}")


def test_a_checkpoint_from_before_the_run_is_marked_until_the_run_has_saved(tmp_path: Path, out: Path) -> None:
    trainer_checkpoint(out, 10)
    attempt = Attempt(tmp_path, 1)
    attempt.stops()
    assert (attempt.program.resume, attempt.program.resumes_earlier) == (str(out / "checkpoint-10"), True)
    report(attempt, 20, trainer_checkpoint(out, 20))
    attempt.stops()
    assert (attempt.program.resume, attempt.program.resumes_earlier) == (str(out / "checkpoint-20"), False)


def test_a_checkpoint_is_not_offered_if_it_may_be_of_another_model(tmp_path: Path, out: Path) -> None:
    """A new attempt has forgotten nothing, even if the reports have been rotated away."""
    trainer_checkpoint(out, 10)
    first = Attempt(tmp_path, 1)
    first.stops()
    assert first.program.resume == str(out / "checkpoint-10")
    report_mixed(first)
    first.stops()
    assert first.program.resume == ""
    first.dir.program_saves(0).unlink()
    second = Attempt(tmp_path, 2)
    second.stops()
    assert (second.program.resume, names(out)) == ("", ["checkpoint-10"])
