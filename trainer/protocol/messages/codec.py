"""Messages as lines of JSON. Decoding checks every value against the type declared in its dataclass.

A line is an object. Its key `say` names the message, and the other keys are its fields. Fields with their default value
are omitted. Unknown keys are ignored, because newer processes may add keys.
"""

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from enum import Enum
from itertools import product
from types import NoneType, UnionType
from typing import Annotated, Any, Generic, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from checkpointing.storage.durable import dump_line

KEY = "say"
LONGEST_ROWS = 4096
"""Maximum number of rows or names in a field, which holds a few per rank of a node. `Annotated` sets other limits."""
_DIGITS, _LONG, _EXPONENT = bytes.maketrans(b"123456789E", b"000000000e"), b"0" * 19, b"e000"
_SHOWN = 60
"""Maximum number of characters of a value that an error shows."""

M_co = TypeVar("M_co", covariant=True)
Read = Callable[[Any], Any]
"""Decoder of a field's value from JSON. Raises _Unfit."""


class MessageError(ValueError):
    """The received data is not a message in this direction. The text names the field."""


class _Unfit(Exception):  # noqa: N818  # never leaves this file
    """A value does not have the type that its field declares."""


class Direction(Generic[M_co]):
    """Set of messages that one end of a link may send to the other end."""

    def __init__(self, *classes: type[M_co]) -> None:
        self.classes = classes
        self._by_name = {_shape(one).name: one for one in classes}

    def read(self, line: bytes | bytearray) -> M_co:
        """Parse the message in a line. Raises MessageError."""
        return self.decode(parse(line))

    def decode(self, fields: Mapping[str, Any]) -> M_co:
        """Build the message with these fields. Raises MessageError."""
        name = fields.get(KEY)
        if not isinstance(name, str):
            raise MessageError(f"no message: {_short(fields)}")
        if name not in self._by_name:
            raise MessageError(f"{_short(name)}, which is not allowed here")
        found: M_co = _build(self._by_name[name], fields)
        return found


def wire_name(message: type) -> str:
    """Return the name on the wire, such as `rank_end` for `RankEnd`."""
    return _shape(message).name


def encode(message: object) -> str:
    """Encode the message as a line of JSON."""
    return dump_line({KEY: wire_name(type(message)), **_non_default_fields(message)})


# -- JSON --------------------------------------------------------------------------------------------------------------


def parse(line: bytes | bytearray) -> dict[str, Any]:
    """Parse the object in a line. Its numbers must fit into 64 bits and be finite. Raises MessageError."""
    try:
        # Checking every number doubles the cost, so it is done only for lines with a possibly large number.
        fields = (_CAREFUL if _is_doubtful(line) else _QUICK).decode(line.decode())
    except (ValueError, RecursionError) as error:  # deep nesting exhausts the parser's stack
        raise MessageError(f"no JSON: {bytes(line[:40])!r}") from error
    if not isinstance(fields, dict):
        raise MessageError(f"no message: {_short(fields)}")
    return fields


def _is_doubtful(line: bytes | bytearray) -> bool:
    """Return whether a number may be out of range, because it has 19 digits in a row or a three-digit exponent."""
    shapes = line.translate(_DIGITS, b"+")
    return _LONG in shapes or _EXPONENT in shapes


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"not a number: {text[:20]}")


