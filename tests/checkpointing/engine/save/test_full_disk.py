"""A real file system that is really full."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.checkpointing.engine.conftest import Bench, loaded
from tests.checkpointing.proofs.mounts import small_tmpfs


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Bench]:
    with small_tmpfs(tmp_path / "tiny", "1m") as folder:
        bench = Bench(folder)
        yield bench
        for made in bench.made:
            made.close()


def test_training_goes_on_and_the_next_save_works(tiny: Bench) -> None:
    made = tiny.checkpointer(keep=2)
    small, large = {"x": torch.ones(1000)}, {"x": torch.ones(1 << 19)}
    for step, tensors in ((1, small), (2, large), (3, small)):
        made.save(step, tensors, {})
        made.wait()
    (failure,) = tiny.told("checkpoint.failed")
    assert failure["step"] == 2
    assert "disk full ([Errno 28] No space left on device" in failure["reason"]
    assert sorted(path.name for path in tiny.root.iterdir()) == [tiny.folder(1).name, tiny.folder(3).name]
    target = {"x": torch.zeros(1000)}
    assert loaded(made.restore(target)).step == 3
    assert torch.equal(target["x"], small["x"])
