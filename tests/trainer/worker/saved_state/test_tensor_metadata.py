"""Tensors of a checkpoint that a fresh process has not got: made from what was written down of them."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from trainer.worker.saved_state.checkpoint_contents import tensor_metadata, zeros

CPU, META = torch.device("cpu"), torch.device("meta")


def test_a_tensor_without_its_values() -> None:
    assert tensor_metadata(torch.ones(2, 3, dtype=torch.bfloat16)) == ["bfloat16", [2, 3], "cpu", False]
    assert tensor_metadata(torch.ones((), device="meta")) == ["float32", [], "meta", False]


def test_what_lay_on_the_cpu_lies_there_again_and_all_else_on_the_device() -> None:
    made = zeros(["int64", [2], "cpu", False], [None, torch.ones(3)], META)
    assert made is not None
    assert (made.tolist(), made.dtype, made.device) == ([0, 0], torch.int64, CPU)
    other = zeros(["float32", [2, 1], "cuda", False], [], META)
    assert other is not None
    assert (list(other.shape), other.device) == ([2, 1], META)


@pytest.mark.usefixtures("world")
def test_a_sharded_one_lies_as_the_first_that_is_like_it() -> None:
    mesh = init_device_mesh("cpu", (1,))
    plain = torch.ones(2, requires_grad=True)
    sharded = DTensor.from_local(torch.ones(2), mesh, [Shard(0)])
    made = zeros(["float64", [2], "cpu", True], [None, plain, sharded], META)
    assert isinstance(made, DTensor)
    assert (made.dtype, made.to_local().tolist(), made.placements) == (torch.float64, [0.0, 0.0], (Shard(0),))
    assert zeros(["float32", [3], "cpu", True], [plain, sharded], CPU) is None
    like = zeros(["float32", [2], "cuda", False], [sharded, plain], META)
    assert like is not None
    assert (like.device, like.requires_grad, isinstance(like, DTensor)) == (CPU, False, False)
