"""State of a user's object as JSON beside named tensors; every type comes back as it was.

Scalars and lists stand for themselves; everything else is an object with one key that names its type, as in
`{"tuple": [0.9, 0.95]}`, `{"float": "inf"}` or `{"tensor": "optimizer/weight/exp_avg"}`.
"""

import base64
import json
import math
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from trainer.worker.saved_state.checkpoint_contents import differing_tensors, tensor_metadata, zeros
from trainer.worker.workload import WorkloadError

Names = Mapping[torch.Tensor, str]
"""Parameters by themselves, with their names in the model."""

_MOST_INLINE = 4096
"""Bytes that stand in the JSON; more are a tensor."""
_PLAIN = (type(None), bool, int, str)
_NUMBER = re.compile("-?[0-9]+")
_CODES = {"%": "%25", ":": "%3A", "/": "%2F"}
"""Of the signs that have a meaning in a path; the first is that of the codes themselves."""
_SURROGATE = re.compile("[\ud800-\udfff]")
"""What UTF-8 does not have: Python reads a byte of a file's name as one where that is no UTF-8."""
_SURROGATE_CODE = re.compile("%U([0-9a-f]{4})")


class Unsavable(Exception):
    """A value of a type that is not kept; `path` says where it stands."""

    def __init__(self, path: str, value: object, why: str = "") -> None:
        super().__init__(f"{path} {why or f'is a {type(value).__module__}.{type(value).__qualname__}'}")
        self.path = path


def encode(
    value: Any, path: str, tensors: dict[str, torch.Tensor], names: Names, shared: "SharedContainers | None" = None
) -> Any:
    """The JSON of `value`; its tensors are added to `tensors` under `path`. Raises Unsavable.

    A container that is in `shared` stands once; where it comes again, its number stands for it.
    """
    if shared is None or id(value) not in shared.ids:
        return _encode_one(value, path, tensors, names, shared)
    if id(value) in shared.numbers:
        return {"same": shared.numbers[id(value)]}
    if id(value) in shared.begun:
        raise Unsavable(path, value, "holds itself")
    shared.begun.add(id(value))
    encoded = _encode_one(value, path, tensors, names, shared)
    shared.numbers[id(value)] = len(shared.numbers)
    return {"shared": encoded}


def _encode_one(
    value: Any, path: str, tensors: dict[str, torch.Tensor], names: Names, shared: "SharedContainers | None"
) -> Any:
    kind = type(value)
    if kind is str and _SURROGATE.search(value):
        return {"str": base64.b64encode(value.encode(errors="surrogatepass")).decode()}
    if kind in _PLAIN:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, torch.Tensor):
        if value in names:
            return {"parameter": names[value]}
        while path in tensors:
            path += "%"  # keys that are alike and not equal, as one NaN and another are
        tensors[path] = value.detach()
        if isinstance(value, nn.Parameter):
            return {"own parameter": [{"tensor": path}, value.requires_grad]}
        return {"leaf": {"tensor": path}} if _is_trained(value) else {"tensor": path}
    if kind in _CONTAINERS:
        items = [encode(item, f"{path}:{at}", tensors, names, shared) for at, item in enumerate(_items(value))]
        return items if kind is list else {_CONTAINERS[kind]: items}
    if kind in _MAPPINGS:
        keys = [encode(key, f"{path}:%{at}", tensors, names) for at, key in enumerate(value)]
        pairs = [
            [said, encode(item, f"{path}:{_of_key(key, said)}", tensors, names, shared)]
            for said, (key, item) in zip(keys, value.items(), strict=True)
        ]
        return {_MAPPINGS[kind]: pairs}
    if kind is bytes:
        if len(value) <= _MOST_INLINE:
            return {"bytes": base64.b64encode(value).decode()}
        return {"bytes": encode(torch.frombuffer(bytearray(value), dtype=torch.uint8), path, tensors, names)}
    if kind is complex:
        return {"complex": [encode(part, path, tensors, names) for part in (value.real, value.imag)]}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    raise Unsavable(path, value)


_CONTAINERS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}


def _is_trained(value: Any) -> bool:
    """Whether this is a tensor that gradients are computed for, and no result of others."""
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


class SharedContainers:
    """The lists, dictionaries, other mutable containers and trained tensors that stand more than once in a state."""

    def __init__(self, state: Any) -> None:
        times: Counter[int] = Counter()
        left = [state]
        while left:
            one = left.pop()
            kind = type(one)
            if kind in _CONTAINERS or kind in _MAPPINGS:
                times[id(one)] += 1
                if times[id(one)] == 1:
                    left += one.values() if kind in _MAPPINGS else one
            elif isinstance(one, nn.Parameter) or _is_trained(one):
                times[id(one)] += 1
        self.ids = frozenset(key for key, count in times.items() if count > 1)
        self.begun = set[int]()
        self.numbers: dict[int, int] = {}
        """By id, in the order in which they have been encoded; `decode` counts in the same order."""


