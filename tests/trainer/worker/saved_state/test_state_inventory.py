"""The inventory returns the current tensors without walking model and optimizer before every save."""

import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from trainer.worker import optimizer as optimizers
from trainer.worker.saved_state import checkpoint_contents
from trainer.worker.saved_state.rng_state import pack_rng, rng_name
from trainer.worker.saved_state.unsaved_state import StateInventory

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("later", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.9 * self.average + x.mean(0)  # a new tensor every time
        return self.norm(self.first(x))


def trained(net: Net, optimizer: torch.optim.Optimizer) -> None:
    net(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def made(**options: Any) -> tuple[Net, torch.optim.Optimizer, StateInventory]:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    return net, optimizer, StateInventory(net, optimizer, rank=0, device=CPU, **options)


def expected(net: Net, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {
        **checkpoint_contents.shared_tensors(net),
        **{
            f"optimizer/{name}/{key}": value
            for name, parameter in net.named_parameters()
            for key, value in optimizer.state.get(parameter, {}).items()
            if isinstance(value, torch.Tensor)
        },
        **checkpoint_contents.rank_buffers(net, 0),
    }
    return {**found, rng_name(0): pack_rng(CPU)}


def assert_right(net: Net, optimizer: torch.optim.Optimizer, inventory: StateInventory) -> None:
    found, wanted = inventory.tensors(), expected(net, optimizer)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(found[key], tensor), key


def test_the_same_objects_come_again_without_a_walk() -> None:
    net = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    inventory = StateInventory(net, optimizer, rank=0, device=CPU)
    optimizers.prime(optimizer)
    first = inventory.tensors()
    for _ in range(3):
        net(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        assert inventory.tensors() is first
        assert torch.equal(first["model/weight"], net.weight)
    assert inventory.walks == 1


def test_every_change_of_what_is_held_is_seen() -> None:
    net, optimizer, inventory = made()
    optimizers.prime(optimizer)
    assert_right(net, optimizer, inventory)

    def replace_memory() -> None:
        net.first.weight.data = torch.full((4, 4), 3.0)

    def replace_state() -> None:
        held = optimizer.state[net.first.bias]
        held["exp_avg"] = held["exp_avg"] + 1

    def more_state() -> None:
        optimizer.state[net.first.bias]["extra"] = torch.ones(4)

    def other_parameter() -> None:
        net.first.bias = nn.Parameter(torch.full((4,), 5.0))

    def fill_buffer() -> None:
        net.later = torch.ones(2)

    def resize_buffer() -> None:
        net.later.resize_(1)

    changes: list[Callable[[], None]] = [
        lambda: trained(net, optimizer),
        optimizer.state.clear,
        lambda: trained(net, optimizer),
        lambda: optimizer.state.pop(net.first.bias),
        lambda: trained(net, optimizer),
        replace_memory,
        replace_state,
        more_state,
        other_parameter,
        fill_buffer,
        resize_buffer,
        lambda: net.register_buffer("more", torch.ones(3)),
        lambda: net.norm.register_module("inner", nn.BatchNorm1d(2)),
        lambda: net._buffers.pop("more"),
    ]
    for change in changes:
        change()
        assert_right(net, optimizer, inventory)


@pytest.mark.parametrize("options", [{}, {"lazy": True}], ids=["usual", "lazy"])
def test_in_lazy_mode_buffers_are_those_of_the_save(options: dict[str, Any]) -> None:
    net, optimizer, inventory = made(**options)
    trained(net, optimizer)
    trained(net, optimizer)
    saved = inventory.tensors()
    kept = {key: tensor.clone() for key, tensor in saved.items()}
    net.norm(torch.randn(8, 4))
    torch.rand(1)
    same = all(torch.equal(saved[key], kept[key]) for key in kept)
    assert same is bool(options)
    assert_right(net, optimizer, inventory)
    assert any("norm.running_mean" in key for key in kept)


def test_further_tensors_are_copied_in_lazy_mode_alone() -> None:
    own = torch.ones(2)
    usual, lazy = (made(more=lambda: {"own": own}, **options)[2].tensors() for options in ({}, {"lazy": True}))
    own.zero_()
    assert usual["own"] is own
    assert torch.equal(lazy["own"], torch.ones(2))


def test_the_random_generators_are_those_of_the_save() -> None:
    net, optimizer, inventory = made()
    before = inventory.tensors()[rng_name(0)].clone()
    torch.rand(3)
    assert not torch.equal(inventory.tensors()[rng_name(0)], before)


def test_looking_is_much_cheaper_than_walking() -> None:
    net = nn.ModuleList(nn.Linear(2, 2) for _ in range(400))
    optimizer = torch.optim.AdamW(net.parameters())
    optimizers.prime(optimizer)
    inventory = StateInventory(net, optimizer, rank=0, device=CPU)
    start = time.perf_counter()
    inventory.tensors()
    walk = time.perf_counter() - start
    looks = []
    for _ in range(9):
        start = time.perf_counter()
        inventory.tensors()
        looks.append(time.perf_counter() - start)
    assert inventory.walks == 1
    assert sorted(looks)[4] < walk / 2, (looks, walk)


def test_what_takes_the_place_of_something_else_is_seen() -> None:
    net = nn.Linear(4, 4)
    net.register_buffer("one", torch.ones(2))
    optimizer = torch.optim.AdamW(net.parameters())
    inventory = StateInventory(net, optimizer, rank=0, device=CPU)
    optimizers.prime(optimizer)
    inventory.tensors()
    held = optimizer.state[net.bias]
    held["other"] = held.pop("exp_avg")
    assert {"optimizer/bias/other"} == {key for key in inventory.tensors() if key.startswith("optimizer/bias/o")}
    net.register_buffer("two", torch.ones(2))
    assert "buffers/rank-00000/two" in inventory.tensors()
    net.register_buffer("three", net._buffers.pop("two"))
    found = inventory.tensors()
    assert ("buffers/rank-00000/two" in found, "buffers/rank-00000/three" in found) == (False, True)
    assert inventory.tensors() is found
