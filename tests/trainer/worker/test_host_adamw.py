"""AdamW in host memory computes what AdamW computes; the learning-rate schedule."""

import pytest
import torch
from torch import nn

from trainer.parallel.data import FsdpConfig
from trainer.parallel.parallel_config import ParallelConfig
from trainer.protocol.config import JobConfig, OptimizerConfig
from trainer.worker.optimizer import HostAdamW, adamw, learning_rate, prime
from trainer.worker.workload import BaseWorkload, WorkloadError, build_optimizer


def trained(*, on_host: bool) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3))
    optimizer = adamw(model, OptimizerConfig(lr=0.1), on_host=on_host)
    prime(optimizer)
    optimizer.state.clear()
    for _ in range(5):
        model(torch.randn(4, 6)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters()), optimizer


def test_the_same_bits_as_adamw() -> None:
    (device, plain), (host, made) = trained(on_host=False), trained(on_host=True)
    assert isinstance(made, HostAdamW)
    assert all(torch.equal(one, other) for one, other in zip(device, host, strict=True))
    for one, other in zip(device, host, strict=True):
        assert {key: value.tolist() for key, value in plain.state[one].items()} == {
            key: value.tolist() for key, value in made.state[other].items()
        }


def test_parameters_without_a_gradient_are_left_alone() -> None:
    model = nn.Linear(2, 2)
    optimizer = adamw(model, OptimizerConfig(), on_host=True)
    optimizer.step()
    assert not optimizer.state


def test_an_optimizer_of_ones_own_is_refused() -> None:
    class Own(BaseWorkload):
        def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=0.1)

    config = JobConfig(parallel=ParallelConfig(fsdp=FsdpConfig(offload="optimizer")))
    with pytest.raises(WorkloadError, match="Own builds a SGD of its own.*type parallel.fsdp.offload=all"):
        build_optimizer(Own(config), nn.Linear(2, 2))


OPTIMIZER = OptimizerConfig(warmup_steps=10, lr=1.0, min_lr_ratio=0.1)


@pytest.mark.parametrize(("step", "rate"), [(1, 0.1), (5, 0.5), (10, 1.0), (60, 0.55), (110, 0.1)])
def test_warm_up_then_cosine(step, rate):
    assert learning_rate(OPTIMIZER, 110, step) == pytest.approx(rate)


def test_without_warm_up_it_begins_near_the_peak():
    assert learning_rate(OptimizerConfig(warmup_steps=0, lr=1.0), 100, 1) == pytest.approx(1.0, abs=1e-3)


def test_a_run_shorter_than_its_warm_up_only_warms_up():
    assert [learning_rate(OPTIMIZER, 4, step) for step in (1, 4)] == pytest.approx([0.1, 0.4])
