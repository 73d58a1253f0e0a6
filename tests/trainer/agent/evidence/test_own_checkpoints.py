"""Checkpoints of a user's program: found by their names, told to be torn by cheap signs, set aside and put back."""

import io
import json
import struct
import zipfile

import pytest

from trainer.agent.evidence.own_checkpoints import damage, examined, find, put_back, set_aside
from trainer.contract.command_checkpoints import CommandCheckpointsConfig

CONFIG = CommandCheckpointsConfig(path="out")


def safetensors(numbers: int = 4) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [numbers], "data_offsets": [0, 4 * numbers]}}).encode()
    return struct.pack("<Q", len(header)) + header + bytes(4 * numbers)


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", b"x" * 100)
    return buffer.getvalue()


WHOLE = {
    "model.safetensors": safetensors(), "optimizer.pt": archive(), "trainer_state.json": b"{}",
    "rng_state_0.pth": b"an older format of torch.save", "note.txt": b"",
}  # fmt: skip


def write(root, name, files):
    (root / name).mkdir()
    for file, content in files.items():
        (root / name / file).write_bytes(content)


@pytest.mark.parametrize(
    ("pattern", "name", "step"),
    [
        ("checkpoint-*", "checkpoint-50", 50),
        ("checkpoint-*", "checkpoint-50.tmp", None),
        ("checkpoint-*", "checkpoint-best", None),
        ("checkpoint-*", "xcheckpoint-50", None),
        ("step_*.pt", "step_0007.pt", 7),
        ("epoch=*-step=*.ckpt", "epoch=3-step=1200.ckpt", 1200),
        ("*", "12", 12),
        ("*", ".orch-set-aside.12.001-001", None),
        ("*-*", ".orch-set-aside.12.001-001", None),
    ],
)
def test_the_last_star_of_a_pattern_is_the_step(pattern, name, step):
    assert CommandCheckpointsConfig(pattern=pattern).step_of(name) == step


@pytest.mark.parametrize("pattern", ["", "checkpoint", "out/checkpoint-*"])
def test_a_pattern_that_names_no_step_is_refused(pattern):
    with pytest.raises(ValueError, match=r"checkpoints\.pattern=.*must be one name with a `\*` for the step"):
        CommandCheckpointsConfig(pattern=pattern)


def test_they_are_found_newest_first_and_a_missing_folder_has_none(tmp_path):
    assert find(tmp_path / "none", CONFIG) == ([], set())
    for name in ("checkpoint-9", "checkpoint-10", "other-11"):
        write(tmp_path, name, WHOLE)
    (newest, older), there = find(tmp_path, CONFIG)
    assert (newest.step, older.step) == (10, 9)
    assert there == {newest.identity, older.identity}
    assert newest.bytes == sum(map(len, WHOLE.values()))
    assert [one.damage for one in examined([newest, older])] == ["", ""]


def test_a_file_may_be_a_checkpoint(tmp_path):
    (tmp_path / "step_5.pt").write_bytes(archive())
    (tmp_path / "step_6.pt").write_bytes(archive()[:-30])
    newest, older = examined(find(tmp_path, CommandCheckpointsConfig(pattern="step_*.pt"))[0])
    assert (
        newest.damage
        == "is damaged: step_6.pt is no whole archive of torch.save: its directory is missing, it was cut off"
    )
    assert older.damage == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.safetensors": safetensors()[:-1]}, "model.safetensors is no whole safetensors file: its values end"),
        ({"model.safetensors": b""}, "model.safetensors is empty"),
        ({"optimizer.pt": archive()[:60]}, "optimizer.pt is no whole archive of torch.save"),
        ({"trainer_state.json": b'{"global_st'}, "trainer_state.json is no whole JSON file"),
        ({"trainer_state.json": None}, "lacks trainer_state.json, which checkpoint-9 has"),
        ({"rng_state_0.pth": None, "rng_state_1.pth": b"x"}, ""),  # another rank's is as good
        ({"checkpoint-is-incomplete.txt": b""}, "is marked as incomplete"),
        ({name: None for name in WHOLE}, "is an empty folder"),
        ({}, ""),
    ],
)
def test_cheap_signs_of_a_torn_one(tmp_path, change, words):
    write(tmp_path, "checkpoint-9", WHOLE)
    files = {**WHOLE, **change}
    write(tmp_path, "checkpoint-10", {name: content for name, content in files.items() if content is not None})
    newest, older = find(tmp_path, CONFIG)[0]
    found = damage(newest, older)
    assert words in found if words else found == ""


def test_set_aside_and_put_back_keep_every_byte(tmp_path):
    write(tmp_path, "checkpoint-10", WHOLE)
    ((one,), _) = find(tmp_path, CONFIG)
    target = set_aside(one, CONFIG, 2, 3)
    assert target == tmp_path / ".orch-set-aside.10.002-003"
    assert find(tmp_path, CONFIG)[0] == []
    assert {path.name: path.read_bytes() for path in target.iterdir()} == WHOLE
    assert put_back(target, one.path)
    assert [again.identity for again in find(tmp_path, CONFIG)[0]] == [one.identity]


def test_one_that_somebody_writes_to_is_left_alone(tmp_path):
    write(tmp_path, "checkpoint-10", WHOLE)
    ((one,), _) = find(tmp_path, CONFIG)
    (tmp_path / "checkpoint-10" / "late.pt").write_bytes(b"more")
    assert set_aside(one, CONFIG, 1, 1) is None
    assert (tmp_path / "checkpoint-10").is_dir()


def test_a_name_that_was_taken_meanwhile_is_not_overwritten(tmp_path):
    write(tmp_path, "checkpoint-10", WHOLE)
    ((one,), _) = find(tmp_path, CONFIG)
    target = set_aside(one, CONFIG, 1, 1)
    write(tmp_path, "checkpoint-10", {"new.pt": b"x"})
    assert not put_back(target, one.path)
    assert target.is_dir()
    assert (tmp_path / "checkpoint-10" / "new.pt").read_bytes() == b"x"
