"""Workloads whose state is unusual: each must come back bit for bit, or be refused by name.

`KEPT` are healthy ones, whose losses depend on what is unusual in them. `REFUSED` has for each refused one a part of
the message, and whether it can only be known at the first save.
"""

import copy
from collections import Counter, OrderedDict, deque
from typing import Any

import torch
from torch import nn

from trainer.worker.workload import BaseWorkload


class Points:
    """Noisy points on a plane; the position is the seed."""

    def __init__(self, rank: int, of: int) -> None:
        self.rank, self.of, self.consumed = rank, of, 0

    def take(self) -> list[Any]:
        generator = torch.Generator().manual_seed(self.consumed + self.rank)
        self.consumed += self.of
        x = torch.randn(8, 4, generator=generator)
        return [(x, x.sum(dim=1, keepdim=True))]

    def seek(self, consumed: int) -> None:
        self.consumed = consumed


class Usual(BaseWorkload):
    """A small network; `odd` is a layer in the middle that a case replaces."""

    def odd(self) -> nn.Module:
        return nn.Identity()

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 6), self.odd(), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 1))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def build_data(self, layout: Any) -> Any:
        return Points(layout.dp_rank, layout.dp_size)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(model(x), y)


KEPT: dict[str, type[Usual]] = {}
REFUSED: dict[str, tuple[type[Usual], str, bool]] = {}


def kept(case: type[Usual]) -> type[Usual]:
    KEPT[case.__name__] = case
    return case


def refused(words: str, *, at_save: bool = False) -> Any:
    def add(case: type[Usual]) -> type[Usual]:
        REFUSED[case.__name__] = (case, words, at_save)
        return case

    return add


def with_layer(name: str, layer: type[nn.Module], base: type[Usual] = Usual) -> type[Usual]:
    """A workload with this layer in the middle."""
    return type(name, (base,), {"odd": lambda self: layer(), "__module__": __name__})


