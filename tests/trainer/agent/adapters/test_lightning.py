"""Lightning checkpoints: files with a step, and folders of shards."""

from pathlib import Path

from trainer.agent.adapters import registry

LIGHTNING = registry.load("lightning")


def test_files_and_folders_of_shards(tmp_path: Path) -> None:
    for name in ("epoch=0-step=176.ckpt", "epoch=1-step=20-v1.ckpt", "last.ckpt", "notes-step=3.txt"):
        (tmp_path / name).write_bytes(b"PK")
    shards = tmp_path / "epoch=2-step=300.ckpt"
    shards.mkdir()
    found = LIGHTNING.checkpoints(str(tmp_path))
    assert [step for step, _ in found] == [20, 176, 300]
    assert [LIGHTNING.damage(path) for _, path in found] == ["", "", "lacks meta.pt"]
    (shards / "meta.pt").write_bytes(b"PK")
    assert LIGHTNING.damage(str(shards)) == "lacks .metadata"
    (shards / ".metadata").write_bytes(b"x")
    assert LIGHTNING.damage(str(shards)) == ""
    (tmp_path / "epoch=0-step=176.ckpt").write_bytes(b"")
    assert LIGHTNING.damage(found[1][1]) == "is empty"
