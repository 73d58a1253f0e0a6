"""Accelerate checkpoints: missing files are named, and a save for another step needs a name that follows from it."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.agent.adapters import accelerate, registry

ACCELERATE = registry.load("accelerate")


def test_checkpoints_of_real_programs_are_found_and_complete(write_folder: Callable[[str], Path]) -> None:
    folder = write_folder("accelerate")
    (folder / "step_7").mkdir()
    found = ACCELERATE.checkpoints(str(folder))
    assert found == [(4, str(folder / "step_4")), (130, str(folder / "step_130"))]
    assert [ACCELERATE.damage(path) for _, path in found] == ["", ""]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.safetensors", "has no weights"),
        ("optimizer.bin", "lacks optimizer.bin"),
        ("random_states_0.pkl", "lacks random_states_0.pkl"),
    ],
)
def test_a_missing_file_is_damage(write_folder: Callable[[str], Path], name: str, reason: str) -> None:
    checkpoint = write_folder("accelerate") / "step_130"
    (checkpoint / name).unlink()
    assert ACCELERATE.damage(str(checkpoint)) == reason


def test_folders_of_fsdp_shards_are_complete(tmp_path: Path) -> None:
    for name in ("pytorch_model_fsdp_0", "optimizer_0"):
        (tmp_path / name).mkdir()
    (tmp_path / "random_states_0.pkl").write_bytes(b"x")
    assert ACCELERATE.damage(str(tmp_path)) == ""


@pytest.mark.parametrize("name", ["unet", "pytorch_lora_weights.safetensors"])
def test_weights_that_a_hook_of_the_program_saves(write_folder: Callable[[str], Path], name: str) -> None:
    """The training scripts of diffusers do so."""
    checkpoint = write_folder("accelerate") / "step_130"
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / name).mkdir() if name == "unet" else (checkpoint / name).write_bytes(b"x")
    assert ACCELERATE.damage(str(checkpoint)) == ""


def _program(*registered: dict[str, object], automatic: bool = False) -> SimpleNamespace:
    objects = [SimpleNamespace(state_dict=lambda state=state: state) for state in registered]
    configuration = SimpleNamespace(automatic_checkpoint_naming=automatic)
    return SimpleNamespace(project_configuration=configuration, _custom_objects=objects)


@pytest.mark.parametrize(
    ("path", "resumed", "known"),
    [
        ("out/step_20", "", True),
        ("out/step_120", "out/step_100", True),
        ("out/epoch_20", "", False),
        ("o/3", "", False),
    ],
)
def test_names_that_follow_from_the_step(path: str, resumed: str, known: bool) -> None:
    loop = accelerate.CountedLoop()
    loop.note_load(resumed)
    loop.steps = 20
    assert loop.note_save(_program(), path) is known


def test_automatic_names_need_a_counter_in_the_checkpoint() -> None:
    loop = accelerate.CountedLoop()
    loop.steps = 20
    assert not loop.note_save(_program(automatic=True), None)
    assert not loop.note_save(_program({"epoch": 1}, automatic=True), None)
    assert loop.note_save(_program({"epoch": 1}, {"done": 20}, automatic=True), None)


def test_a_rank_saves_although_a_faster_one_has_made_the_folder(tmp_path: Path) -> None:
    loop, program, saves = accelerate.CountedLoop(), _program(), list[str]()
    program.save_state = saves.append
    loop.steps = 20
    assert loop.note_save(program, str(tmp_path / "step_20"))
    loop.save()  # the program has just saved this step
    loop.steps = 27
    (tmp_path / "step_27").mkdir()
    loop.save()
    assert saves == [str(tmp_path / "step_27")]