class Layer(nn.Module):
    """A layer whose `scale()` follows from its buffers, which `seen()` changes in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.build()

    def build(self) -> None: ...

    def seen(self, x: torch.Tensor) -> None: ...

    def scale(self) -> Any: ...

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.training:
                self.seen(x)
            return_scale = self.scale()
        return x * (1.0 + 0.1 * return_scale)


# ---- buffers


class LateBuffer(Layer):
    """None until the first forward pass."""

    def build(self) -> None:
        self.register_buffer("ema", None)

    def seen(self, x: torch.Tensor) -> None:
        self.ema = x.mean(0) if self.ema is None else 0.9 * self.ema + 0.1 * x.mean(0)

    def scale(self) -> Any:
        return 0.0 if self.ema is None else self.ema


class BufferOfForward(Layer):
    """Registered in the first forward pass."""

    def seen(self, x: torch.Tensor) -> None:
        if not hasattr(self, "ema"):
            self.register_buffer("ema", torch.zeros(6, dtype=torch.float64))
        self.ema.add_(x.mean(0))

    def scale(self) -> Any:
        return self.ema.float()


class AttributeThenBuffer(LateBuffer):
    def build(self) -> None:
        self.ema = None

    def seen(self, x: torch.Tensor) -> None:
        if self.ema is None:
            del self.ema
            self.register_buffer("ema", x.mean(0))
        self.ema.mul_(0.9).add_(x.mean(0))


class BecomesNone(Layer):
    def build(self) -> None:
        self.register_buffer("once", torch.full((6,), 3.0))

    def seen(self, x: torch.Tensor) -> None:
        self.once = None

    def scale(self) -> Any:
        return 0.0 if self.once is None else self.once


class BecomesDeleted(Layer):
    def build(self) -> None:
        self.register_buffer("once", torch.full((6,), 3.0))

    def seen(self, x: torch.Tensor) -> None:
        self._buffers.pop("once", None)

    def scale(self) -> Any:
        return self._buffers.get("once", 0.0)


class Expanded(Layer):
    """Values that share one place in memory."""

    def build(self) -> None:
        self.register_buffer("one", torch.ones(1).expand(6))

    def seen(self, x: torch.Tensor) -> None:
        self.one = (self.one[:1] + x.mean()).expand(6)

    def scale(self) -> Any:
        return self.one


class ExpandedForGood(Layer):
    def build(self) -> None:
        self.register_buffer("one", torch.ones(1, 1).expand(3, 6))

    def scale(self) -> Any:
        return self.one[0]


class Growing(Layer):
    def build(self) -> None:
        self.register_buffer("all", torch.zeros(1, 6))

    def seen(self, x: torch.Tensor) -> None:
        self.all = torch.cat([self.all, x.mean(0, keepdim=True)])

    def scale(self) -> Any:
        return self.all.mean(0)


class ResizedInPlace(Growing):
    """The same tensor, of another size in every step, first smaller ones in the same memory."""

    def build(self) -> None:
        self.register_buffer("all", torch.ones(4, 6))

    def seen(self, x: torch.Tensor) -> None:
        rows = len(self.all) - 1 if len(self.all) > 1 else 9
        self.all.resize_(rows, 6).fill_(0.5).add_(x.mean(0))


class ReshapedInPlace(Layer):
    """As many bytes, in another form."""

    def build(self) -> None:
        self.register_buffer("all", torch.ones(6, 2))

    def seen(self, x: torch.Tensor) -> None:
        self.all.data = (self.all.data + x.mean()).reshape(self.all.shape[::-1]).clone()

    def scale(self) -> Any:
        return self.all.reshape(6, 2)[:, 0]


class ChangesType(Layer):
    def build(self) -> None:
        self.register_buffer("sum", torch.zeros(6, dtype=torch.float16))

    def seen(self, x: torch.Tensor) -> None:
        self.sum = self.sum.double() + x.mean(0).double()

    def scale(self) -> Any:
        return self.sum.float()


class Scalars(Layer):
    """No dimension, and no values at all."""

    def build(self) -> None:
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("none", torch.empty(0, 6))
        self.register_buffer("some", torch.empty(0))

    def seen(self, x: torch.Tensor) -> None:
        self.count += 1
        self.some = x.mean(0)[: int(self.count) % 3]

    def scale(self) -> Any:
        return float(self.count) / 10 + self.some.sum()


class OddTypes(Layer):
    """Complex, eight-bit and unsigned numbers, truth values."""

    def build(self) -> None:
        self.register_buffer("turned", torch.zeros(6, dtype=torch.complex64))
        self.register_buffer("turned2", torch.zeros(2, dtype=torch.complex128))
        self.register_buffer("flags", torch.zeros(6, dtype=torch.bool))
        for dtype in (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64):
            self.register_buffer(str(dtype)[6:], torch.zeros(3, dtype=dtype))

    def seen(self, x: torch.Tensor) -> None:
        self.turned += torch.polar(torch.ones(6), x.mean(0))
        self.turned2[0] = complex(float(x.mean()), 2.0)
        self.flags ^= x.mean(0) > 0
        for dtype in (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.uint64):
            value = int(float(x.mean()) * 50) + 60
            setattr(self, str(dtype)[6:], torch.full((3,), value, dtype=dtype))

    def scale(self) -> Any:
        return self.turned.abs() + self.flags.float() + float(self.uint64[0]) / 50 + float(self.int8[0]) / 50


class Float8(Layer):
    def build(self) -> None:
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu):
            self.register_buffer(str(dtype)[6:], torch.ones(6).to(dtype))

    def seen(self, x: torch.Tensor) -> None:
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu):
            setattr(self, str(dtype)[6:], (x.abs().mean(0) + 0.1).to(dtype))

    def scale(self) -> Any:
        return self.float8_e4m3fn.float() + self.float8_e5m2.float() + self.float8_e8m0fnu.float()


class Transposed(Layer):
    """Views with gaps and turned axes, one into another buffer's memory, a conjugate."""

    def build(self) -> None:
        self.register_buffer("base", torch.arange(24.0).reshape(4, 6))
        self.register_buffer("turned", self.base.t())
        self.register_buffer("every", self.base.view(-1)[::4])
        self.register_buffer("conj", torch.ones(3, dtype=torch.complex64).conj())

    def seen(self, x: torch.Tensor) -> None:
        self.turned += 0.1 * x.mean()
        self.conj = (self.conj.conj() * 1.1).conj()

    def scale(self) -> Any:
        return (self.every + self.base[0] + self.turned[:, 1] + self.conj.abs().sum()) / 100


