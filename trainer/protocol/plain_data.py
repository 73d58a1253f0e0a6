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
    hints = _find_types(typing.cast(Any, kind))
    # In field order, so that the first error is always the same.
    names = [one.name for one in fields(typing.cast(Any, kind)) if one.name in value]
    return kind(**{name: _convert(hints[name], value[name]) for name in names})


def _convert(annotation: Any, value: Any) -> Any:
    if is_dataclass(annotation):
        return build(typing.cast(type, annotation), value)
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (tuple, list):
        return origin(_convert(inner[0], item) for item in value)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {key: _convert(inner[1], item) for key, item in value.items()}
    if origin in (typing.Union, types.UnionType):
        return None if value is None else _convert(next(one for one in inner if one is not type(None)), value)
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return annotation(value)
    return float(value) if annotation is float else value


@functools.cache  # evaluating all annotations is slow
def _find_types(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


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
