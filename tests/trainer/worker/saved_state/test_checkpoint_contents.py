"""Contents of a checkpoint: names, per-rank tensors, metadata."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.checkpointing.engine.thread_ranks import ThreadGroup, together
from trainer.protocol.config import OptimizerConfig
from trainer.worker import optimizer as optimizers
from trainer.worker.saved_state import checkpoint_contents
from trainer.worker.saved_state.checkpoint_contents import differing_tensors, tensor_metadata, zeros


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("kept", torch.ones(3))
        self.register_buffer("scratch", torch.ones(3), persistent=False)


def test_a_shared_parameter_is_kept_once_and_scratch_buffers_not_at_all():
    assert sorted(checkpoint_contents.model_tensors(Tied())) == ["model/first.bias", "model/first.weight", "model/kept"]


def test_priming_makes_the_state_and_leaves_the_weights():
    model = nn.Linear(4, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = optimizers.adamw(model, OptimizerConfig())
    optimizers.prime(optimizer)
    assert sorted(optimizer.state[model.bias]) == ["exp_avg", "exp_avg_sq", "step"]
    assert sorted(optimizer.state[model.weight]) == ["exp_avg", "exp_avg_sq", "step"]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [group["lr"] for group in optimizer.param_groups] == [OptimizerConfig().lr] * 2


def test_only_matrices_decay():
    optimizer = optimizers.adamw(nn.Linear(4, 3), OptimizerConfig(weight_decay=0.3))
    assert [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups] == [(0.3, 1), (0.0, 1)]


class Counters(nn.Module):
    same_on_all_ranks = ("alike",)

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.register_buffer("phase", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("alike", torch.ones(2, dtype=torch.int64))


def test_buffers_of_every_dtype_stand_under_their_rank():
    assert list(checkpoint_contents.rank_buffers(Tied(), 3)) == ["buffers/rank-00003/kept"]
    assert "model/kept" not in checkpoint_contents.shared_tensors(Tied())
    model = nn.ModuleDict({"net": Counters()})
    own = ["mask", "phase", "norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    assert list(checkpoint_contents.rank_buffers(model, 0)) == [f"buffers/rank-00000/net.{name}" for name in own]
    assert list(checkpoint_contents.shared_tensors(model)) == ["model/net.alike"]


@pytest.mark.parametrize(
    ("peer", "differ"),
    [
        ({"a": torch.ones(2), "b": torch.zeros(3)}, set()),
        ({"a": torch.ones(2), "b": torch.ones(3)}, {"b"}),
        ({"a": torch.zeros(2), "b": torch.ones(3)}, {"a", "b"}),
        ({"a": torch.ones(2), "b": torch.zeros(4)}, {"a", "b"}),
        ({"a": torch.ones(2), "c": torch.zeros(3)}, {"a", "b"}),
        ({"a": torch.ones(2)}, {"a", "b"}),
    ],
)
def test_what_differs_between_ranks_is_named_alike_on_all_of_them(
    monkeypatch: pytest.MonkeyPatch, peer: dict[str, torch.Tensor], differ: set[str]
) -> None:
    members, mine = ThreadGroup(2).members(), {"a": torch.ones(2), "b": torch.zeros(3), "c": torch.ones(1).to("meta")}

    def minimum(numbers: torch.Tensor) -> torch.Tensor:
        member = members[int(threading.current_thread().name)]
        return torch.tensor(member.minimum(numbers.flatten().tolist())).view(numbers.shape)

    def rank(at: int, tensors: dict[str, torch.Tensor]) -> set[str]:
        threading.current_thread().name = str(at)
        return differing_tensors(tensors)

    assert differing_tensors(mine) == set(), "there are no other ranks"
    size = [1]
    world = SimpleNamespace(is_initialized=lambda: True, get_world_size=lambda: size[0])
    monkeypatch.setattr(checkpoint_contents, "dist", world)
    monkeypatch.setattr(checkpoint_contents, "_minimum", minimum)
    assert differing_tensors(mine) == set(), "nor are there here"
    size[0] = 2
    first, second = together([lambda: rank(0, mine), lambda: rank(1, peer)])
    assert first == differ
    assert bool(second) == bool(differ)
    assert together([lambda: rank(0, {}), lambda: rank(1, {})]) == [set(), set()]


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
