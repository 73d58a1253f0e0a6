"""`orch ckpt verify --level 3|4` and `orch ckpt diff`: what people and programs are told of real tensors."""

from pathlib import Path

import pytest

from tests.checkpointing.engine.built_checkpoint import build  # isort: skip  # first: it imports torch quietly

import torch

from checkpointing.storage.durable import dump_line
from tests.orchestrator.cli.conftest import Seeds, Type

WEIGHT = torch.arange(32, dtype=torch.float32).view(8, 4) + 1


def save(seeds: Seeds, run: str, step: int, weight: torch.Tensor) -> Path:
    root = seeds.root / run / "checkpoints"
    root.mkdir(parents=True, exist_ok=True)
    tensors = {"model/w": weight, "model/b": torch.ones(4), "optimizer/w/step": torch.tensor(float(step))}
    built = build(tensors)
    built.extra = {"step": step, "consumed": step * 8, "config_digest": "f00d"}
    built.world = {"ranks": 0}
    return built.write(root, step)


@pytest.fixture
def run(seeds: Seeds) -> str:
    name = seeds.run()
    for step in (50, 100):
        save(seeds, name, step, WEIGHT * step)
    (seeds.root / name / "config.json").write_text(dump_line({"train": {"batch_size": 8}}))
    return name


@pytest.mark.parametrize("level", [3, 4])
def test_a_sound_checkpoint_is_valid_at_every_level(orch: Type, run: str, level: int) -> None:
    done = orch("ckpt", "verify", run, "--level", level, "--json")
    assert done.code == 0
    assert [(row["ok"], row["level"], row["notes"]) for row in done.data] == [(True, level, [])]


def test_a_damaged_chunk_names_its_tensors(orch: Type, seeds: Seeds, run: str) -> None:
    place = next((seeds.root / run / "checkpoints").glob("step-00000100*"))
    data = (place / "__0_0.distcp").read_bytes()
    (place / "__0_0.distcp").write_bytes(data[:750] + b"!" + data[751:])
    bad = orch("ckpt", "verify", run)
    assert bad.code == 7
    assert "  __0_0.distcp, chunk 0, model/b, model/w and 1 more: digest differs" in bad.out
    (fault,) = orch("ckpt", "verify", run, "--level", 4, "--json").data[0]["faults"]
    assert fault["tensors"] == ["model/b", "model/w", "optimizer/w/step"]


def test_what_trains_and_is_no_number_is_invalid(orch: Type, seeds: Seeds, run: str) -> None:
    save(seeds, run, 75, torch.full((8, 4), float("nan")))
    assert orch("ckpt", "verify", f"{run}@75", "--level", 3).code == 0
    bad = orch("ckpt", "verify", f"{run}@75", "--level", 4)
    assert bad.code == 7
    assert "32 values are NaN in a trained tensor" in bad.out


def test_the_position_in_the_data_is_not_judged(orch: Type, seeds: Seeds, run: str) -> None:
    (seeds.root / run / "config.json").write_text(dump_line({"train": {"batch_size": 16}}))
    assert orch("ckpt", "verify", f"{run}@50", "--level", 4).code == 0


def test_a_mask_of_infinities_is_a_note(orch: Type, seeds: Seeds, run: str) -> None:
    save(seeds, run, 75, torch.full((8, 4), float("-inf")))
    done = orch("ckpt", "verify", f"{run}@75", "--level", 4)
    assert done.code == 0
    assert done.err == "  model/w: 32 values are NaN or infinite\n"


def test_many_faults_are_cut_short_for_people(orch: Type, seeds: Seeds, run: str) -> None:
    place = next((seeds.root / run / "checkpoints").glob("step-00000050*"))
    for number in range(30):
        (place / f"stray-{number}").write_text("")
    bad = orch("ckpt", "verify", f"{run}@50", "--level", 3)
    assert "and 10 more" in bad.out
    assert len(orch("ckpt", "verify", f"{run}@50", "--level", 3, "--json").data[0]["faults"]) == 30


def test_diff_tells_what_changed_by_part(orch: Type, run: str) -> None:
    answer = orch("ckpt", "diff", f"{run}@50", f"{run}@100", "--json").data
    assert not answer["equal"]
    assert [(row["tensor"], row["what"]) for row in answer["tensors"]] == [
        ("model/w", "changed"), ("optimizer/w/step", "changed"),
    ]  # fmt: skip
    first = answer["tensors"][0]
    assert (first["relative"], first["largest"], first["changed"]) == (0.5, 32 * 50.0, 1.0)
    assert answer["parts"] == [
        {"part": "model", "tensors": 2, "equal": 1, "apart": 0},
        {"part": "optimizer", "tensors": 1, "equal": 0, "apart": 0},
    ]
    assert answer["config"] == []
    people = orch("ckpt", "diff", f"{run}@50", run)
    assert people.code == 0
    assert "model: 1 of 2 tensors equal" in people.out
    every = orch("ckpt", "diff", f"{run}@50", run, "--all", "--json").data["tensors"]
    assert [row["what"] for row in every] == ["changed", "changed", "equal by fingerprint"]


def test_diff_of_equal_checkpoints(orch: Type, run: str) -> None:
    same = orch("ckpt", "diff", run, run)
    assert same.code == 0
    assert "every tensor is equal" in same.out


def test_diff_lists_config_differences(orch: Type, seeds: Seeds, run: str) -> None:
    other = seeds.run()
    place = save(seeds, other, 50, WEIGHT)
    (seeds.root / other / "config.json").write_text(dump_line({"train": {"batch_size": 16}}))
    answer = orch("ckpt", "diff", f"{run}@50", place, "--json").data
    assert answer["config"] == [{"key": "train.batch_size", "first": 8, "second": 16}]
    assert "train.batch_size  8 -> 16" in orch("ckpt", "diff", f"{run}@50", place).out


def test_diff_refuses_what_cannot_be_believed(orch: Type, seeds: Seeds, run: str) -> None:
    place = next((seeds.root / run / "checkpoints").glob("step-00000050*"))
    (place / "manifest.json").write_bytes(b"{}")
    bad = orch("ckpt", "diff", place, run)
    assert bad.code == 7
    assert f"orch ckpt verify {place}" in bad.err
