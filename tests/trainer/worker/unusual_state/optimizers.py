"""Unusual optimizers and schedulers."""

from typing import Any

import torch
from torch import nn

from tests.trainer.worker.unusual_state.cases import Usual, kept

# ---- optimizers


class OddSGD(torch.optim.SGD):
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
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for one in model.parameters():
            held = {"step": torch.tensor(1000.0), "exp_avg": torch.zeros_like(one), "exp_avg_sq": torch.ones_like(one)}
            optimizer.state[one] = held
        return optimizer


class LateTensors(torch.optim.SGD):
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
"""Optimizers whose first save precedes these tensors."""


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
