"""Unusual buffers, extra state and parameters of modules."""

from collections import deque
from typing import Any

import torch
from torch import nn

from tests.trainer.worker.unusual_state.cases import Layer, Usual, kept, with_layer

# ---- buffers


class LateBuffer(Layer):
    def build(self) -> None:
        self.register_buffer("ema", None)

    def seen(self, x: torch.Tensor) -> None:
        self.ema = x.mean(0) if self.ema is None else 0.9 * self.ema + 0.1 * x.mean(0)

    def scale(self) -> Any:
        return 0.0 if self.ema is None else self.ema


class BufferOfForward(Layer):
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
    def build(self) -> None:
        self.register_buffer("all", torch.ones(4, 6))

    def seen(self, x: torch.Tensor) -> None:
        rows = len(self.all) - 1 if len(self.all) > 1 else 9
        self.all.resize_(rows, 6).fill_(0.5).add_(x.mean(0))


class ReshapedInPlace(Layer):
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
    def build(self) -> None:
        self.register_buffer("scratch", torch.zeros(6), persistent=False)
        self.register_buffer("kept", self.scratch)

    def seen(self, x: torch.Tensor) -> None:
        self.kept.add_(x.mean(0))

    def scale(self) -> Any:
        return self.kept


class DerivedByPostHook(Layer):
    def build(self) -> None:
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("code", torch.zeros(6))
        self.register_buffer("table", torch.zeros(6), persistent=False)
        self.hook()

    def hook(self) -> None:
        self.register_load_state_dict_post_hook(lambda module, keys: module.rebuild())

    def rebuild(self) -> None:
        self.table = torch.tanh(self.code * 2)

    def seen(self, x: torch.Tensor) -> None:
        self.steps += 1
        if int(self.steps) == 2:
            self.code.copy_(x.mean(0))
            self.rebuild()

    def scale(self) -> Any:
        return self.table


class DerivedByLoad(DerivedByPostHook):
    """The same in `_load_from_state_dict`, whose entries differ from the buffers."""

    def hook(self) -> None:
        self.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({f"{prefix}code": None}))
        self.halved = nn.Linear(1, 1)
        self.halved.register_state_dict_post_hook(
            lambda module, state, prefix, _: state.update({f"{prefix}bias": module.bias.detach().bfloat16()})
        )

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        assert state[f"{prefix}code"] is None
        assert f"{prefix}halved.bias" in state
        state[f"{prefix}code"] = self.code * 1.0
        super()._load_from_state_dict(state, prefix, *rest)
        self.rebuild()
        self.code = torch.zeros(6)
        self.steps.zero_()


class DerivedByPreHook(DerivedByPostHook):
    def hook(self) -> None:
        self.register_load_state_dict_pre_hook(self.before)

    def before(self, module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        self.table = torch.tanh(state[f"{prefix}code"] * 2)


for _layer in (
    DerivedByPostHook, DerivedByLoad, DerivedByPreHook,
    LateBuffer, BufferOfForward, AttributeThenBuffer, BecomesNone, BecomesDeleted, Expanded, ExpandedForGood, Growing,
    ResizedInPlace, ReshapedInPlace, ChangesType, Scalars, OddTypes, Float8, Transposed, SharedBuffer, NotPersistent,
):  # fmt: skip
    kept(with_layer(_layer.__name__, _layer))


# ---- extra state of modules


class ExtraState(Layer):
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
    """Frozen parameters: -inf of a mask, integers, NaN in unused memory."""

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
    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.mask = nn.Parameter(torch.tensor([0.0, -torch.inf]))
        return model

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return super().loss(model, batch) + torch.logsumexp(model.mask, 0)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)


@kept
class TargetNetwork(Usual):
    def build_model(self) -> nn.Module:
        online = super().build_model()
        online.target = super().build_model()
        for slow, fast in self.pairs(online):
            slow.data = fast.data
            slow.requires_grad_(False)
        return online

    def pairs(self, model: Any) -> list[tuple[nn.Parameter, nn.Parameter]]:
        return list(zip(model.target.parameters(), model[0:5].parameters(), strict=True))

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        for slow, fast in self.pairs(model):
            slow.data = slow.data * 0.9 + fast.data * 0.1
        loss = super().loss(model[0:5], batch)
        return loss + 0.1 * sum((slow * fast).sum() for slow, fast in self.pairs(model))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.05)


class AverageOfWeights(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("average", self.weight.detach())
        self.register_buffer("same", self.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average = 0.9 * self.average + 0.1 * self.weight.detach()
        return super().forward(x) + x @ self.average * 0.1 + x @ self.same * 0.1


kept(with_layer("AveragedWeights", AverageOfWeights))


@kept
class OwnDefaultDevice(Usual):
    """Sets torch's default device, where orch must not create its own tensors."""

    def build_data(self, layout: Any) -> Any:
        torch.set_default_device("meta")
        return super().build_data(layout)