def _items(value: Any) -> Any:
    """The items of a container; a bounded deque begins with its bound."""
    if isinstance(value, deque):
        return [value.maxlen, *value]
    return sorted(value, key=repr) if isinstance(value, set | frozenset) else value


def find_reordered_sets(value: Any, path: str) -> Iterator[str]:
    """Yield where sets of numbers stand whose members would be iterated in another order after a restart.

    A set made of the same members may have another table than one that has grown and shrunk. Text has another order in
    every process.
    """
    if isinstance(value, set | frozenset):
        if all(isinstance(item, int | float) for item in value) and list(type(value)(_items(value))) != list(value):
            yield path
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from find_reordered_sets(item, f"{path}:{key}")
    elif isinstance(value, list | tuple | deque):
        for at, item in enumerate(value):
            yield from find_reordered_sets(item, f"{path}:{at}")


def _of_key(key: Any, encoded: Any) -> str:
    return path_part(key) if type(key) in (str, int) else f"%({_escaped(text(encoded))})"


def path_part(key: str | int) -> str:
    """One part of a path for a key: no other key has it, and it has none of the signs between parts."""
    return f"%s{key}" if isinstance(key, str) and _NUMBER.fullmatch(key) else _escaped(str(key))


def key_of(word: str) -> str | int:
    """The key that a word stands for."""
    if _NUMBER.fullmatch(word):
        return int(word)
    if word.startswith("%s"):
        return word[2:]
    word = _SURROGATE_CODE.sub(lambda code: chr(int(code[1], 16)), word)
    for sign, code in reversed(_CODES.items()):
        word = word.replace(code, sign)
    return word


def _escaped(part: str) -> str:
    for sign, code in _CODES.items():
        part = part.replace(sign, code)
    return _SURROGATE.sub(lambda found: f"%U{ord(found[0]):04x}", part)


_MAKERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": lambda items: deque(items[1:], items[0]),
    "dict": lambda pairs: dict(map(tuple, pairs)),
    "ordered": lambda pairs: OrderedDict(map(tuple, pairs)),
    "counter": lambda pairs: Counter(dict(map(tuple, pairs))),
    "complex": lambda parts: complex(*parts),
    "view": lambda parts: torch.as_strided(*parts),
    "leaf": lambda tensor: tensor.requires_grad_(),
    "own parameter": lambda parts: nn.Parameter(*parts),
}


