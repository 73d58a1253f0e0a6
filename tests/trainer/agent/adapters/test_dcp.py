"""Folders of torch.distributed.checkpoint: the metadata names every file and its size."""

from pathlib import Path

import pytest

from trainer.agent.adapters import registry

DCP = registry.load("dcp")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with two checkpoints that torch wrote."""
    import torch
    import torch.distributed.checkpoint as dcp

    for step in (10, 20):
        state = {f"layer-{at}": torch.ones(70) * at for at in range(5)}
        dcp.save({"model": state, "step": step}, checkpoint_id=tmp_path / f"step-{step}", no_dist=True)
    return tmp_path


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_damage_of_real_checkpoints(folder: Path) -> None:
    (folder / "notes-30").mkdir()
    assert DCP.checkpoints(str(folder)) == [(10, str(folder / "step-10")), (20, str(folder / "step-20"))]
    assert [DCP.damage(path) for _, path in DCP.checkpoints(str(folder))] == ["", ""]
    older, newer = folder / "step-10", folder / "step-20"
    (shard,) = newer.glob("*.distcp")
    whole, size = shard.read_bytes(), shard.stat().st_size
    for kept in (0, 100, size - 1):
        shard.write_bytes(whole[:kept])
        assert DCP.damage(str(newer)).startswith(f"{shard.name} has {kept} of ")
    shard.unlink()
    assert DCP.damage(str(newer)) == f"lacks {shard.name}"
    metadata = older / ".metadata"
    metadata.write_bytes(metadata.read_bytes()[:200])
    assert DCP.damage(str(older)) == ".metadata is unreadable: ValueError"
    metadata.unlink()
    assert DCP.damage(str(older)) == "lacks .metadata"
