"""The generators of a rank go on where they were packed."""

import random

import torch

from trainer.worker.saved_state.rng_state import pack_rng, unpack_rng


def test_generators_go_on_where_they_were_packed():
    torch.manual_seed(5)
    random.seed(5)
    random.gauss(0, 1)  # leaves half a pair behind, which belongs to the state
    packed = pack_rng(torch.device("cpu"))
    expected = (torch.rand(3), random.random(), random.gauss(0, 1))
    torch.manual_seed(6)
    random.seed(6)
    unpack_rng(packed, torch.device("cpu"))
    found = (torch.rand(3), random.random(), random.gauss(0, 1))
    assert torch.equal(found[0], expected[0])
    assert found[1:] == expected[1:]
