"""Optimizer state in unusual places is restored, reported as lost, or refused; priming leaves no trace."""

import json
from collections import defaultdict
from collections.abc import Callable
from threading import Lock
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from checkpointing.storage.durable import canonical
from trainer.worker import optimizer as optimizers
from trainer.worker.saved_state import object_state
from trainer.worker.saved_state.optimizer_state import OptimizerState
from trainer.worker.workload import WorkloadError

optim = torch.optim
Make = Callable[[nn.Module], torch.optim.Optimizer]

# ---- every tensor of a nested value has a path of its own

KEYS = st.sampled_from([
    "a", "b", "a:b", "b:0", "0", "1", "-1", 0, 1, -1, 0.5, "0.5", None, "None", ("a", 1), "('a', 1)", "a/b", "%0",
    "%s1", "caf\udce9", "caf%Udce9",
])  # fmt: skip
NESTED = st.recursive(
    st.integers(0, 2**20).map(torch.tensor),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def values(value: Any) -> str:
    if isinstance(value, dict):
        return str([(repr(key), values(item)) for key, item in value.items()])
    if isinstance(value, list | tuple):
        return f"{type(value)} {list(map(values, value))}"
    return str(value.item())


@settings(max_examples=200)
@given(value=NESTED)
def test_no_two_tensors_share_a_path(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    encoded = object_state.encode(value, "here", tensors, {})
    assert sorted(object_state.references(encoded)) == sorted(tensors)
    assert values(object_state.decode(json.loads(canonical(encoded)), tensors, {})) == values(value)


def test_paths_do_not_depend_on_the_order_of_keys() -> None:
    for keys in ([1, "1", 0.5, "0.5"], ["0.5", "1", 0.5, 1]):
        tensors: dict[str, torch.Tensor] = {}
        object_state.encode({key: torch.zeros(1) for key in keys}, "here", tensors, {})
        assert sorted(tensors) == ["here:%(0.5)", "here:%s1", "here:0.5", "here:1"]


def test_tensors_that_are_keys_and_keys_that_are_nan_keep_apart() -> None:
    value = {torch.tensor(1): torch.tensor(2), torch.tensor(3): torch.tensor(4), float("nan"): torch.tensor(5)}
    value[float("nan")] = torch.tensor(6)
    tensors: dict[str, torch.Tensor] = {}
    object_state.encode(value, "here", tensors, {})
    assert sorted(tensor.item() for tensor in tensors.values()) == [1, 2, 3, 4, 5, 6]


@given(key=st.text(st.characters()) | st.integers() | KEYS.filter(lambda key: type(key) in (str, int)))
def test_a_key_comes_back_from_its_path_part(key: str | int) -> None:
    word = object_state.path_part(key)
    assert object_state.parse_path_part(word) == key
    assert not set(word) & {":", "/"}
    assert word.encode().decode() == word


# ---- priming


def started(make: Make) -> tuple[nn.Module, torch.optim.Optimizer, OptimizerState]:
    torch.manual_seed(1)
    net = nn.Linear(3, 2)
    optimizer = make(net)
    return net, optimizer, OptimizerState(net, optimizer)


class FixedDecay(optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.mul_(0.99)
        super().step(closure)


class Normalised(optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad.div_(parameter.grad.norm())
        super().step(closure)


@pytest.mark.parametrize(
    "make",
    [
        lambda net: optim.Adam(net.parameters(), eps=0.0),
        lambda net: FixedDecay(net.parameters(), lr=0.1),
        lambda net: Normalised(net.parameters(), lr=0.1),
    ],
    ids=["Adam without eps", "fixed decay", "normalised"],
)
def test_priming_leaves_the_weights_bit_for_bit(make: Make) -> None:
    net, _, state = started(make)
    with torch.no_grad():
        net.weight[0, 0], net.weight[0, 1] = -0.0, float("nan")
    before = [parameter.detach().clone() for parameter in net.parameters()]
    state.prime()
    for parameter, was in zip(net.parameters(), before, strict=True):
        assert torch.equal(parameter.detach().view(torch.int32), was.view(torch.int32))


def test_hooks_do_not_see_the_step_of_priming_and_are_there_afterwards() -> None:
    seen: list[str] = []
    net, optimizer, state = started(lambda net: optim.SGD(net.parameters(), lr=0.1))
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    gone = optimizer.register_step_post_hook(lambda *_: seen.append("gone"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    everywhere = register_optimizer_step_post_hook(lambda *_: seen.append("all"))
    try:
        state.prime()
        assert seen == []
        gone.remove()
        optimizer.step()
    finally:
        everywhere.remove()
    assert sorted(seen) == ["after", "all", "before"]


# ---- state that is not under a string in a parameter's own


class Numbered(optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            held = self.state[parameter]
            held.setdefault(0, torch.zeros_like(parameter)).mul_(0.9).add_(parameter.grad)
            held["0"] = parameter.detach().clone()
            held[1] = held.get(1, 0) + 1
            held["a/b"] = [held[0] + 1]
            parameter.add_(held[0], alpha=-self.param_groups[0]["lr"])


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(1, steps + 1):
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, float(step))
        optimizers.set_learning_rate(optimizer, 0.1)
        optimizer.step()


def carried_over(first: OptimizerState, second: OptimizerState) -> list[str]:
    tensors = first.tensors()
    facts = json.loads(canonical(first.facts(tensors)))
    second.prime()
    for key, target in second.targets(facts).items():
        target.copy_(tensors[key])
    return second.restore(facts, ())


def test_keys_come_back_as_the_numbers_that_they_are() -> None:
    net, optimizer, state = started(lambda net: Numbered(net.parameters()))
    trained(net, optimizer, 3)
    other, again, restored = started(lambda net: Numbered(net.parameters()))
    assert carried_over(state, restored) == []
    for ours, theirs in zip(net.parameters(), other.parameters(), strict=True):
        assert {repr(key): str(value) for key, value in optimizer.state[ours].items()} == {
            repr(key): str(value) for key, value in again.state[theirs].items()
        }


def test_a_key_of_another_type_is_refused() -> None:
    net, optimizer, state = started(lambda net: optim.SGD(net.parameters()))
    optimizer.state[net.weight][("row", 1)] = torch.zeros(2)
    key = r"state for weight has key \(.row., 1\) of type tuple; keys must be strings or integers"
    with pytest.raises(WorkloadError, match=key):
        state.tensors()


def test_a_parameter_with_a_slash_in_its_name_keeps_its_state_to_itself() -> None:
    class Slashed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.d = nn.ParameterDict({"w": nn.Parameter(torch.ones(2)), "w/b": nn.Parameter(torch.ones(2))})

    def made() -> tuple[nn.Module, torch.optim.Optimizer, OptimizerState]:
        net = Slashed()
        optimizer = optim.AdamW(net.parameters())
        return net, optimizer, OptimizerState(net, optimizer)

    net, optimizer, state = made()
    trained(net, optimizer, 2)
    _, again, restored = made()
    assert carried_over(state, restored) == []
    assert [sorted(held) for held in again.state.values()] == [["exp_avg", "exp_avg_sq", "step"]] * 2


class Combined(optim.Optimizer):
    def __init__(self, net: Any) -> None:
        self.inner = [optim.SGD([net.weight], lr=0.1, momentum=0.9), optim.AdamW([net.bias], lr=0.1)]
        super().__init__(list(net.parameters()), {"lr": 0.1})
        self.param_groups = [group for inner in self.inner for group in inner.param_groups]

    def step(self, closure: Any = None) -> None:
        for inner in self.inner:
            inner.step()


class CombinedDict(Combined):
    def state_dict(self) -> dict[str, Any]:
        return {"state": {at: inner.state_dict()["state"] for at, inner in enumerate(self.inner)}, "param_groups": []}


class Shared(Combined):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for inner in self.inner:
            self.state.update(inner.state)


@pytest.mark.parametrize("kind", [Combined, CombinedDict])
def test_state_in_other_optimizers_is_refused(kind: Any) -> None:
    _, _, state = started(kind)
    with pytest.raises(WorkloadError, match=f"{kind.__name__} keeps state in other optimizers, not in its own `state`"):
        state.prime()


def test_state_shared_with_other_optimizers_is_not() -> None:
    _, _, state = started(Shared)
    state.prime()
    assert "optimizer/weight/momentum_buffer" in state.tensors()


def test_state_of_a_tensor_that_is_no_parameter_is_refused() -> None:
    class Masters(optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            self.state[torch.zeros(3, 2)]["exp_avg"] = torch.zeros(3, 2)

    _, _, state = started(lambda net: Masters(net.parameters(), lr=0.1))
    with pytest.raises(
        WorkloadError, match=r"Masters keeps state for a tensor of shape \(3, 2\), which is not a parameter"
    ):
        state.prime()


def hooked(net: nn.Module) -> torch.optim.Optimizer:
    optimizer: Any = optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    optimizer.extra = {"scale": 1.0, "mean": torch.zeros(3)}

    def put(_: Any, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, "extra": dict(optimizer.extra)}

    def take(_: Any, state: dict[str, Any]) -> None:
        optimizer.extra = state["extra"]

    optimizer.register_state_dict_post_hook(put)
    optimizer.register_load_state_dict_pre_hook(take)
    return optimizer


def test_what_a_hook_adds_to_the_state_dict_comes_back() -> None:
    _, first, state = started(hooked)
    first.extra.update(scale=0.5, mean=torch.arange(3.0))
    _, second, restored = started(hooked)
    assert carried_over(state, restored) == []
    assert second.extra["scale"] == 0.5
    assert second.extra["mean"].tolist() == [0.0, 1.0, 2.0]


# ---- values of groups, of types that are not kept


class Tallying(optim.SGD):
    def __init__(self, parameters: Any, value: Any, change: Callable[[Any], None]) -> None:
        super().__init__(parameters, lr=0.1)
        self.change = change
        for group in self.param_groups:
            group["tally"] = value

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            self.change(group["tally"])


def count(tally: Any) -> None:
    tally["n"] += 1


def draw(generator: torch.Generator) -> None:
    torch.rand(1, generator=generator)


CHANGING: dict[str, tuple[Callable[[], Any], Callable[[Any], None], Callable[[Any], Any]]] = {
    "defaultdict": (lambda: defaultdict(float), count, dict),
    "nested": (lambda: {"a": [defaultdict(float)]}, lambda tally: count(tally["a"][0]), repr),
    "tensors": (lambda: defaultdict(list, a=[torch.zeros(2)]), lambda tally: tally["a"][0].add_(1), repr),
    "bytearray": (lambda: bytearray(2), lambda tally: tally.append(1), bytes),
    "Generator": (lambda: torch.Generator().manual_seed(3), draw, lambda tally: tally.get_state().tolist()),
}


@pytest.mark.parametrize("name", CHANGING)
def test_a_change_in_place_is_told_and_priming_is_taken_back(name: str) -> None:
    make, change, look = CHANGING[name]
    groups = lambda net: [{"params": [net.weight]}, {"params": [net.bias]}]  # noqa: E731
    net, optimizer, state = started(lambda net: Tallying(groups(net), make(), change))
    state.prime()
    state.reset()
    assert look(optimizer.param_groups[0]["tally"]) == look(make())
    assert optimizer.param_groups[0]["tally"] is optimizer.param_groups[1]["tally"]
    state.facts(state.tensors())
    assert state.unsaved_values() == []
    trained(net, optimizer, 1)
    state.facts(state.tensors())
    assert state.unsaved_values() == [f"tally of the parameter groups (a {type(make()).__name__})"]
    state.reset()
    assert look(optimizer.param_groups[0]["tally"]) == look(make())


@pytest.mark.parametrize("value", [print, len, nn.Linear(1, 1), lambda: None, float])
def test_what_is_only_called_is_not_told(value: Any) -> None:
    net, optimizer, state = started(lambda net: Tallying(net.parameters(), value, lambda _: None))
    state.prime()
    state.reset()
    trained(net, optimizer, 1)
    state.facts(state.tensors())
    assert state.unsaved_values() == []
    assert optimizer.param_groups[0]["tally"] is value


def test_what_does_not_tell_whether_it_changed_is_told() -> None:
    lock = Lock()
    _, optimizer, state = started(lambda net: Tallying(net.parameters(), {"lock": lock}, lambda _: None))
    state.prime()
    state.reset()
    state.facts(state.tensors())
    assert state.unsaved_values() == ["tally of the parameter groups (a dict)"]
    assert optimizer.param_groups[0]["tally"]["lock"] is lock


def test_a_reset_gives_groups_the_very_parameters_back() -> None:
    net, optimizer, state = started(lambda net: Tallying(net.parameters(), None, lambda _: None))
    optimizer.param_groups[0]["first"] = [net.weight]
    state = OptimizerState(net, optimizer)
    state.reset()
    assert optimizer.param_groups[0]["first"][0] is net.weight


class WarmUp(optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        self.begun = True
        super().step(closure)


@pytest.mark.parametrize("within", [False, True])
def test_the_first_step_of_an_optimizer_is_its_first_also_by_its_own_count(within: bool) -> None:
    net, optimizer, state = started(lambda net: WarmUp(net.parameters()))
    if within:
        outer = optim.SGD(net.parameters(), lr=0.1)
        outer.inner = optimizer  # type: ignore[attr-defined]
        outer.step = optimizer.step  # type: ignore[method-assign]
        state = OptimizerState(net, outer)
    state.prime()
    assert vars(optimizer)["steps"] == 1
    state.reset()
    assert optimizer.steps == 0
    assert "begun" not in vars(optimizer)