def decode(
    value: Any,
    tensors: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    shared: list[Any] | None = None,
) -> Any:
    """What `encode` was given; raises KeyError for a tensor or a parameter that is not there."""
    shared = [] if shared is None else shared
    if isinstance(value, list):
        return [decode(item, tensors, parameters, shared) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "float":
        return float(inner)
    if kind == "str":
        return base64.b64decode(inner).decode(errors="surrogatepass")
    if kind == "tensor":
        return tensors[inner]
    if kind == "parameter":
        return parameters[inner]
    if kind == "same":
        return shared[inner]
    if kind == "dtype":
        return getattr(torch, inner)
    if kind == "bytes":
        return base64.b64decode(inner) if isinstance(inner, str) else bytes(tensors[inner["tensor"]].tolist())
    made = decode(inner, tensors, parameters, shared)
    if kind == "shared":
        shared.append(made)
        return made
    return _MAKERS[kind](made)


def text(value: Any) -> str:
    """Encoded values are equal when their texts are: 1, 1.0 and True differ, as 0.0 and -0.0 do."""
    return json.dumps(value, sort_keys=True)


def rename_tensors(value: Any, names: Mapping[str, str]) -> Any:
    """Return an encoded value whose tensors are renamed by `names`."""
    return replace_tensors(value, {old: {"tensor": new} for old, new in names.items()})


def replace_tensors(value: Any, by_name: Mapping[str, Any]) -> Any:
    """Return an encoded value in which another encoded value stands for each of these tensors."""
    if isinstance(value, list):
        return [replace_tensors(item, by_name) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    return by_name.get(inner, value) if kind == "tensor" else {kind: replace_tensors(inner, by_name)}


def references(value: Any) -> list[str]:
    """The names of all tensors in an encoded value."""
    if isinstance(value, list):
        return [name for item in value for name in references(item)]
    if isinstance(value, dict):
        return [name for kind, inner in value.items() for name in ([inner] if kind == "tensor" else references(inner))]
    return []


class ObjectState:
    """The state of one object, whose tensors are named `<prefix>...`; an object without the two methods has none."""

    def __init__(self, owner: object, prefix: str, model: nn.Module, device: torch.device, *, called: str = "") -> None:
        """`called`: the class of the user's, where `owner` only wraps it."""
        self._owner, self._prefix, self._device = owner, prefix, device
        self._called = called or type(owner).__name__
        self._parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        self._names = {parameter: name for name, parameter in self._parameters.items()}
        self._targets: dict[str, torch.Tensor] = {}
        self._own_names: dict[str, str] = {}
        self._answer: tuple[Any, dict[str, torch.Tensor]] | None = None
        self.reordered = frozenset[str]()
        """Sets of the newest state that a restart would iterate in another order."""

    @contextmanager
    def asked_once(self) -> Iterator[None]:
        """Inside, its tensors and the rest are parts of one answer: a thread of the object's may move on meanwhile."""
        self._answer = self._ask()
        try:
            yield
        finally:
            self._answer = None

    def separate_ranks(self, rank: int) -> None:
        """Collective: from now on, save tensors that differ between ranks once per rank, under separate names."""
        if callable(getattr(self._owner, "state_dict", None)):
            shared = {key: one for key, one in self.tensors().items() if key not in self._own_names.values()}
            for key in differing_tensors(shared):
                self._own_names[key] = f"{self._prefix}/rank-{rank:05d}{key.removeprefix(self._prefix)}"

    def tensors(self) -> dict[str, torch.Tensor]:
        """Its tensors by name; raises WorkloadError when something in it cannot be kept."""
        return self._encoded()[1]

    def facts(self) -> dict[str, Any]:
        """The rest of it, in JSON; nothing when it has no state."""
        value, tensors = self._encoded()
        if not value:
            return {}
        return {"value": value, "forms": {key: tensor_metadata(tensor) for key, tensor in tensors.items()}}

    def _encoded(self) -> tuple[Any, dict[str, torch.Tensor]]:
        value, found = self._answer or self._ask()
        own = self._own_names
        return rename_tensors(value, own), {own.get(key, key): tensor for key, tensor in found.items()}

    def _ask(self) -> tuple[Any, dict[str, torch.Tensor]]:
        ask = getattr(self._owner, "state_dict", None)
        state = ask() if callable(ask) else {}
        found: dict[str, torch.Tensor] = {}
        try:
            value = encode(state, self._prefix, found, self._names, SharedContainers(state)) if state else None
        except Unsavable as reason:
            raise WorkloadError(f"what {self._called}.state_dict() returns: {reason}") from reason
        self.reordered = frozenset(find_reordered_sets(state, self._prefix))
        return _merge_references(value, found)

    def targets(self, facts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Memory for the tensors of a checkpoint with these facts."""
        live = self.tensors()
        self._targets = {}
        for key, wanted in facts.get("forms", {}).items():
            made = zeros(wanted, (live.get(key), *self._parameters.values()), self._device)
            if made is None:
                raise WorkloadError(f"the checkpoint has {key} {wanted}, but no parameter is sharded alike")
            self._targets[key] = made
        return self._targets

    def restored(self, facts: Mapping[str, Any]) -> Any:
        """What it has saved, with its tensors as they have been filled."""
        return decode(facts["value"], self._targets, self._parameters)

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Hand the object what it has saved; nothing when the checkpoint has nothing of it."""
        if not facts:
            return
        load = getattr(self._owner, "load_state_dict", None)
        if not callable(load):
            raise WorkloadError(
                f"the checkpoint has a state of the {self._prefix}, but {self._called} has no load_state_dict(): put "
                "the code back as it was, or add one"
            )
        load(self.restored(facts))


def _merge_references(value: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Save memory that several tensors of a state share once: as with `torch.save`, they share it again after a load.

    That is a tensor which stands twice, and a part of one that stands whole and is contiguous.
    """
    plain = {
        path: tensor
        for path, tensor in tensors.items()
        if type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta
    }
    whole: dict[Any, str] = {}
    for path, tensor in plain.items():
        if tensor.is_contiguous() and tensor.nbytes == tensor.untyped_storage().nbytes():
            whole.setdefault(_memory(tensor), path)
    first: dict[Any, str] = {}
    instead: dict[str, Any] = {}
    for path, tensor in plain.items():
        place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        base = whole.get(_memory(tensor)) or first.setdefault((_memory(tensor), place), path)
        if path == base:
            continue
        at, shape, stride = place
        is_same = tensor.is_set_to(tensors[base])
        instead[path] = {"tensor": base} if is_same else {"view": [{"tensor": base}, list(shape), list(stride), at]}
    kept = {path: tensor for path, tensor in tensors.items() if path not in instead}
    return (replace_tensors(value, instead) if instead else value), kept


def _memory(tensor: torch.Tensor) -> tuple[torch.device, int, torch.dtype]:
    return tensor.device, tensor.untyped_storage().data_ptr(), tensor.dtype
