"""A world of one rank in the process of the test."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.trainer.worker.train_loop.one_rank import world
from trainer.parallel.apply import mesh
from trainer.parallel.parallel_config import ParallelConfig

__all__ = ["layout", "world"]


@pytest.fixture(scope="module")
def layout() -> Iterator[mesh.Layout]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield mesh.build(ParallelConfig(), torch.device("cpu"), 0, 1)
    dist.destroy_process_group()
