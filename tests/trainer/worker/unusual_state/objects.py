"""State of workloads, modes of modules, and attributes that are reported once lost."""

import copy
from collections import Counter, OrderedDict, deque
from typing import Any

import torch
from torch import nn

from tests.trainer.worker.my_workload import Counters
from tests.trainer.worker.unusual_state.cases import Layer, Usual, kept, with_layer
from tests.trainer.worker.unusual_state.layers import ExtraBytes, ExtraState, LateBuffer

# ---- what the workload returns


class Own(Usual):
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


@kept
class AllAtOnce(OfEachRank):
    def build_model(self) -> nn.Module:
        return nn.Sequential(Counters(), super().build_model())

    def odd(self) -> nn.Module:
        return nn.Sequential(LateBuffer(), ExtraBytes())


# ---- modes of the model's parts


class Switched(Own):
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
    def build_model(self) -> nn.Module:
        return super().build_model().eval()

    def switch(self, model: Any) -> None:
        model.train()


# ---- plain attributes of modules


class OtherRate(Switched):
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
    """Attributes that every forward pass recomputes."""

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
"""Workloads and the attributes that a restart reports as lost; empty if nothing is lost."""
