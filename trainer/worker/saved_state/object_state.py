"""State of a user's object as JSON and named tensors. Every type is restored exactly.

Scalars and lists are unchanged. Everything else is an object whose only key names its type, such as `{"tuple": [0.9,
0.95]}`, `{"float": "inf"}` or `{"tensor": "optimizer/weight/exp_avg"}`.
"""

import base64
import json
import math
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from numbers import Number
from typing import Any

import torch
from torch import nn

from trainer.worker.saved_state.checkpoint_contents import differing_tensors, tensor_metadata, zeros
from trainer.worker.workload import WorkloadError

Names = Mapping[torch.Tensor, str]
"""Names of the model's parameters, keyed by parameter."""

_MOST_INLINE = 4096
"""Maximum number of bytes stored in JSON. Longer values are saved as a tensor."""
_PLAIN = (type(None), bool, int, str)
_NUMBER = re.compile("-?[0-9]+")
_CODES = {"%": "%25", ":": "%3A", "/": "%2F"}
"""Escape sequences for characters that have a meaning in paths. The first entry is the escape character's own."""
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Surrogates, which UTF-8 cannot encode; Python uses them for non-UTF-8 bytes in file names."""
_SURROGATE_CODE = re.compile("%U([0-9a-f]{4})")


class UnsavableValue(Exception):
    """A value has a type that cannot be saved. The message starts with the path to the value."""

    def __init__(self, path: str, value: object, why: str = "") -> None:
        super().__init__(f"{path} {why or f'is a {type(value).__module__}.{type(value).__qualname__}'}")


def encode(
    value: Any, path: str, tensors: dict[str, torch.Tensor], names: Names, shared: "SharedContainers | None" = None
) -> Any:
    """Encode `value` as JSON and add its tensors to `tensors` under `path`. Raises UnsavableValue.

    A container in `shared` is encoded only once. Later occurrences are encoded as its number.
    """
    if shared is None or id(value) not in shared.ids:
        return _encode_one(value, path, tensors, names, shared)
    if id(value) in shared.numbers:
        return {"same": shared.numbers[id(value)]}
    if id(value) in shared.begun:
        raise UnsavableValue(path, value, "holds itself")
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
            path += "%"  # for different keys with the same text, such as two NaNs
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
            [encoded_key, encode(item, f"{path}:{_key_part(key, encoded_key)}", tensors, names, shared)]
            for encoded_key, (key, item) in zip(keys, value.items(), strict=True)
        ]
        return {_MAPPINGS[kind]: pairs}
    if kind is bytes:
        if len(value) <= _MOST_INLINE:
            return {"bytes": base64.b64encode(value).decode()}
        return {"bytes": encode(torch.frombuffer(bytearray(value), dtype=torch.uint8), path, tensors, names)}
    if kind is complex:
        return {"complex": [encode(part, path, tensors, names) for part in (value.real, value.imag)]}
    if isinstance(value, Number) and hasattr(value, "tobytes") and hasattr(value, "dtype"):  # a NumPy number
        return {"numpy": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    raise UnsavableValue(path, value)


_CONTAINERS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", deque: "deque"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}


def _is_trained(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


class SharedContainers:
    """Mutable containers and trained tensors that occur more than once in a state."""

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
        """Numbers keyed by id, in encoding order. `decode` counts in the same order."""


def _items(value: Any) -> Any:
    """Return the items of a container, with a deque's `maxlen` as its first item."""
    if isinstance(value, deque):
        return [value.maxlen, *value]
    return sorted(value, key=repr) if isinstance(value, set | frozenset) else value


def find_reordered_sets(value: Any, path: str) -> Iterator[str]:
    """Yield the paths of sets of numbers whose iteration order would differ after a restart."""
    if isinstance(value, set | frozenset):
        if all(isinstance(item, int | float) for item in value) and list(type(value)(_items(value))) != list(value):
            yield path
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from find_reordered_sets(item, f"{path}:{key}")
    elif isinstance(value, list | tuple | deque):
        for at, item in enumerate(value):
            yield from find_reordered_sets(item, f"{path}:{at}")


def _key_part(key: Any, encoded: Any) -> str:
    return path_part(key) if type(key) in (str, int) else f"%({_escape_separators(text(encoded))})"


def path_part(key: str | int) -> str:
    """Return a key's path part, which is unique and has no separator characters."""
    return f"%s{key}" if isinstance(key, str) and _NUMBER.fullmatch(key) else _escape_separators(str(key))


def parse_path_part(word: str) -> str | int:
    """Return the key of a path part."""
    if _NUMBER.fullmatch(word):
        return int(word)
    if word.startswith("%s"):
        return word[2:]
    word = _SURROGATE_CODE.sub(lambda code: chr(int(code[1], 16)), word)
    for sign, code in reversed(_CODES.items()):
        word = word.replace(code, sign)
    return word


