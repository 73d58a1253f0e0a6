"""Plain torch reads the engine's checkpoints bit-exactly: `dcp.load` in any layout, and `format_utils`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.checkpointing.proofs.interop_program import whole
from tests.checkpointing.proofs.world import World, marked, plain_load, same, state
from tests.warm_programs import WarmPrograms

PROGRAM = "tests.checkpointing.proofs.interop_program"
Run = Callable[[str, int, Path], list[list[dict[str, Any]]]]


@pytest.fixture
def run(programs: WarmPrograms) -> Run:
    """Run all ranks to their end; returns what each found in every act."""

    def of(acts: str, size: int, folder: Path) -> list[list[dict[str, Any]]]:
        return programs.results(PROGRAM, [(acts, rank, size, folder) for rank in range(size)])

    return of


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
def test_many_ranks_into_another_layout_and_onto_more_ranks(run: Run, tmp_path: Path) -> None:
    world, other = World(tmp_path / "checkpoints"), World(tmp_path / "other")
    assert run("save:rows", 2, world.root) == [[{"committed": 1}]] * 2
    assert_plain_torch_reads(world.folder(1), whole(), tmp_path / "one.pt")
    assert run("load:columns", 3, world.root) == [[{"exact": True}]] * 3
    assert run("save:grid,load:hsdp", 4, other.root) == [[{"committed": 1}, {"exact": True}]] * 4
    assert_plain_torch_reads(other.folder(1), whole(), tmp_path / "other.pt")


@pytest.mark.proof
@pytest.mark.parametrize(("saved", "size"), [("rows", 3), ("columns", 2), ("replicated", 3), ("hsdp", 4), ("grid", 4)])
def test_every_layout_into_every_other(run: Run, tmp_path: Path, saved: str, size: int) -> None:
    world = World(tmp_path / "checkpoints")
    assert run(f"save:{saved}", size, world.root) == [[{"committed": 1}]] * size
    assert_plain_torch_reads(world.folder(1), whole(), tmp_path / "one.pt")
    for loaded, onto in (("rows", 2), ("columns", 4), ("replicated", 2), ("hsdp", 4), ("grid", 4)):
        assert run(f"load:{loaded}", onto, world.root) == [[{"exact": True}]] * onto, loaded
