"""What our engine writes is read bit-exactly by plain torch: `dcp.load` in any layout, and `format_utils`."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.checkpointing.proofs.interop_program import whole
from tests.checkpointing.proofs.world import World, marked, plain_load, same, state

ROOT = Path(__file__).resolve().parents[3]


def run(act: str, layout: str, size: int, folder: Path) -> list[dict[str, Any]]:
    """Run all ranks to their end."""
    words = [sys.executable, "-m", "tests.checkpointing.proofs.interop_program", act, layout]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [*words, str(rank), str(size), str(folder)],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        ended = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(errors for _, errors in ended)
    return [json.loads(output.splitlines()[-1]) for output, _ in ended]


def assert_plain_torch_reads(folder: Path, right: dict[str, torch.Tensor], scratch: Path) -> None:
    target = marked(right)
    plain_load(folder, target)
    assert same(target, right)
    dcp_to_torch_save(folder, scratch)
    assert same(torch.load(scratch, weights_only=True), right)


@pytest.mark.parametrize("files", [1, 3])
def test_a_lone_rank(tmp_path: Path, files: int) -> None:
    world = World(tmp_path / "checkpoints")
    world.save(1, 2, files=files)
    assert_plain_torch_reads(world.folder(2), state(2), tmp_path / "one.pt")


@pytest.mark.multi
@pytest.mark.parametrize(("saved", "size", "loaded", "onto"), [("rows", 2, "columns", 3), ("grid", 4, "hsdp", 4)])
def test_many_ranks_into_another_layout(tmp_path: Path, saved: str, size: int, loaded: str, onto: int) -> None:
    world = World(tmp_path / "checkpoints")
    assert run("save", saved, size, world.root) == [{"committed": 1}] * size
    assert_plain_torch_reads(world.folder(1), whole(), tmp_path / "one.pt")
    assert run("load", loaded, onto, world.root) == [{"exact": True}] * onto


@pytest.mark.proof
@pytest.mark.parametrize(("saved", "size"), [("rows", 3), ("columns", 2), ("replicated", 3), ("hsdp", 4), ("grid", 4)])
def test_every_layout_into_every_other(tmp_path: Path, saved: str, size: int) -> None:
    world = World(tmp_path / "checkpoints")
    assert run("save", saved, size, world.root) == [{"committed": 1}] * size
    assert_plain_torch_reads(world.folder(1), whole(), tmp_path / "one.pt")
    for loaded, onto in (("rows", 2), ("columns", 4), ("replicated", 2), ("hsdp", 4), ("grid", 4)):
        assert run("load", loaded, onto, world.root) == [{"exact": True}] * onto, loaded