def _escape_separators(part: str) -> str:
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
    "memory": lambda parts: _view_memory(*parts),
    "leaf": lambda tensor: tensor.requires_grad_(),
    "own parameter": lambda parts: nn.Parameter(*parts),
}


def decode(
    value: Any,
    tensors: Mapping[str, torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    shared: list[Any] | None = None,
) -> Any:
    """Return the value that `encode` turned into this JSON. Raises KeyError for a missing tensor or parameter."""
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
    if kind == "numpy":
        dtype, held = inner
        return import_module("numpy").frombuffer(base64.b64decode(held), dtype)[0]
    if kind == "bytes":
        return base64.b64decode(inner) if isinstance(inner, str) else bytes(tensors[inner["tensor"]].tolist())
    made = decode(inner, tensors, parameters, shared)
    if kind == "shared":
        shared.append(made)
        return made
    return _MAKERS[kind](made)


def text(value: Any) -> str:
    """Return text that is equal only for equal encoded values. 1, 1.0 and True differ, as do 0.0 and -0.0."""
    return json.dumps(value, sort_keys=True)


def replace_tensors(value: Any, by_name: Mapping[str, Any]) -> Any:
    """Return an encoded value with these tensors replaced by other encoded values."""
    if isinstance(value, list):
        return [replace_tensors(item, by_name) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    return by_name.get(inner, value) if kind == "tensor" else {kind: replace_tensors(inner, by_name)}


def references(value: Any) -> list[str]:
    """Return the names of all tensors in an encoded value."""
    if isinstance(value, list):
        return [name for item in value for name in references(item)]
    if isinstance(value, dict):
        return [name for kind, inner in value.items() for name in ([inner] if kind == "tensor" else references(inner))]
    return []


class ObjectState:
    """State of one object, with tensors named `<prefix>...`. An object without `state_dict` has no state."""

    def __init__(self, owner: object, prefix: str, model: nn.Module, device: torch.device, *, called: str = "") -> None:
        """Wrap an object. `called` is the name used in messages, by default the class of `owner`."""
        self._owner, self._prefix, self._device = owner, prefix, device
        self._called = called or type(owner).__name__
        self._parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        self._names = {parameter: name for name, parameter in self._parameters.items()}
        self._targets: dict[str, torch.Tensor] = {}
        self._own_names: dict[str, str] = {}
        self._answer: tuple[Any, dict[str, torch.Tensor]] | None = None
        self.reordered_sets = frozenset[str]()
        """Sets in the newest state whose iteration order a restart would change."""

    @contextmanager
    def freeze_state(self) -> Iterator[None]:
        """Take tensors and facts from one `state_dict` call within the context, because other threads may change it."""
        self._answer = self._encode_state_dict()
        try:
            yield
        finally:
            self._answer = None

    def separate_ranks(self, rank: int) -> None:
        """Save tensors that differ between ranks once per rank from now on, under separate names. Collective."""
        if callable(getattr(self._owner, "state_dict", None)):
            shared = {key: one for key, one in self.tensors().items() if key not in self._own_names.values()}
            for key in differing_tensors(shared):
                self._own_names[key] = f"{self._prefix}/rank-{rank:05d}{key.removeprefix(self._prefix)}"

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors, keyed by name. Raises WorkloadError for a value that cannot be saved."""
        return self._read_state()[1]

    def facts(self) -> dict[str, Any]:
        """Return the rest of the state as JSON, or {} if the object has no state."""
        value, tensors = self._read_state()
        if not value:
            return {}
        return {"value": value, "forms": {key: tensor_metadata(tensor) for key, tensor in tensors.items()}}

    def _read_state(self) -> tuple[Any, dict[str, torch.Tensor]]:
        value, found = self._answer or self._encode_state_dict()
        own = self._own_names
        renamed = replace_tensors(value, {old: {"tensor": new} for old, new in own.items()})
        return renamed, {own.get(key, key): tensor for key, tensor in found.items()}

    def _encode_state_dict(self) -> tuple[Any, dict[str, torch.Tensor]]:
        ask = getattr(self._owner, "state_dict", None)
        state = ask() if callable(ask) else {}
        found: dict[str, torch.Tensor] = {}
        try:
            value = encode(state, self._prefix, found, self._names, SharedContainers(state)) if state else None
        except UnsavableValue as reason:
            raise WorkloadError(f"the result of {self._called}.state_dict(): {reason}") from reason
        self.reordered_sets = frozenset(find_reordered_sets(state, self._prefix))
        return _merge_references(value, found)

    def targets(self, facts: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Allocate the tensors of a checkpoint with these facts."""
        live = self.tensors()
        self._targets = {}
        for key, wanted in facts.get("forms", {}).items():
            made = zeros(wanted, (live.get(key), *self._parameters.values()), self._device)
            if made is None:
                raise WorkloadError(f"the checkpoint has {key} {wanted}, but no parameter is sharded that way")
            self._targets[key] = made
        return self._targets

    def decode_state(self, facts: Mapping[str, Any]) -> Any:
        """Return the saved state with its filled tensors."""
        return decode(facts["value"], self._targets, self._parameters)

    def restore(self, facts: Mapping[str, Any]) -> None:
        """Load the saved state into the object. Do nothing if the checkpoint has none."""
        if not facts:
            return
        load = getattr(self._owner, "load_state_dict", None)
        if not callable(load):
            raise WorkloadError(
                f"the checkpoint has a state for the {self._prefix}, but {self._called} has no load_state_dict(): put "
                "the code back as it was, or add one"
            )
        load(self.decode_state(facts))


def _merge_references(value: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[Any, dict[str, torch.Tensor]]:
    """Store memory shared by several tensors only once. As with `torch.save`, they share it again after a load."""
    by_storage: dict[Any, list[tuple[int, int, str]]] = {}
    for path, tensor in tensors.items():
        if type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta:
            storage = tensor.device, tensor.untyped_storage().data_ptr()
            by_storage.setdefault(storage, []).append((*_byte_range(tensor), path))
    instead: dict[str, Any] = {}
    kept = dict(tensors)
    for ranges in by_storage.values():
        for first, last, paths in _overlapping(ranges):
            forms: dict[Any, str] = {}
            for path in paths:
                forms.setdefault(_form(tensors[path]), path)
            base = next((path for path in forms.values() if _fills(tensors[path], first, last)), "")
            if len(forms) > 1 and not base:
                base = f"{paths[0]}:%memory"
                kept[base] = _bytes_between(tensors[paths[0]], first, last)
            for path in paths:
                like = forms[_form(tensors[path])]
                if len(forms) > 1 and like != base:
                    instead[path] = _memory_view(tensors[path], base, kept[base])
                elif path != like:
                    instead[path] = {"tensor": like}
    for path in instead:
        del kept[path]
    return (replace_tensors(value, instead) if instead else value), kept


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return how a tensor interprets its storage. Equal forms in the same storage mean equal tensors."""
    place = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return tensor.dtype, *place, tensor.is_conj(), tensor.is_neg()


def _byte_range(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.itemsize
    return first, first + (int(last) + 1) * tensor.itemsize


def _overlapping(ranges: list[tuple[int, int, str]]) -> Iterator[tuple[int, int, list[str]]]:
    """Yield the byte ranges in which several paths overlap, with these paths in order."""
    order = {path: number for number, (_, _, path) in enumerate(ranges)}
    groups: list[tuple[int, int, list[str]]] = []
    for first, last, path in sorted(ranges):
        if groups and first < groups[-1][1]:
            begin, end, paths = groups[-1]
            groups[-1] = begin, max(end, last), [*paths, path]
        else:
            groups.append((first, last, [path]))
    for first, last, paths in groups:
        if len(paths) > 1:
            yield first, last, sorted(paths, key=order.__getitem__)


def _fills(tensor: torch.Tensor, first: int, last: int) -> bool:
    """Return whether a tensor contains every byte of a range in order, as a restored tensor does."""
    is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    return is_plain and _byte_range(tensor) == (first, last)


def _bytes_between(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return a range of a tensor's storage as bytes, starting at a multiple of 16 so that all types stay aligned."""
    first -= first % 16
    memory = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return memory.set_(tensor.untyped_storage(), first, (last - first,), (1,))


def _memory_view(tensor: torch.Tensor, base: str, memory: torch.Tensor) -> dict[str, Any]:
    """Return the encoded form of a tensor that is a view of `memory`, with its offset in bytes."""
    offset = tensor.storage_offset() * tensor.itemsize - memory.storage_offset() * memory.itemsize
    dtype = {"dtype": str(tensor.dtype).removeprefix("torch.")}
    place = [list(tensor.shape), list(tensor.stride()), offset]
    return {"memory": [{"tensor": base}, dtype, *place, tensor.is_conj(), tensor.is_neg()]}


def _view_memory(
    memory: torch.Tensor, dtype: torch.dtype, shape: list[int], stride: list[int], offset: int, conj: bool, neg: bool
) -> torch.Tensor:
    view = torch.empty(0, dtype=dtype, device=memory.device)
    start = (memory.storage_offset() * memory.itemsize + offset) // view.itemsize
    view.set_(memory.untyped_storage(), start, shape, stride)
    view = view.conj() if conj else view
    return torch._neg_view(view) if neg else view
