"""The generators of a rank go on where they were packed, and say whose they are."""

import random

import torch

from trainer.worker.saved_state.rng_state import (
    generators_fault,
    origin_fault,
    pack_rng,
    rng_name,
    set_origin,
    unpack_rng,
)


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


def test_a_row_with_an_origin_is_as_long_and_gives_the_same_generators():
    """Its size is part of the plan of a checkpoint, and an older orch reads it too."""
    torch.manual_seed(5)
    random.seed(5)
    packed = pack_rng(torch.device("cpu"))
    marked = packed.clone()
    set_origin(marked, 3, 40)
    assert marked.shape == packed.shape
    assert generators_fault(marked) == ""
    expected = (torch.rand(3), random.random())
    unpack_rng(marked, torch.device("cpu"))
    assert torch.equal(torch.rand(3), expected[0])
    assert random.random() == expected[1]


def test_the_row_of_another_rank_or_step_is_told():
    packed = pack_rng(torch.device("cpu"))
    assert origin_fault(packed, rng_name(3), 40) == "", "an older orch did not write it down"
    set_origin(packed, 3, 40)
    assert origin_fault(packed, rng_name(3), 40) == ""
    assert origin_fault(packed, rng_name(2), 40) == "is the state of rank 3 at step 40, in a checkpoint of step 40"
    assert origin_fault(packed, rng_name(3), 50) == "is the state of rank 3 at step 40, in a checkpoint of step 50"
    length = (packed == 16).nonzero()[-1]
    packed[length] = 8
    assert origin_fault(packed, rng_name(3), 40) == "says in 8 bytes instead of 16 whose it is"
