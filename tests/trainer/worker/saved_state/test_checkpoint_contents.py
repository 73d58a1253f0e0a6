"""What a checkpoint holds: names, generators, and an optimizer's state that exists before it is read."""

import random

import torch
from torch import nn

from trainer.contract.config import TrainConfig
from trainer.worker import optimizer as optimizers
from trainer.worker.saved_state import checkpoint_contents


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


def test_generators_go_on_where_they_were_packed():
    torch.manual_seed(5)
    random.seed(5)
    random.gauss(0, 1)  # leaves half a pair behind, which belongs to the state
    packed = checkpoint_contents.pack_rng(torch.device("cpu"))
    expected = (torch.rand(3), random.random(), random.gauss(0, 1))
    torch.manual_seed(6)
    random.seed(6)
    checkpoint_contents.unpack_rng(packed, torch.device("cpu"))
    found = (torch.rand(3), random.random(), random.gauss(0, 1))
    assert torch.equal(found[0], expected[0])
    assert found[1:] == expected[1:]


def test_priming_makes_the_state_and_leaves_the_weights():
    model = nn.Linear(4, 3)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = optimizers.adamw(model, TrainConfig())
    optimizers.prime(optimizer)
    keys = sorted(checkpoint_contents.optimizer_tensors(model, optimizer))
    assert keys[:3] == ["optimizer/bias/exp_avg", "optimizer/bias/exp_avg_sq", "optimizer/bias/step"]
    assert len(keys) == 6
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [group["lr"] for group in optimizer.param_groups] == [TrainConfig().lr] * 2
    optimizers.forget(optimizer)
    assert checkpoint_contents.optimizer_tensors(model, optimizer) == {}


def test_only_matrices_decay():
    optimizer = optimizers.adamw(nn.Linear(4, 3), TrainConfig(weight_decay=0.3))
    assert [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups] == [(0.3, 1), (0.0, 1)]


def test_the_state_of_some_parameters_can_be_forgotten():
    model = nn.Linear(4, 3)
    optimizer = optimizers.adamw(model, TrainConfig())
    optimizers.prime(optimizer)
    absent = ["optimizer/bias/exp_avg", "optimizer/bias/step", "rng/rank-00003"]
    optimizers.forget(optimizer, checkpoint_contents.without_state(model, absent))
    assert sorted({key.split("/")[1] for key in checkpoint_contents.optimizer_tensors(model, optimizer)}) == ["weight"]


def test_floating_buffers_stand_under_their_rank():
    assert list(checkpoint_contents.rank_buffers(Tied(), 3)) == ["buffers/rank-00003/kept"]
    assert "model/kept" not in checkpoint_contents.shared_tensors(Tied())
