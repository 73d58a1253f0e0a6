"""Conversion of plain JSON data to dataclasses."""

import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

from checkpointing.storage.durable import finite, whole

T = TypeVar("T")


def build(kind: type[T], value: Any) -> T:
    """Build a dataclass, including nested dataclasses. Unknown keys are ignored. Raises ValueError or TypeError."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{kind.__name__}: not an object: {value!r:.60}")
    converters = _find_converters(typing.cast(Any, kind))
    return kind(**{name: convert(value[name]) for name, convert in converters if name in value})


@functools.cache  # evaluating all annotations is slow
def _find_converters(kind: type) -> list[tuple[str, Callable[[Any], Any]]]:
    """Return the conversion of each field, in field order, so that the first error is always the same."""
    hints = typing.get_type_hints(kind)
    return [(one.name, _make_converter(hints[one.name])) for one in fields(typing.cast(Any, kind))]


@functools.cache
def _make_converter(annotation: Any) -> Callable[[Any], Any]:
    if isinstance(annotation, type) and is_dataclass(annotation):
        return functools.partial(build, annotation)
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (tuple, list):
        convert_item = _make_converter(inner[0])
        return lambda items: origin(map(convert_item, items))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        convert_value = _make_converter(inner[1])
        return lambda found: {key: convert_value(item) for key, item in found.items()}
    if origin in (typing.Union, types.UnionType):
        convert = _make_converter(next(one for one in inner if one is not type(None)))
        return lambda value: None if value is None else convert(value)
    if isinstance(annotation, type) and issubclass(annotation, Enum) or annotation is float:
        return typing.cast(Callable[[Any], Any], annotation)
    return _keep


def _keep(value: Any) -> Any:
    return value


def _type_reader(kind: type) -> Callable[[object], Any]:
    return lambda value: value if isinstance(value, kind) else None


_READERS: dict[Any, Callable[[object], Any]] = {
    **{int: whole, int | None: whole, float: finite, float | None: finite},
    **{str: _type_reader(str), bool: _type_reader(bool)},
}


def known_fields(kind: type, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number, text and flag fields of a dataclass whose values in `found` have the declared types."""
    read = {one.name: _READERS[one.type](found.get(one.name)) for one in fields(kind) if one.type in _READERS}
    return {name: value for name, value in read.items() if value is not None}
