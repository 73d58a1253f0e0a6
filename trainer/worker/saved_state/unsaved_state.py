"""Inventory of a rank's tensors to save, and detection of state that no checkpoint contains.

Many modules have attributes that every forward pass recomputes. A restart therefore reports only attributes that its
first steps do not change, and counters that restart.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.worker.saved_state import checkpoint_contents, object_state
from trainer.worker.saved_state.object_state import UnsavableValue
from trainer.worker.saved_state.optimizer_state import OptimizerState
from trainer.worker.saved_state.rng_state import pack_rng, rng_name

_PLAIN_ATTRIBUTES = (bool, int, float, str, type(None))
_MOST = 100
"""Maximum number of attributes in a save, and of characters in each."""
OBSERVED_STEPS = 3
"""Steps between a restart and the report. By then, attributes that alternate between two values have changed."""


class ModuleAttributes:
    """Numbers, strings and tuples of them in modules' attributes, keyed by `model.<module>.<attribute>`."""

    step: int
    """Step of the restored checkpoint."""

    def __init__(self, model: nn.Module) -> None:
        """Record the attributes of a new model."""
        self._model = model
        self._built = self._texts()
        self._saved: dict[str, str] = {}
        self._seen: list[dict[str, str]] = []

    def changed_attributes(self) -> dict[str, str]:
        """Return the attributes that differ from the new model's, as text."""
        found = {name: text for name, text in self._texts().items() if self._built.get(name) != text}
        return dict(sorted(found.items())[:_MOST])

    def begin(self, saved: Mapping[str, str], step: int) -> None:
        """Record which attributes saved after `step` the restored model lacks."""
        now = self._texts()
        self._saved, self.step = {name: text for name, text in saved.items() if now.get(name) != text}, step
        self._seen = [now]

    def step_ended(self) -> list[str]:
        """Observe a step. Return the names of lost attributes, once."""
        if not self._saved:
            return []
        self._seen.append(self._texts())
        if len(self._seen) <= OBSERVED_STEPS:
            return []
        found = [name for name, text in self._saved.items() if self._is_lost(name, text)]
        self._saved, self._seen = {}, []
        return found

    def _is_lost(self, name: str, saved: str) -> bool:
        seen = [texts.get(name, "") for texts in self._seen]
        return len(set(seen)) == 1 or _counts_again(seen, saved, self.step)

    def _texts(self) -> dict[str, str]:
        found = {}
        for prefix, module in self._model.named_modules():
            for key, value in vars(module).items():
                if not key.startswith("_") and key != "training" and _is_plain(value):
                    text = repr(value)
                    if len(text) <= _MOST:
                        found[f"model.{prefix}.{key}" if prefix else f"model.{key}"] = text
        return found


def _is_plain(value: object) -> bool:
    return type(value) in _PLAIN_ATTRIBUTES or (
        type(value) is tuple and all(type(one) in _PLAIN_ATTRIBUTES for one in value)
    )


def _counts_again(seen: list[str], saved: str, step: int) -> bool:
    """Return whether a number that rose equally in all `step` steps before the save now counts from the start."""
    try:
        first, *later, total = (int(text) for text in (*seen, saved))
    except ValueError:
        return False
    rise = later[0] - first
    return total == first + rise * step and later == [first + rise * n for n in range(1, len(later) + 1)]


_MAX_CHARACTERS = 1000
"""Maximum characters in an attribute's JSON. Longer values are data, not counters."""


