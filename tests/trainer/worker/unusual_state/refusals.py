"""State that is refused by name."""

from typing import Any

import torch
from torch import nn

from tests.trainer.worker.unusual_state.cases import Layer, Usual, refused, with_layer
from tests.trainer.worker.unusual_state.layers import ExtraState
from tests.trainer.worker.unusual_state.objects import Own

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
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}secret"] = torch.ones(2)

    def scale(self) -> Any:
        return 0.0


class ChangingEntry(Layer):
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
    (LateModule, "buffer 1.late.running_mean is in a module that was created after build_model()", True),
    (GrownParameter, "parameter 1.weight was torch.float32 of shape (2,)", True),
    (LateParameter, "parameter 1.weight was created after build_model()", True),
    (ExpandedParameter, "several values of parameter 1.weight share one memory location", False),
    (ExtraThatIsNotTakenBack, "1 (ExtraThatIsNotTakenBack) has get_extra_state() but no set_extra_state()", False),
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


@refused("NotTakenBack has state_dict() but no load_state_dict()")
class NotTakenBack(Usual):
    def state_dict(self) -> dict[str, Any]:
        return {"count": 1}
