"""`orch ckpt verify` for the checkpoints of a user's own program."""

from pathlib import Path

import pytest

from checkpointing.storage.durable import dump_line
from tests.orchestrator.cli.conftest import Seeds, Type
from trainer.agent.user_command.checkpoints import CommandCheckpoint
from trainer.agent.user_command.sealing import SealWork
from trainer.protocol.run_dir import RunDir


@pytest.fixture
def run(seeds: Seeds, tmp_path: Path) -> str:
    name = seeds.run()
    place = RunDir(seeds.root / name)
    place.path.mkdir(exist_ok=True)
    place.config.write_text(dump_line({"command": ["python", "train.py"]}))
    return name


def seal(seeds: Seeds, run: str, out: Path, step: int) -> Path:
    folder = out / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    (folder / "model.bin").write_bytes(b"weights" * step)
    one = CommandCheckpoint(step=step, path=folder, identity="a", files={})
    SealWork(folder=seeds.root / run / "seals", checkpoint=one).run(bool)
    return folder


def test_a_programs_checkpoint_is_compared_with_its_seal(orch: Type, seeds: Seeds, run: str, tmp_path: Path) -> None:
    for step in (10, 20):
        seal(seeds, run, tmp_path / "out", step)
    good = orch("ckpt", "verify", run)
    assert good.code == 0
    assert "checkpoint-20: VALID  (sealed; 140 B in" in good.out
    data = bytearray((tmp_path / "out" / "checkpoint-20" / "model.bin").read_bytes())
    data[3] ^= 1
    (tmp_path / "out" / "checkpoint-20" / "model.bin").write_bytes(data)
    bad = orch("ckpt", "verify", f"{run}@20")
    assert bad.code == 7
    assert "checkpoint-20 does not match its seal: model.bin has other bytes than when it was sealed" in bad.out
    rows = orch("ckpt", "verify", f"{run}@all", "--json").data
    assert [(row["step"], row["ok"]) for row in rows] == [(20, False), (10, True)]


def test_targets_without_a_seal_are_named(orch: Type, seeds: Seeds, run: str, tmp_path: Path) -> None:
    nothing = orch("ckpt", "verify", run)
    assert nothing.code == 3
    assert "has no sealed checkpoint" in nothing.err
    seal(seeds, run, tmp_path / "out", 10)
    other = orch("ckpt", "verify", f"{run}@30")
    assert other.code == 3
    assert "sealed steps: 10" in other.err
    assert orch("ckpt", "verify", f"{run}@best").code == 2
