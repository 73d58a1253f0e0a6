"""Trainer checkpoints: complete ones are accepted, and each kind of missing or mixed file is named."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer.agent.adapters import registry

HF = registry.load("hf")


def test_checkpoints_of_a_real_trainer_are_found_and_complete(write_folder: Callable[[str], Path]) -> None:
    folder = write_folder("hf")
    (folder / "checkpoint-2.partial").mkdir()
    (folder / "runs").mkdir()
    found = HF.checkpoints(str(folder))
    assert [step for step, _ in found] == [2, 4, 6]
    assert [HF.damage(path) for _, path in found] == ["", "", ""]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("trainer_state.json", "lacks trainer_state.json"),
        ("model.safetensors", "has no weights"),
        ("optimizer.pt", "lacks optimizer.pt: the Trainer would start the optimizer anew"),
        ("scheduler.pt", "lacks scheduler.pt: the Trainer would start the schedule anew"),
        ("rng_state_0.pth", "lacks rng_state_0.pth"),
    ],
)
def test_a_missing_file_is_damage(write_folder: Callable[[str], Path], name: str, reason: str) -> None:
    checkpoint = write_folder("hf") / "checkpoint-6"
    (checkpoint / name).unlink()
    assert HF.damage(str(checkpoint)) == reason


@pytest.mark.parametrize("name", ["adapter-a", "mm_projector.bin", "pytorch_model.bin"])
def test_weights_with_other_names(write_folder: Callable[[str], Path], name: str) -> None:
    """Several adapters of PEFT are folders, and subclasses of Trainer save under names of their own."""
    checkpoint = write_folder("hf") / "checkpoint-6"
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / name).mkdir() if "." not in name else (checkpoint / name).write_bytes(b"x")
    assert HF.damage(str(checkpoint)) == ""


def test_random_states_of_all_ranks_missing(write_folder: Callable[[str], Path]) -> None:
    checkpoint = write_folder("hf") / "checkpoint-6"
    for path in checkpoint.glob("rng_state_*"):
        path.unlink()
    assert HF.damage(str(checkpoint)) == "lacks the ranks' random states"


def test_only_the_model_was_meant_to_be_saved(write_folder: Callable[[str], Path]) -> None:
    checkpoint = write_folder("hf") / "checkpoint-6"
    for path in (*checkpoint.glob("rng_state_*"), checkpoint / "optimizer.pt", checkpoint / "scheduler.pt"):
        path.unlink()
    assert HF.damage(str(checkpoint)) == ""


def test_an_index_must_find_its_shards(write_folder: Callable[[str], Path]) -> None:
    checkpoint = write_folder("hf") / "checkpoint-6"
    index = checkpoint / "model.safetensors.index.json"
    (checkpoint / "model.safetensors").rename(checkpoint / "model-00001-of-00002.safetensors")
    weights = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index.write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    missing = "lacks model-00002-of-00002.safetensors, which model.safetensors.index.json names"
    assert HF.damage(str(checkpoint)) == missing
    (checkpoint / "model-00002-of-00002.safetensors").write_bytes(b"x")
    assert HF.damage(str(checkpoint)) == ""
    index.write_text('{"metadata": {}, "weight_map": {"a": "mod')
    assert HF.damage(str(checkpoint)) == "model.safetensors.index.json is unreadable: JSONDecodeError"


@pytest.mark.parametrize("given", [None, False, True, "out/checkpoint-2"])
def test_until_a_run_has_saved_its_trainer_is_given_what_the_program_chose(
    write_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, given: object
) -> None:
    folder = write_folder("hf")
    offered = str(folder / "checkpoint-6")
    monkeypatch.setenv("ORCH_RESUME_PATH", offered)
    assert HF._choose_checkpoint(str(folder), given) == offered  # type: ignore[attr-defined]
    monkeypatch.setenv("ORCH_RESUME_EARLIER", "1")
    assert HF._choose_checkpoint(str(folder), given) == (offered if given is True else None)  # type: ignore[attr-defined]


def test_marked_cut_or_mixed_states(write_folder: Callable[[str], Path]) -> None:
    folder = write_folder("hf")
    marked, cut, mixed = (folder / f"checkpoint-{step}" for step in (2, 4, 6))
    (marked / "checkpoint-is-incomplete.txt").touch()
    assert HF.damage(str(marked)) == "is marked as incomplete by checkpoint-is-incomplete.txt"
    (mixed / "trainer_state.json").write_bytes((cut / "trainer_state.json").read_bytes())
    assert HF.damage(str(mixed)) == "trainer_state.json is of step 4"
    (cut / "trainer_state.json").write_text((cut / "trainer_state.json").read_text()[:40])
    assert HF.damage(str(cut)) == "trainer_state.json is unreadable: JSONDecodeError"