class SharedBuffer(Layer):
    """One tensor in two places, which become two, and two that become one."""

    def build(self) -> None:
        self.register_buffer("a", torch.zeros(6))
        self.register_buffer("b", self.a)
        self.register_buffer("c", torch.zeros(6))
        self.register_buffer("d", torch.zeros(6))

    def seen(self, x: torch.Tensor) -> None:
        self.a = self.a + x.mean(0)
        if self.c is not self.d:
            self.d = self.c
        self.c.add_(0.1)

    def scale(self) -> Any:
        return self.a + self.b + self.c + self.d


class NotPersistent(Layer):
    """A scratch buffer, which shares its tensor with one that is kept."""

    def build(self) -> None:
        self.register_buffer("scratch", torch.zeros(6), persistent=False)
        self.register_buffer("kept", self.scratch)

    def seen(self, x: torch.Tensor) -> None:
        self.kept.add_(x.mean(0))

    def scale(self) -> Any:
        return self.kept


for _layer in (
    LateBuffer, BufferOfForward, AttributeThenBuffer, BecomesNone, BecomesDeleted, Expanded, ExpandedForGood, Growing,
    ResizedInPlace, ReshapedInPlace, ChangesType, Scalars, OddTypes, Float8, Transposed, SharedBuffer, NotPersistent,
):  # fmt: skip
    kept(with_layer(_layer.__name__, _layer))


# ---- extra state of modules


class ExtraState(Layer):
    """A state that is no tensor of the module's; `form` makes of a number what the module gives."""

    def build(self) -> None:
        self.amount = 0.0

    def seen(self, x: torch.Tensor) -> None:
        self.amount += float(x.mean())

    def scale(self) -> Any:
        return self.amount

    def get_extra_state(self) -> Any:
        return torch.tensor([self.amount], dtype=torch.float64)

    def set_extra_state(self, state: Any) -> None:
        self.amount = float(state)


class ExtraDict(ExtraState):
    def get_extra_state(self) -> Any:
        return {"history": deque([self.amount], 4), "scale": torch.tensor(self.amount, dtype=torch.float64), 3: None}

    def set_extra_state(self, state: Any) -> None:
        assert (state["history"].maxlen, state[3]) == (4, None)
        self.amount = float(state["scale"])


class ExtraBytes(ExtraState):
    """As a pickled state is: of another length in every step, and more than fits among plain facts."""

    def get_extra_state(self) -> Any:
        text = repr(self.amount).encode()
        return (text, b"", text * (1 + int(abs(self.amount) * 1000)) + b"x" * 5000)

    def set_extra_state(self, state: Any) -> None:
        assert state[2].startswith(state[0])
        assert state[1] == b""
        self.amount = float(state[0])


for _layer in (ExtraState, ExtraDict, ExtraBytes):
    kept(with_layer(_layer.__name__, _layer))


# ---- parameters


@kept
class Tied(Usual):
    def build_model(self) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 1))
        model[2].weight = model[0].weight
        model[2].bias = model[0].bias
        return model


@kept
class FrozenMask(Usual):
    """Parameters that do not train: -inf as masks have it, numbers that are no floats, NaN in memory nobody uses."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.mask = nn.Parameter(torch.tensor([0.0, -torch.inf]), requires_grad=False)
        model.table = nn.Parameter(torch.arange(3), requires_grad=False)
        model.unused = nn.Parameter(torch.full((3,), torch.nan))
        return model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.01)


@kept
class TrainedMask(Usual):
    """A weight with -inf in it that trains."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.mask = nn.Parameter(torch.tensor([0.0, -torch.inf]))
        return model

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) + torch.logsumexp(model.mask, 0)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)


# ---- optimizers


