"""Messages between ranks, and between a rank and its writer, as typed JSON: plain values and registered classes.

Plain JSON values are unchanged. Everything else is an object with one key, its kind: `{"tuple": [...]}`, or a class
with its fields in order, `{"Failed": [...]}`. Decoding creates only instances of registered classes, with fields of
their declared types, and runs no code. torch is not imported, and only a process that has imported it can encode or
decode a dtype.
"""

import base64
import dataclasses
import json
import math
import sys
import types
import typing
from collections.abc import Callable, Mapping, Set
from functools import cache
from operator import attrgetter
from typing import Any, TypeVar, cast

from checkpointing.errors import CheckpointRefused, UnsafePickle
from checkpointing.format.commit import Commit, Region
from checkpointing.format.manifest import FileEntry, Index, Manifest, Piece, TensorInfo
from checkpointing.format.read_plan import Strip

T = TypeVar("T")

_PLAIN = frozenset({str, int, bool, type(None)})
_NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_FIELDS: dict[type, tuple[str, ...]] = {}
_CLASSES: dict[str, type] = {}


class InvalidMessage(ValueError):
    """Bytes that are not a message in this version's format, or a value that cannot be sent."""


def peer_message(kind: type[T]) -> type[T]:
    """Register a dataclass or named tuple as part of messages, encoded field by field."""
    if dataclasses.is_dataclass(kind):
        return _register(kind, tuple(field.name for field in dataclasses.fields(kind)))
    return _register(kind, kind._fields)  # type: ignore[attr-defined]


def _register(kind: type[T], fields: tuple[str, ...]) -> type[T]:
    assert kind.__name__ not in _CLASSES, f"two message classes are named {kind.__name__}"
    _FIELDS[kind], _CLASSES[kind.__name__] = fields, kind
    return kind


for _kind in (Commit, FileEntry, Index, Manifest, Piece, Region, Strip, TensorInfo):
    peer_message(_kind)
for _error in (CheckpointRefused, UnsafePickle):
    _register(_error, ("name", "reason", "damaged", "fits", "unreadable"))


def encode(value: Any) -> bytes:
    """Return `value` as a message. Raises InvalidMessage for an unregistered type."""
    return json.dumps(_encode_value(value), allow_nan=False, separators=(",", ":")).encode()


def decode(message: bytes | bytearray) -> Any:
    """Return the value that `encode` was called with. Raises InvalidMessage."""
    try:
        return json.loads(message, object_hook=_decode_object, parse_constant=_raise_unknown)
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidMessage(f"not a valid message: {error}") from error


def _encode_value(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_encode_value(item) for item in value]
    if kind in _FIELDS:
        return {kind.__name__: [_encode_value(field) for field in _getter(cast(Any, kind))(value)]}
    for base, encode_kind in _ENCODERS:
        if isinstance(value, base):
            return encode_kind(value)
    if kind.__module__ == "torch" and kind.__name__ == "dtype":
        return {"dtype": str(value).removeprefix("torch.")}
    raise InvalidMessage(f"cannot send a {kind.__qualname__}")


@cache
def _getter(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    fields = _FIELDS[kind]
    if len(fields) > 1:
        return attrgetter(*fields)
    return lambda value: tuple(getattr(value, field) for field in fields)


def _float(value: float) -> Any:
    return float(value) if math.isfinite(value) else {"float": repr(float(value))}


def _pairs(value: Mapping[Any, Any]) -> Any:
    return {"dict": [[_encode_value(key), _encode_value(item)] for key, item in value.items()]}


_ENCODERS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (float, _float),
    (str, str),  # also subclasses, such as the type of torch's version
    (bytes, lambda value: {"bytes": base64.b64encode(value).decode()}),
    (tuple, lambda value: {"tuple": [_encode_value(item) for item in value]}),
    (Mapping, _pairs),
    (Set, lambda value: {"set": [_encode_value(item) for item in value]}),
)


def _decode_object(found: dict[str, Any]) -> Any:
    """Return the value of one JSON object whose parts are already decoded."""
    ((kind, value),) = found.items()
    if kind in _DECODERS:
        return _DECODERS[kind](value)
    return _instance(_CLASSES[kind] if kind in _CLASSES else _raise_unknown(kind), value)


def _instance(kind: Any, values: list[Any]) -> Any:
    fields, declared = _FIELDS[kind], _declared_types(kind)
    for name, value, allowed in zip(fields, values, declared, strict=True):
        if not isinstance(value, allowed):
            _raise_unknown(f"{kind.__name__}.{name} of type {type(value).__name__}")
    return kind(**dict(zip(fields, values, strict=True)))


@cache
def _declared_types(kind: type) -> tuple[tuple[type, ...], ...]:
    """Return the outermost classes that each field's annotation allows. Without an annotation, any class is allowed."""
    known = typing.get_type_hints(kind)
    return tuple(_classes(known.get(field, Any)) for field in _FIELDS[kind])


def _classes(hint: Any) -> tuple[type, ...]:
    if hint is Any:
        return (object,)
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return tuple(one for part in typing.get_args(hint) for one in _classes(part))
    kind = typing.get_origin(hint) or hint
    return (float, int) if kind is float else (kind,)


def _dtype(name: str) -> Any:
    found = getattr(sys.modules.get("torch"), name, None)
    return found if type(found).__name__ == "dtype" else _raise_unknown(f"dtype {name}")


def _raise_unknown(what: str) -> typing.NoReturn:
    raise ValueError(f"unknown {what[:60]}")


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "float": lambda name: _NON_FINITE[name] if name in _NON_FINITE else _raise_unknown(name),
    "bytes": lambda text: base64.b64decode(text, validate=True),
    "tuple": tuple,
    "dict": dict,
    "set": frozenset,
    "dtype": _dtype,
}
