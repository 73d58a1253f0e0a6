"""What a checkpoint holds: names, generators, and an optimizer's state that exists before it is read."""

import torch
from torch import nn

from trainer.contract.config import OptimizerConfig
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


def test_floating_buffers_stand_under_their_rank():
    assert list(checkpoint_contents.rank_buffers(Tied(), 3)) == ["buffers/rank-00003/kept"]
    assert "model/kept" not in checkpoint_contents.shared_tensors(Tied())