class OddSGD(torch.optim.SGD):
    """Keeps state of many kinds for every parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for number, parameter in enumerate(p for group in self.param_groups for p in group["params"]):
            held = self.state[parameter]
            held["tries"] = held.get("tries", 0) + 1
            held["note"] = None if held["tries"] % 2 else "odd"
            held["losses"] = [*held.get("losses", []), 0.1 * number][-3:]
            held["nested"] = {"pair": (held["tries"], torch.full((2,), float(held["tries"]))), 7: {1, 2}}
            held["least"] = torch.tensor(torch.inf)
            held["mask"] = torch.full((1,), held["tries"] * 0.5).expand(3)
            held["grown"] = torch.ones(held["tries"])
            parameter.mul_(1 - 0.001 * float(held["mask"][2]) * len(held["grown"]) / (1 + len(held["losses"])))
        self.state["masters"] = {"sum": torch.tensor(float(held["tries"])), "names": ["a"]}


@kept
class OddOptimizerState(Usual):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return OddSGD(model.parameters(), lr=0.05, momentum=0.9)


class OwnStateDict(torch.optim.Adam):
    """Returns more than torch does."""

    pace = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.pace *= 0.9
        for group in self.param_groups:
            group["weight_decay"] = 0.1 * self.pace
        return super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "pace": self.pace, "tensor": torch.tensor(self.pace)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pace = state["pace"]
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


@kept
class OptimizerWithOwnEntries(Usual):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return OwnStateDict(model.parameters(), lr=0.01)


class ChangingGroups(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        for number, group in enumerate(self.param_groups):
            group["betas"] = (group["betas"][0] * 0.99, 0.99)
            group["k"] = group.get("k", 0) + 1
            group["seen"] = torch.tensor([group["k"]])
            group["weight_decay"] = 0.01 * group["k"] * number
        return super().step(closure)


@kept
class GroupsThatChange(Usual):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        weights = [one for one in model.parameters() if one.dim() > 1]
        return ChangingGroups(
            [{"params": weights}, {"params": [p for p in model.parameters() if p.dim() < 2]}], lr=0.01
        )


class Twice(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        return super().step(closure)


@kept
class TwoUpdatesInAStep(Usual):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Twice(model.parameters(), lr=0.01)


class Sometimes(torch.optim.AdamW):
    calls = 0

    def step(self, closure: Any = None) -> Any:
        self.calls += 1
        return None if self.calls % 3 else super().step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]
        super().load_state_dict({key: state[key] for key in ("state", "param_groups")})


@kept
class SkippedUpdates(Usual):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return Sometimes(model.parameters(), lr=0.01)


@kept
class BeginsAtThousand(Usual):
    """An optimizer that goes on from elsewhere."""

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for one in model.parameters():
            held = {"step": torch.tensor(1000.0), "exp_avg": torch.zeros_like(one), "exp_avg_sq": torch.ones_like(one)}
            optimizer.state[one] = held
        return optimizer


class LateTensors(torch.optim.SGD):
    """Keeps tensors from its second step on, where no state of a parameter shows them."""

    average: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        group = self.param_groups[0]
        group["steps"] = group.get("steps", 0) + 1
        if group["steps"] > 1:
            self.keep(group)
            for parameter in group["params"]:
                parameter.mul_(1 - 0.01 * float(self.kept(parameter, group)))

    def keep(self, group: dict[str, Any]) -> None:
        raise NotImplementedError

    def kept(self, parameter: torch.Tensor, group: dict[str, Any]) -> Any:
        raise NotImplementedError


class LateInGroup(LateTensors):
    def keep(self, group: dict[str, Any]) -> None:
        group["late"] = group.get("late", torch.tensor(0.0)) + 0.5

    def kept(self, parameter: torch.Tensor, group: dict[str, Any]) -> Any:
        return group["late"]


class LateInList(LateTensors):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("past", [])
        super().step(closure)

    def keep(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            self.state[parameter]["past"] = [*self.state[parameter]["past"], parameter.mean()][-2:]

    def kept(self, parameter: torch.Tensor, group: dict[str, Any]) -> Any:
        return sum(self.state[parameter]["past"])


class LateInEntry(LateTensors):
    def keep(self, group: dict[str, Any]) -> None:
        self.average = (torch.tensor(0.0) if self.average is None else self.average) + 0.5

    def kept(self, parameter: torch.Tensor, group: dict[str, Any]) -> Any:
        return self.average

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict["average"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "average"})


class OneValueByName(LateTensors):
    def keep(self, group: dict[str, Any]) -> None:
        state: dict[Any, Any] = self.state
        state["late"] = state.get("late", torch.tensor(0.0)) + 0.5
        state["count"] = state.get("count", 0) + 1

    def kept(self, parameter: torch.Tensor, group: dict[str, Any]) -> Any:
        state: dict[Any, Any] = self.state
        return state["late"] + state["count"]


def with_late_tensors(kind: type[LateTensors]) -> type[Usual]:
    def build_optimizer(self: Usual, model: nn.Module) -> torch.optim.Optimizer:
        return kind(model.parameters(), lr=0.05, momentum=0.9)

    return type(f"Optimizer{kind.__name__}", (Usual,), {"build_optimizer": build_optimizer, "__module__": __name__})


LATE_TENSORS = {
    kind.__name__: with_late_tensors(kind) for kind in (LateInGroup, LateInList, LateInEntry, OneValueByName)
}
"""Their first save is before the first of these tensors."""


@kept
class Adagrad(Usual):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(model.parameters(), lr=0.1)


@kept
class AveragedSGD(Usual):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.ASGD(model.parameters(), lr=0.05, t0=2)


@kept
class Rprop(Usual):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Rprop(model.parameters(), lr=0.01)


@kept
class RateAsTensor(Usual):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01))

    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


# ---- schedulers


@kept
class Restarts(Usual):
    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3)


@kept
class Chained(Usual):
    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        rates = torch.optim.lr_scheduler
        warm, late = rates.LinearLR(optimizer, 0.1, total_iters=3), rates.ExponentialLR(optimizer, 0.8)
        return rates.SequentialLR(optimizer, [warm, late], milestones=[3])


@kept
class OneCycle(Usual):
    def build_scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=20)


# ---- what the workload returns


class Own(Usual):
    """Returns all that `own` holds."""

    def __init__(self, config: Any, **args: Any) -> None:
        super().__init__(config, **args)
        self.own: Any = self.first()

    def first(self) -> Any: ...

    def state_dict(self) -> dict[str, Any]:
        return {"own": self.own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own = state["own"]


@kept
class NestedObjects(Own):
    def first(self) -> Any:
        return {
            "list": [1, 2.5, None, True, "text"], "deque": deque([1.0], 3), "set": {1, 2}, 5: (1, (2,)),
            "ordered": OrderedDict(a=1), "counter": Counter("aab"), "odd": [float("inf"), -0.0, 1 + 2j, torch.float16],
            "bytes": b"\x00\xff", "tensors": [torch.zeros(2), {"deep": torch.tensor(1)}], "empty": [{}, (), set(), ""],
            "frozen": frozenset({"x"}), "parameter": None, "large": 1 << 80,
        }  # fmt: skip

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        own = self.own
        own["deque"].append(own["deque"][-1] * 1.1)
        own["tensors"][0] = own["tensors"][0] + 0.1
        own["list"].append(len(own["list"]))
        own["parameter"] = model[0].weight
        assert own["parameter"] is model[0].weight
        factor = sum(own["deque"]) + float(own["tensors"][0].sum()) + 0.01 * len(own["list"]) + own["counter"]["a"]
        return super().loss(model, batch) * (1 + 0.01 * factor)


@kept
class AverageOfWeights(Own):
    """A copy of the model beside it, whose `state_dict()` is returned."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        self.average = copy.deepcopy(model)
        return model

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), model.parameters(), strict=True):
                mean.mul_(0.9).add_(now, alpha=0.1)
            distance = sum(
                (a - b).square().sum() for a, b in zip(self.average.parameters(), model.parameters(), strict=True)
            )
        return super().loss(model, batch) * (1 + 0.1 * distance)

    def state_dict(self) -> dict[str, Any]:
        return {"average": dict(self.average.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average.load_state_dict(state["average"])


@kept
class Scaler(Own):
    """torch's own scaler of gradients."""

    def first(self) -> Any:
        return torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        loss = super().loss(model, batch)
        scale = float(self.own.scale(torch.ones(())))
        self.own.update(scale * 1.5)
        return loss * (1 + 0.001 * scale)

    def state_dict(self) -> dict[str, Any]:
        return {"scaler": self.own.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.own.load_state_dict(state["scaler"])


@kept
class OfEachRank(Own):
    """Tensors that differ between ranks, of the same names and of other ones."""

    def build_data(self, layout: Any) -> Any:
        self.rank = layout.rank
        return super().build_data(layout)

    def first(self) -> Any:
        return {"mean": torch.zeros(3), "order": torch.arange(4), "same": torch.ones(2)}

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        own = self.own
        own["mean"] = 0.9 * own["mean"] + (1 + self.rank) * 0.1
        own["order"] = own["order"].roll(1 + self.rank)
        own["same"] = own["same"] * 1.1
        factor = own["mean"].sum() + own["order"][0] + own["same"].sum()
        return super().loss(model, batch) * (1 + 0.01 * float(factor))


# ---- modes of the model's parts


class Switched(Own):
    """Changes its model at the second step, which it counts."""

    def first(self) -> Any:
        return 0

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.own += 1
        if self.own == 2:
            self.switch(model)
        return super().loss(model, batch)

    def switch(self, model: Any) -> None:
        raise NotImplementedError


@kept
class Thawed(Switched):
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model[0].requires_grad_(False)
        return model

    def switch(self, model: Any) -> None:
        model[0].requires_grad_(True)


@kept
class FrozenLate(Switched):
    def switch(self, model: Any) -> None:
        model[4].weight.requires_grad_(False)


@kept
class StatisticsHeld(Switched):
    def odd(self) -> nn.Module:
        return nn.BatchNorm1d(6)

    def switch(self, model: Any) -> None:
        model[1].eval()


@kept
class BuiltInEvaluation(Switched):
    """Dropout that begins with the second step, in a model that was built in evaluation mode."""

    def build_model(self) -> nn.Module:
        return super().build_model().eval()

    def switch(self, model: Any) -> None:
        model.train()


# ---- plain attributes of modules


class OtherRate(Switched):
    """Dropout that is another one from the second step on."""

    def switch(self, model: Any) -> None:
        model[3].p = 0.5


class OtherMomentum(StatisticsHeld):
    def switch(self, model: Any) -> None:
        model[1].momentum = 0.01


class Counts(Layer):
    def build(self) -> None:
        self.calls = 0

    def seen(self, x: torch.Tensor) -> None:
        self.calls += 1

    def scale(self) -> Any:
        return self.calls


class KeptOfAPass(Counts):
    """What a forward pass computes anew: a part of the loss, a size, a turn, a cache."""

    def build(self) -> None:
        self.part, self.largest, self.is_odd, self.turn, self.size = 0.0, 0, False, (0, 1), None

    def seen(self, x: torch.Tensor) -> None:
        self.part, self.largest, self.size = float(x.mean()), max(self.largest, len(x)), str(x.shape)
        self.is_odd, self.turn = not self.is_odd, self.turn[::-1]

    def scale(self) -> Any:
        return self.part


class OfExtraState(ExtraState):
    """An attribute that the extra state brings back."""


FORGOTTEN: dict[str, tuple[type[Usual], str]] = {
    "OtherRate": (OtherRate, "model.3.p"),
    "OtherMomentum": (OtherMomentum, "model.1.momentum"),
    "Counts": (with_layer("Counts", Counts), "model.1.calls"),
    "KeptOfAPass": (with_layer("KeptOfAPass", KeptOfAPass), ""),
    "OfExtraState": (with_layer("OfExtraState", OfExtraState), ""),
}
"""Their losses differ after a restart, which names these attributes; none where nothing is lost."""


# ---- refused


class MetaBuffer(Layer):
    def build(self) -> None:
        self.register_buffer("odd", torch.ones(3, device="meta"))

    def scale(self) -> Any:
        return 0.0


class LateMetaBuffer(MetaBuffer):
    def build(self) -> None:
        self.register_buffer("odd", None)

    def seen(self, x: torch.Tensor) -> None:
        self.odd = torch.ones(3, device="meta")


class SparseBuffer(MetaBuffer):
    def build(self) -> None:
        self.register_buffer("odd", torch.eye(3).to_sparse())


class NestedBuffer(MetaBuffer):
    def build(self) -> None:
        self.register_buffer("odd", torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged))


class LateModule(Layer):
    def seen(self, x: torch.Tensor) -> None:
        if not hasattr(self, "late"):
            self.late = nn.BatchNorm1d(6, affine=False)

    def scale(self) -> Any:
        return 0.0


class GrownParameter(Layer):
    def build(self) -> None:
        self.weight = nn.Parameter(torch.ones(2))

    def seen(self, x: torch.Tensor) -> None:
        self.weight.data = torch.ones(len(self.weight) + 1)

    def scale(self) -> Any:
        return 0.0


class LateParameter(Layer):
    def seen(self, x: torch.Tensor) -> None:
        self.weight = nn.Parameter(torch.ones(2))

    def scale(self) -> Any:
        return 0.0


class ExpandedParameter(Layer):
    def build(self) -> None:
        self.weight = nn.Parameter(torch.ones(1).expand(6), requires_grad=False)

    def scale(self) -> Any:
        return self.weight


class ExtraThatIsNotTakenBack(Layer):
    def get_extra_state(self) -> Any:
        return 1

    def scale(self) -> Any:
        return 0.0


class ExtraObject(ExtraState):
    def get_extra_state(self) -> Any:
        return object()


class OtherEntry(Layer):
    """A tensor that a module puts into its state by hand."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}secret"] = torch.ones(2)

    def scale(self) -> Any:
        return 0.0


class ChangingEntry(Layer):
    """The same with a plain number, which changes."""

    calls = 0

    def seen(self, x: torch.Tensor) -> None:
        self.calls += 1

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}calls"] = self.calls

    def scale(self) -> Any:
        return 0.0


for _layer, _words, _at_save in (
    (MetaBuffer, "1.odd: a tensor on the meta device", False),
    (LateMetaBuffer, "1.odd: a tensor on the meta device", True),
    (SparseBuffer, "1.odd: a torch.sparse_coo tensor cannot be saved", False),
    (NestedBuffer, "1.odd: a nested tensor cannot be saved", False),
    (LateModule, "buffer 1.late.running_mean is in a module that was made after build_model()", True),
    (GrownParameter, "parameter 1.weight was torch.float32 of shape (2,)", True),
    (LateParameter, "parameter 1.weight was made after build_model()", True),
    (ExpandedParameter, "several values of parameter 1.weight share one place", False),
    (ExtraThatIsNotTakenBack, "1 (ExtraThatIsNotTakenBack) has get_extra_state() and no set_extra_state()", False),
    (ExtraObject, "extra/rank-00000:%s1 is a builtins.object", False),
    (OtherEntry, "1.secret in the model's state_dict() is a tensor", False),
    (ChangingEntry, "1.calls in the model's state_dict() has changed", True),
):
    refused(_words, at_save=_at_save)(with_layer(_layer.__name__, _layer))


@refused("workload:own is a builtins.object")
class ObjectInState(Own):
    def first(self) -> Any:
        return object()


@refused("workload:own:0: a tensor on the meta device")
class MetaInState(Own):
    def first(self) -> Any:
        return [torch.ones(2, device="meta")]


@refused("workload:own: a tensor on the meta device", at_save=True)
class LateMetaInState(Own):
    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        self.own = torch.ones(2, device="meta")
        return super().loss(model, batch)


@refused("needs no closure")
class NeedsClosure(Usual):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters())


class KeepsObjects(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["odd"] = object()


@refused("optimizer/0.weight/odd is a builtins.object")
class ObjectInOptimizer(Usual):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return KeepsObjects(model.parameters(), lr=0.05)


@refused("NotTakenBack has state_dict() and no load_state_dict()")
class NotTakenBack(Usual):
    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}


# By these names ranks import them: layers have the others.
globals().update({f"Train{_name}": _case for _name, _case in KEPT.items()})
