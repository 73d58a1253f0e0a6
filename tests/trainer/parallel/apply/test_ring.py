"""Visible keys in a ring: exactly those of the causal mask, with equal work in every turn."""

import pytest
import torch

from trainer.parallel.apply.context_parallel import sequence_part, visible_slices
from trainer.parallel.context import CpMethod
from trainer.parallel.parallel_config import ParallelConfig

LENGTH = 48


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_every_pair_that_the_mask_shows_is_computed_once(ranks: int) -> None:
    parts = [sequence_part(LENGTH, ParallelConfig(cp=ranks), CpMethod.RING, rank) for rank in range(ranks)]
    seen = torch.zeros(LENGTH, LENGTH, dtype=torch.int64)
    for rank, part in enumerate(parts):
        tokens = len(part.positions)
        for source, other in enumerate(parts):
            block = visible_slices(rank, source, tokens)
            rows, columns = part.positions[block.queries], other.positions[block.keys]
            pairs = torch.ones(len(rows), len(columns), dtype=torch.int64)
            seen[rows[:, None], columns] += pairs.tril() if block.is_causal else pairs
    assert torch.equal(seen, torch.ones_like(seen).tril())


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_all_ranks_have_the_same_work_in_every_turn(ranks: int) -> None:
    tokens = LENGTH // ranks
    for turn in range(1, ranks):
        blocks = [visible_slices(rank, (rank - turn) % ranks, tokens) for rank in range(ranks)]
        sizes = {(one.queries.stop - one.queries.start) * (one.keys.stop - one.keys.start) for one in blocks}
        assert sizes == {tokens * tokens // 2}