@cache
def _torch_attributes() -> frozenset[str]:
    """Return the attributes that every optimizer has. Not a constant, because imports must not create tensors."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1, device="cpu")], lr=0.0))) | {"_opt_called", "_step_count"}


class UnsavedAttributes:
    """Attributes of objects, keyed by `<object>.<attribute>`, compared with their initial values."""

    def __init__(self, objects: Mapping[str, object]) -> None:
        self._objects = dict(objects)
        self._initial = self._texts()

    def changed_attributes(self) -> dict[str, str]:
        """Return the attributes that have changed, as JSON text."""
        return {name: text for name, text in self._texts().items() if self._initial.get(name) != text}

    def lost_attributes(self, saved: Mapping[str, str]) -> list[str]:
        """Return the attributes that differ from the saved ones."""
        now = self._texts()
        return sorted(name for name, text in saved.items() if now.get(name) != text)

    def _texts(self) -> dict[str, str]:
        found = {}
        for owner, each in self._objects.items():
            for key, value in getattr(each, "__dict__", {}).items():
                if not (isinstance(each, torch.optim.Optimizer) and key in _torch_attributes()):
                    text = _text(value)
                    if text is not None:
                        found[f"{owner}.{key}"] = text
        return found


def _text(value: Any) -> str | None:
    if isinstance(value, str | list | tuple | dict | set | frozenset) and len(value) > _MAX_CHARACTERS:
        return None
    tensors: dict[str, torch.Tensor] = {}
    try:
        text = object_state.text(object_state.encode(value, "", tensors, {}))
    except UnsavableValue:
        return None
    return None if tensors or len(text) > _MAX_CHARACTERS else text


Holder = dict[str, Any]
_PLAIN = (type(None), bool, int, float, str)


class StateInventory:
    """Inventory of the tensors to save, with the same tensor objects while model and optimizer keep theirs.

    A walk takes longer than a copy, so it is repeated only if a holder has a new tensor or a tensor has moved.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, rank: int, device: torch.device,
        lazy: bool = False, optimizer_state: OptimizerState | None = None,
        more: Callable[[], dict[str, torch.Tensor]] = dict,
    ) -> None:  # fmt: skip
        """Create an inventory. With `lazy`, buffers are copied, because the next step changes them during the read.

        `more` returns further tensors and is called at every save.
        """
        self._optimizer_state = optimizer_state or OptimizerState(model, optimizer)
        self._more = more
        self._extra: dict[str, torch.Tensor] = {}
        self._scattered = False  # whether any tensors are outside the holders
        self._model, self._optimizer, self._rank, self._device, self._lazy = model, optimizer, rank, device, lazy
        self._rng = torch.zeros_like(pack_rng(device))
        self._slots: list[tuple[Holder, str]] = []
        self._sizes: list[tuple[Holder, int]] = []
        self._seen: list[Any] = []
        self._memory: list[tuple[object, ...]] = []
        self._weights: dict[str, torch.nn.Parameter] = {}
        self._sharded = False
        self._states: list[tuple[Any, Holder, int]] = []  # keyed by parameter, or by a name that the optimizer chose
        self._empty: list[tuple[Holder, str]] = []  # non-tensor values that may become tensors
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._tensors: dict[str, torch.Tensor] = {}
        self.walks = 0
        """Number of complete walks."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors to save now. Do not change them until the saver has copied them."""
        more = self._more()
        if not self._is_unchanged():
            self._walk()
        self._rng.copy_(pack_rng(self._device))
        if self._lazy:
            more = {key: tensor.detach().clone() for key, tensor in more.items()}
        for copy, buffer in self._copies:
            copy.copy_(buffer)
        if self._extra or more:
            # Keep the order of names, because the save plan depends on it.
            self._tensors = {key: one for key, one in self._tensors.items() if key not in self._extra or key in more}
            self._tensors.update(more)
            self._extra = more
        return self._tensors

    def trained_keys(self) -> frozenset[str]:
        """Return the keys of the trained weights among the tensors of the last `tensors()` call."""
        return frozenset(key for key, parameter in self._weights.items() if parameter.requires_grad)

    def forget(self) -> None:
        """Release all tensors, so that tensors dropped by the optimizer are freed before the next save."""
        self._tensors, self._extra, self._states = {}, {}, []
        self._seen, self._slots, self._sizes, self._empty, self._copies = [], [], [], [], []
        self._weights = {}

    def _is_unchanged(self) -> bool:
        if not self._tensors or self._scattered or len(self._optimizer.state) != len(self._states):
            return False
        states = self._optimizer.state
        if any(states.get(owner) is not held or len(held) != size for owner, held, size in self._states):
            return False
        if any(len(holder) != size for holder, size in self._sizes):
            return False
        try:
            now = [holder[key] for holder, key in self._slots]
        except KeyError:
            return False
        # Any other value may be or contain a tensor. Groups and the optimizer's own entries may contain tensors too.
        if any(type(holder.get(key)) not in _PLAIN for holder, key in self._empty):
            return False
        if self._optimizer_state.tensors_elsewhere():
            return False
        return all(map(is_, now, self._seen)) and self._addresses(now) == self._memory

    def _walk(self) -> None:
        self.walks += 1
        model, optimizer = self._model, self._optimizer
        own = checkpoint_contents.rank_buffers(model, self._rank)
        shared = checkpoint_contents.shared_tensors(model)
        buffers = checkpoint_contents.persistent_buffers(model)
        of_optimizer = self._optimizer_state.tensors()
        live = {**shared, **of_optimizer, **own}
        # A name that the optimizer chose may hold a single value. If so, every call walks.
        dicts = [(owner, held) for owner, held in optimizer.state.items() if isinstance(held, dict)]
        self._states = [(owner, held, len(held)) for owner, held in dicts]
        self._slots = list(self._holders())
        self._sizes = [(holder, len(holder)) for module in model.modules() for holder in _module_holders(module)]
        held = sum(isinstance(value, torch.Tensor) for _, kept, _ in self._states for value in kept.values())
        self._scattered = held != len(of_optimizer)
        self._empty = [
            (kept, key) for _, kept, _ in self._states for key in kept if not isinstance(kept[key], torch.Tensor)
        ]
        self._seen = [holder[key] for holder, key in self._slots]
        self._sharded = any(isinstance(tensor, DTensor) for tensor in self._seen)
        self._memory = self._addresses(self._seen)
        self._weights = {f"model/{name}": parameter for name, parameter in model.named_parameters()}
        self._copies = []
        # Create new tensor objects, because the saver assumes that a known object is unchanged.
        live = {key: tensor.detach() for key, tensor in live.items()}
        if self._lazy:
            loose = [*own, *(key for key in shared if key.removeprefix("model/") in buffers)]
            copies = {key: live[key].clone() for key in loose}
            self._copies = [(copy, live[key]) for key, copy in copies.items()]
            live.update(copies)
        self._tensors, self._extra = {**live, rng_name(self._rank): self._rng}, {}

    def _holders(self) -> Iterator[tuple[Holder, str]]:
        """Yield the slots in which modules and the optimizer keep tensors, to detect replaced tensors."""
        for module in self._model.modules():
            for holder in _module_holders(module):
                yield from ((holder, key) for key in holder)
        for _, held, _ in self._states:
            yield from ((held, key) for key, value in held.items() if isinstance(value, torch.Tensor))

    def _addresses(self, held: Sequence[Any]) -> list[tuple[object, ...]]:
        """Return the address, shape and type of every tensor. A sharded tensor's address is its local shard's."""
        tensors: Sequence[Any] = [each for each in held if isinstance(each, torch.Tensor)]
        forms = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if self._sharded:
            # `to_local` would take a hundred times as long.
            tensors = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
        places = [tensor.data_ptr() if tensor.layout is torch.strided else 0 for tensor in tensors]
        return list(zip(places, forms, strict=True))


def _module_holders(module: nn.Module) -> tuple[Holder, ...]:
    return module._parameters, module._buffers, module._modules
