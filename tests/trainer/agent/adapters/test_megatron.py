"""Checkpoints in the layouts of Megatron-LM: each rank has its files, and the tracker names the newest one."""

import json
from pathlib import Path

import pytest

from trainer.agent.adapters import registry
from trainer.agent.user_command.program_saves import ProgramSave, locate, parse_saves

MEGATRON = registry.load("megatron")


def write_ranks(out: Path, step: int, *ranks: str, files: tuple[str, ...] = ("model_optim_rng.pt",)) -> Path:
    for rank in ranks:
        (out / f"iter_{step:07d}" / f"mp_rank_{rank}").mkdir(parents=True, exist_ok=True)
        for name in files:
            (out / f"iter_{step:07d}" / f"mp_rank_{rank}" / name).write_bytes(b"saved")
    (out / "latest_checkpointed_iteration.txt").write_text(str(step))
    return out / f"iter_{step:07d}"


def write_distributed(out: Path, step: int) -> Path:
    import torch
    import torch.distributed.checkpoint as dcp

    folder = out / f"iter_{step:07d}"
    dcp.save({"layer": torch.ones(70)}, checkpoint_id=folder, no_dist=True)
    torch.save({"iteration": step}, folder / "common.pt")
    config = {"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch"}
    (folder / "metadata.json").write_text(json.dumps(config))
    (out / "latest_checkpointed_iteration.txt").write_text(str(step))
    return folder


@pytest.mark.parametrize(
    "ranks",
    [("00",), ("00", "01"), ("00_000", "00_001", "01_000", "01_001"), ("00_000_000", "00_000_001", "01_000_001")],
)
def test_the_folders_of_all_ranks_are_complete(tmp_path: Path, ranks: tuple[str, ...]) -> None:
    path = write_ranks(tmp_path, 100, *ranks)
    assert MEGATRON.checkpoints(str(tmp_path)) == [(100, str(path))]
    assert registry.find_damage("megatron", str(path)) == ""


def test_missing_ranks_and_files_are_named(tmp_path: Path) -> None:
    path = write_ranks(tmp_path, 100, "00", "01", "02", files=("model_optim_rng.pt", "distrib_optim.pt"))
    assert MEGATRON.damage(str(path)) == ""
    (path / "mp_rank_02" / "distrib_optim.pt").unlink()
    assert MEGATRON.damage(str(path)) == "lacks mp_rank_02/distrib_optim.pt"
    (path / "mp_rank_01" / "model_optim_rng.pt").rename(path / "mp_rank_01" / "elsewhere")
    assert MEGATRON.damage(str(path)) == "lacks mp_rank_01/model_optim_rng.pt"
    (path / "mp_rank_01").rename(path / "elsewhere")
    assert MEGATRON.damage(str(path)) == "lacks the files of model-parallel rank 1 (number 1 of mp_rank_...)"
    (tmp_path / "iter_0000200").mkdir()
    assert MEGATRON.damage(str(tmp_path / "iter_0000200")) == "has no files of Megatron"


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_distributed_checkpoint_has_its_metadata_and_all_shards(tmp_path: Path) -> None:
    path = write_distributed(tmp_path, 100)
    assert registry.find_damage("megatron", str(path)) == ""
    (shard,) = path.glob("*.distcp")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert registry.find_damage("megatron", str(path)).startswith(f"{shard.name} has ")
    shard.write_bytes(whole)
    config = path / "metadata.json"
    text = config.read_text()
    config.write_text(text[:-5])
    assert registry.find_damage("megatron", str(path)) == "metadata.json is unreadable: JSONDecodeError"
    config.unlink()
    assert registry.find_damage("megatron", str(path)) == "lacks metadata.json, which is written last"
    config.write_text(text)
    (path / "common.pt").unlink()
    assert registry.find_damage("megatron", str(path)) == "lacks common.pt"
    config.unlink()
    assert registry.find_damage("megatron", str(path)) == "", "fsdp_dtensor and torch_dcp have neither file"


def test_a_save_that_the_tracker_does_not_name_yet_has_not_ended(tmp_path: Path) -> None:
    older, newer = write_ranks(tmp_path, 100, "00"), write_ranks(tmp_path, 200, "00")
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    assert [MEGATRON.damage(str(path)) for path in (older, newer)] == ["", ""]
    tracker.write_text("100")
    assert MEGATRON.damage(str(older)) == ""
    assert MEGATRON.damage(str(newer)) == "is newer than 100, which latest_checkpointed_iteration.txt names"
    for unclear in ("", "release", "\u0661"):
        tracker.write_text(unclear)
        assert MEGATRON.damage(str(newer)) == ""


def test_a_loop_in_this_style_needs_no_megatron() -> None:
    """Its saves are those of single files by `torch.save`."""
    path = "/out/iter_0000100/mp_rank_01/model_optim_rng.pt"
    row = {"rank": 1, "step": -1, "path": path, "frameworks": "plain", "failed": "", "time": 1.0}
    saves = parse_saves([row])
    assert saves == [ProgramSave(step=100, path="/out/iter_0000100", rank=1, frameworks="megatron", time=1.0)]
    found = locate(saves)
    assert found is not None
    assert (found.adapter, found.config.path, found.config.pattern) == ("megatron", "/out", "iter_*")
    assert registry.recognize_layout("/out/iter_0000100/notes/x.pt") == ("", "/out/iter_0000100/notes/x.pt")
