"""Real optimizers continue bit for bit after their state went through a checkpoint."""

import json
import math
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import prodigyopt
import pytest
import schedulefree
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lion_pytorch import Lion
from torch import nn
from torch.optim.adagrad import Adagrad

from checkpointing.storage.durable import canonical
from trainer.worker import optimizer as optimizers
from trainer.worker.saved_state import object_state
from trainer.worker.saved_state.optimizer_state import OptimizerState
from trainer.worker.workload import WorkloadError

optim = torch.optim
Make = Callable[[nn.Module], torch.optim.Optimizer]


def simple(kind: Any, **options: Any) -> Make:
    return lambda net: kind(net.parameters(), **options)


def two_groups(kind: Any, **options: Any) -> Make:
    def make(net: nn.Module) -> torch.optim.Optimizer:
        small = [parameter for parameter in net.parameters() if parameter.ndim < 2]
        large = [parameter for parameter in net.parameters() if parameter.ndim >= 2]
        return kind([{"params": large, "weight_decay": 0.1}, {"params": small, "weight_decay": 0.0}], **options)

    return make


class Counting(optim.SGD):
    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, lr=0.1, **options)
        self.total = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.total += 1
        loose = self.state.setdefault("seen", {"steps": [], "mean": torch.zeros(2)})
        loose["steps"].append(self.total)
        loose["mean"] += 0.5
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            group["best"] = min(group.get("best", math.inf), -1.0 * group["k"])
            group["pair"] = (group["k"], None, True, 0.1 * group["k"])
            group["estimate"] = group.get("estimate", torch.zeros(())) + 0.25
            if group["k"] == 3:
                group["late"] = torch.arange(3.0)
            for parameter in group["params"]:
                held = self.state[parameter]
                held["step"] = held.get("step", 0) + 1
                held["history"] = [*held.get("history", []), parameter.sum()][-2:]
                held["nothing"] = None
                if held["step"] == 4:
                    held["slow"] = parameter.detach().clone()
                if "slow" in held:
                    parameter.lerp_(held["slow"], 0.5)
                if parameter.grad is not None:
                    parameter -= 0.01 * self.total * group["estimate"] * parameter.grad * held["history"][0].tanh()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "total": self.total, "scale": torch.tensor([self.total / 3])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total = state["total"]
        assert state["scale"].item() == pytest.approx(self.total / 3)
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


class Derived(optim.SGD):
    """Scales its steps by a value that it derives after each step and in `load_state_dict()`."""

    scale = 1.0

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)

    def derive(self) -> None:
        buffers = [held["momentum_buffer"] for held in self.state.values() if "momentum_buffer" in held]
        self.scale = 1.0 + float(sum(buffer.abs().sum() for buffer in buffers))

    def step(self, closure: Any = None) -> None:
        for held in self.state.values():
            if held.get("momentum_buffer") is not None:
                held["momentum_buffer"] /= self.scale
                held["wide"] = held.get("wide", torch.zeros((), dtype=torch.float64)) + 0.1
        super().step()
        self.derive()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.derive()
        for held in self.state.values():
            held["momentum_buffer"] = None


class DerivedByHook(Derived):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.register_load_state_dict_post_hook(DerivedByHook.derive)

    load_state_dict = optim.SGD.load_state_dict