def _integer(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= int(text) < 1 << 63:
        _refuse(text)
    return int(text)


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        _refuse(text)
    return value


_QUICK = json.JSONDecoder(parse_constant=_refuse)
_CAREFUL = json.JSONDecoder(parse_constant=_refuse, parse_int=_integer, parse_float=_real)

# -- dataclasses, compiled once ----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """Field of a message."""

    name: str
    read: Read
    default: Any
    nested: bool  # it contains dataclasses


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """Name on the wire and fields of a dataclass."""

    name: str
    entries: tuple[_Entry, ...]


_SHAPES: dict[type, _Shape] = {}


def _shape(message: type) -> _Shape:
    found = _SHAPES.get(message)
    if found is None:
        hints = get_type_hints(message, include_extras=True)
        entries = tuple(_entry(one, hints[one.name]) for one in fields(message))
        name = re.sub(r"(?<!^)([A-Z])", r"_\1", message.__name__).lower()
        found = _SHAPES[message] = _Shape(name=name, entries=entries)
    return found


def _entry(field: "Field[Any]", annotation: Any) -> _Entry:
    return _Entry(name=field.name, read=_reader(annotation), default=_default(field), nested=_is_nested(annotation))


def _default(field: "Field[Any]") -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _non_default_fields(message: object) -> dict[str, Any]:
    found = {}
    for entry in _shape(type(message)).entries:
        value = getattr(message, entry.name)
        if entry.default is MISSING or value != entry.default:
            found[entry.name] = _plain(value) if entry.nested else value
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return None if value is None else _non_default_fields(value)


def _build(message: type, fields: Mapping[str, Any]) -> Any:
    values, shape = {}, _shape(message)
    for entry in shape.entries:
        if entry.name in fields:
            try:
                values[entry.name] = entry.read(fields[entry.name])
            except _Unfit:
                raise MessageError(f"a {shape.name!r} whose {entry.name} is {_short(fields[entry.name])}") from None
        elif entry.default is MISSING:
            raise MessageError(f"a {shape.name!r} without {entry.name}")
    return message(**values)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# -- values of one type ------------------------------------------------------------------------------------------------

_SCALARS = {int: (int,), float: (float, int), str: (str,), bool: (bool,), NoneType: (NoneType,)}
"""Accepted types by annotation. A bool is not a number, and an int is accepted as a float."""


def _reader(annotation: Any) -> Read:
    origin, inner = get_origin(annotation), get_args(annotation)
    types = _scalar_types(annotation)
    if types:
        return _scalar(types)
    if origin in (Union, UnionType) and len(inner) == 2 and inner[1] is NoneType:
        return _optional(_reader(inner[0]))
    if origin is Annotated:
        return _container(inner[0], longest=inner[1])
    if origin in (tuple, dict):
        return _container(annotation)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return _member(annotation)
    if isinstance(annotation, type) and is_dataclass(annotation):
        return _nested_reader(annotation)
    raise TypeError(f"a message cannot have a field of type {annotation}")


def _container(annotation: Any, longest: int = LONGEST_ROWS) -> Read:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is dict and inner[0] is str:
        return _by_name(_scalar_types(inner[1]), longest)
    if origin is tuple:
        return _rows(inner[0], longest) if inner[-1] is Ellipsis else _row(inner)
    raise TypeError(f"a message cannot have a field of type {annotation}")


def _is_nested(annotation: Any) -> bool:
    return is_dataclass(annotation) or any(map(_is_nested, get_args(annotation)))


def _scalar_types(annotation: Any) -> frozenset[type]:
    """Return the accepted JSON types if all are scalars, otherwise an empty set."""
    union = get_origin(annotation) in (Union, UnionType)
    found = [_SCALARS.get(one, ()) for one in (get_args(annotation) if union else (annotation,))]
    return frozenset(one for types in found for one in types) if all(found) else frozenset()


def _scalar(types: frozenset[type]) -> Read:
    def read(value: Any) -> Any:
        if type(value) not in types:
            raise _Unfit
        return value

    return read


def _optional(inner: Read) -> Read:
    return lambda value: None if value is None else inner(value)


def _row(annotations: tuple[Any, ...]) -> Read:
    # Use a single lookup per row, because a large job reports thousands of rows per second.
    allowed = frozenset(product(*map(_scalar_types, annotations)))

    def read(value: Any) -> Any:
        if type(value) is not list or tuple(map(type, value)) not in allowed:
            raise _Unfit
        return tuple(value)

    return read


def _rows(annotation: Any, longest: int = LONGEST_ROWS) -> Read:
    types = _scalar_types(annotation)
    inner = _reader(annotation)

    def read(value: Any) -> Any:
        if type(value) is not list or len(value) > longest:
            raise _Unfit
        if not types:
            return tuple(map(inner, value))
        if not types.issuperset(map(type, value)):
            raise _Unfit
        return tuple(value)

    return read


def _by_name(types: frozenset[type], longest: int) -> Read:
    def read(value: Any) -> Any:
        if type(value) is not dict or len(value) > longest or not types.issuperset(map(type, value.values())):
            raise _Unfit
        return value

    return read


def _member(kind: type[Enum]) -> Read:
    by_value = {(type(one.value), one.value): one for one in kind}

    def read(value: Any) -> Any:
        if type(value) not in (int, str) or (type(value), value) not in by_value:
            raise _Unfit
        return by_value[type(value), value]

    return read


def _nested_reader(message: type) -> Read:
    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise _Unfit
        try:
            return _build(message, value)
        except MessageError:
            raise _Unfit from None

    return read