REAL: dict[str, Make] = {
    "Adadelta": simple(optim.Adadelta),
    "Adafactor": simple(optim.Adafactor),
    "Adagrad": simple(Adagrad, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adam": simple(optim.Adam),
    "Adam-amsgrad": simple(optim.Adam, amsgrad=True, foreach=True),
    "Adam-lr-tensor": simple(optim.Adam, lr=torch.tensor(0.01)),
    "Adam-betas-tensors": simple(optim.Adam, betas=(torch.tensor(0.9), torch.tensor(0.99)), foreach=False),
    "Adamax": simple(optim.Adamax),
    "AdamW-fused": two_groups(optim.AdamW, fused=True),
    "ASGD": simple(optim.ASGD, t0=2.0, lambd=0.1),
    "Muon": lambda net: optim.Muon([p for p in net.parameters() if p.ndim == 2]),
    "NAdam": simple(optim.NAdam, decoupled_weight_decay=True),
    "RAdam": simple(optim.RAdam),
    "RMSprop": simple(optim.RMSprop, momentum=0.9, centered=True),
    "Rprop": simple(optim.Rprop),
    "SGD": simple(optim.SGD),
    "SGD-momentum": two_groups(optim.SGD, momentum=0.9, dampening=0.1),
    "SGD-nesterov": simple(optim.SGD, momentum=0.9, nesterov=True, maximize=True),
    "ScheduleFree-AdamW": two_groups(schedulefree.AdamWScheduleFree, warmup_steps=3),
    "ScheduleFree-SGD": simple(schedulefree.SGDScheduleFree, warmup_steps=9),
    "ScheduleFree-RAdam": simple(schedulefree.RAdamScheduleFree),
    "ScheduleFree-wrapped": lambda net: schedulefree.ScheduleFreeWrapper(
        optim.SGD(net.parameters(), lr=0.1), momentum=0.9, weight_decay_at_y=0.1
    ),
    "Prodigy": simple(prodigyopt.Prodigy, weight_decay=0.01, use_bias_correction=True),
    "Prodigy-groups": two_groups(prodigyopt.Prodigy, d0=1e-3, growth_rate=1.5, slice_p=2),
    "Derived": simple(Derived),
    "DerivedByHook": simple(DerivedByHook),
    "Lion": simple(Lion, weight_decay=0.1),
    "Counting": two_groups(Counting),
    "Counting-some": lambda net: Counting([net[0].weight, net.unused]),
}


class Run:
    def __init__(self, make: Make) -> None:
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        self.net.unused = nn.Parameter(torch.ones(2, 2))
        self.optimizer = make(self.net)
        self.state = OptimizerState(self.net, self.optimizer)
        self.state.prime()

    def train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            self.net(x).square().mean().backward()
            optimizers.set_learning_rate(self.optimizer, 0.05 / step)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def saved(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors = {name: parameter.detach() for name, parameter in self.net.named_parameters()}
        of_optimizer = self.state.tensors()
        facts = json.loads(canonical(self.state.facts(of_optimizer)))
        return {key: tensor.clone() for key, tensor in {**tensors, **of_optimizer}.items()}, facts

    def restore(self, tensors: dict[str, torch.Tensor], facts: dict[str, Any] | None) -> list[str]:
        with torch.no_grad():
            for name, parameter in self.net.named_parameters():
                parameter.copy_(tensors[name])
            targets = self.state.targets(facts)
            for key in targets.keys() & tensors.keys():
                assert targets[key].shape == tensors[key].shape, key
                targets[key].copy_(tensors[key])
        absent = targets.keys() - tensors.keys()
        assert not absent or facts is None
        return self.state.restore(facts, absent)

    def everything(self) -> str:
        tensors: dict[str, torch.Tensor] = {}
        names = {parameter: name for name, parameter in self.net.named_parameters()}
        state = {
            names.get(key, key): dict(sorted(value.items())) for key, value in self.optimizer.state.items() if value
        }
        groups = [{key: value for key, value in g.items() if key != "params"} for g in self.optimizer.param_groups]
        held = sorted(state.items()), [sorted(group.items()) for group in groups]
        told = object_state.text(object_state.encode([*map(list, held)], "", tensors, {}))
        values = {key: (str(tensor.dtype), tensor.tolist()) for key, tensor in tensors.items()}
        return "\n".join([told, str(values), str([parameter.tolist() for parameter in self.net.parameters()])])


def fresh(make: Make) -> Run:
    run = Run(make)
    run.state.reset()
    return run


@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.parametrize("name", REAL)
def test_restored_it_goes_on_with_the_same_bits(name: str, at: int) -> None:
    calm = fresh(REAL[name])
    calm.train(1, at)
    tensors, facts = calm.saved()
    again = Run(REAL[name])
    assert again.restore(tensors, facts) == []
    optimizers.set_learning_rate(again.optimizer, 0.05 / at)
    assert again.everything() == calm.everything()
    calm.train(at + 1, 9)
    again.train(at + 1, 9)
    assert again.everything() == calm.everything()
    assert again.saved()[1] == calm.saved()[1]


@pytest.mark.parametrize("name", REAL)
def test_priming_leaves_no_trace_in_a_run_that_begins(name: str) -> None:
    torch.manual_seed(1)
    primed, run = fresh(REAL[name]), Run.__new__(Run)
    torch.manual_seed(1)
    run.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    run.net.unused = nn.Parameter(torch.ones(2, 2))
    run.optimizer = REAL[name](run.net)
    optimizers.train_mode(run.optimizer)
    primed.train(1, 3)
    run.train(1, 3)
    assert primed.everything() == run.everything()


def test_an_error_of_the_first_step_is_raised_as_it_is() -> None:
    class Failing(optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise RuntimeError("no kernel for this type")

    with pytest.raises(RuntimeError, match=r"^no kernel for this type$"):
        Run(simple(Failing))


# ---- whose a value is


def net_and(make: Make) -> tuple[nn.Module, torch.optim.Optimizer, OptimizerState]:
    net = nn.Linear(3, 2)
    optimizer = make(net)
    return net, optimizer, OptimizerState(net, optimizer)


def test_what_the_configuration_gives_is_not_state() -> None:
    _, optimizer, held = net_and(two_groups(optim.AdamW, lr=torch.tensor(0.1)))
    optimizer.param_groups[0]["lr"] = 7.0
    assert held.groups.changed_values() == []
    optimizer.param_groups[1]["betas"] = (0.5, 0.6)
    (group,) = held.groups.changed_values()
    assert (group["count"], group["first"]) == (1, "bias")
    assert group["values"] == {"betas": {"value": {"tuple": [0.5, 0.6]}, "given": '{"tuple": [0.9, 0.999]}'}}


def test_settings_follow_the_configuration_and_state_the_checkpoint() -> None:
    _, first, before = net_and(simple(optim.AdamW, weight_decay=0.1, betas=(0.9, 0.95)))
    first.param_groups[0].update(betas=(0.5, 0.6), k=4, limit=math.inf, odd=math.nan, name="a")
    facts = json.loads(canonical(before.facts({})))
    _, second, after = net_and(simple(optim.AdamW, weight_decay=0.2, betas=(0.9, 0.99)))
    after.prime()
    after.targets(facts)
    (said,) = after.restore(facts, ())
    group = second.param_groups[0]
    assert (group["weight_decay"], group["betas"], group["k"], group["limit"]) == (0.2, (0.5, 0.6), 4, math.inf)
    assert math.isnan(group["odd"])
    assert said == 'betas is now given as {"tuple": [0.9, 0.99]}, but the value set by training is kept'


def test_a_group_of_other_parameters_is_refused_by_name_and_settings_never_are() -> None:
    _, first, before = net_and(two_groups(optim.SGD))
    _, _, after = net_and(simple(optim.SGD))
    after.prime()
    assert after.targets(before.facts({})) == {}
    first.param_groups[1]["k"] = 3
    with pytest.raises(
        WorkloadError, match=r"values \(k\) of a parameter group of 1 parameters, the first of which is bias"
    ):
        after.targets(before.facts({}))


def test_groups_in_another_order_are_found_by_their_parameters() -> None:
    def turned(net: nn.Module) -> torch.optim.Optimizer:
        return optim.SGD([{"params": [net.bias]}, {"params": [net.weight]}])

    _, first, before = net_and(two_groups(optim.SGD))
    first.param_groups[1]["k"] = 3
    _, second, after = net_and(turned)
    after.prime()
    after.targets(before.facts({}))
    assert after.restore(before.facts({}), ()) == []
    assert [group.get("k") for group in second.param_groups] == [3, None]


def test_a_checkpoint_without_facts_loads_and_what_begins_anew_is_said() -> None:
    make = REAL["ScheduleFree-SGD"]
    run = fresh(make)
    run.train(1, 4)
    tensors, _ = run.saved()
    again = Run(make)
    (said,) = again.restore(tensors, None)
    assert said == ("the checkpoint lacks the optimizer's k, lr_max: set to initial values")
    plain = fresh(REAL["Adam"])
    plain.train(1, 4)
    assert Run(REAL["Adam"]).restore(plain.saved()[0], None) == []


def test_groups_and_absent_state_begin_anew_with_a_checkpoint_without_facts() -> None:
    run = Run(REAL["Counting"])
    run.optimizer.param_groups[0]["k"] = 7
    absent = [key for key in run.state.targets(None) if key.startswith("optimizer/0.bias/")]
    lost = "best, estimate, k, pair, history, nothing, step"
    assert run.state.restore(None, absent) == [f"the checkpoint lacks the optimizer's {lost}: set to initial values"]
    assert [group.get("k") for group in run.optimizer.param_groups] == [None, None]
    names = {parameter: name for name, parameter in run.net.named_parameters()}
    held = {names[key] for key in run.optimizer.state if key in names}
    assert held == set(names.values()) - {"0.bias"}


def test_an_unsavable_state_is_refused_and_an_unsavable_group_value_is_remembered() -> None:
    net, optimizer, held = net_and(simple(optim.SGD))
    optimizer.param_groups[0]["hook"] = print
    assert held.groups.changed_values() == []
    assert held.groups.unsaved == {"hook": "hook of the parameter groups (a builtin_function_or_method)"}
    optimizer.state[net.weight]["rule"] = object()
    with pytest.raises(
        WorkloadError, match=r"the state of SGD cannot be saved: optimizer/weight/rule is a builtins.object"
    ):
        held.tensors()


def test_values_of_groups_are_the_same_objects_after_an_optimizer_has_loaded_what_it_has_beside_them() -> None:
    _, optimizer, held = net_and(simple(optim.SGD, lr=0.1))
    rate = torch.tensor(0.5)
    optimizer.param_groups[0]["lr"] = rate
    held._load({})
    assert optimizer.param_groups[0]["lr"] is rate


def test_state_of_the_checkpoint_that_nothing_here_is_sharded_like_is_refused() -> None:
    net = nn.Linear(2, 2)
    state = OptimizerState(net, optim.AdamW(net.parameters()))
    state.prime()
    late = {"optimizer/weight/odd": ["float32", [2, 2], "cpu", True]}
    with pytest.raises(WorkloadError, match=r"has optimizer/weight/odd .*, which AdamW does not have now"):
        state.targets({"holders": {"without": []}, "late": late})


def test_a_parameter_outside_of_the_model_is_refused() -> None:
    with pytest.raises(WorkloadError, match=r"a parameter of shape \(7,\) that the model does not have"):
        net_and(lambda net: optim.SGD([*net.parameters(), nn.Parameter(torch.zeros(7))]))


# ---- values

TEXTS = st.text(st.characters()) | st.just("caf\udce9.txt")
"""Includes file names that are not UTF-8."""
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.complex_numbers(allow_nan=False)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(TEXTS | st.integers() | st.tuples(st.integers(), TEXTS), inner, max_size=3),
        st.dictionaries(TEXTS, inner, max_size=3).map(OrderedDict),
        st.lists(inner, max_size=3).map(lambda items: deque(items, 5)),
        st.frozensets(st.integers() | TEXTS, max_size=3),
        st.sets(st.booleans() | TEXTS, max_size=3),
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    ),
    max_leaves=12,
)


def spelled(value: Any) -> Any:
    """Return a value with its types and order as comparable text; NaN is not equal to itself."""
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(repr, value))
    if isinstance(value, dict):
        return type(value), [(repr(key), spelled(inner)) for key, inner in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return type(value), getattr(value, "maxlen", None), [spelled(inner) for inner in value]
    return repr(value)


@settings(max_examples=200)
@given(value=VALUES)
def test_a_value_comes_back_with_every_type_as_it_was(value: Any) -> None:
    encoded = object_state.encode(value, "here", {}, {})
    again = object_state.decode(json.loads(canonical(encoded)), {}, {})
    assert spelled(again) == spelled(value)
    assert object_state.text(object_state.encode(again, "here", {}, {})) == object_state.text(encoded)


def test_tensors_and_parameters_in_a_value_come_back_by_name() -> None:
    parameter, tensor = nn.Parameter(torch.ones(2)), torch.arange(3)
    held: dict[str, torch.Tensor] = {}
    encoded = object_state.encode({"a": (tensor, [1.5]), parameter: -0.0}, "x", held, {parameter: "net.w"})
    assert object_state.references(encoded) == ["x:a:0"]
    again = object_state.decode(json.loads(canonical(encoded)), held, {"net.w": parameter})
    assert torch.equal(again["a"][0], tensor)
    assert str(again[parameter]) == "-0.0"
