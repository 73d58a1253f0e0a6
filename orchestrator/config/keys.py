"""Config keys, read from the dataclasses, and suggestions for unknown keys."""

import math
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from yaml.nodes import MappingNode, Node, SequenceNode

from orchestrator.config import yaml_text
from orchestrator.config.run_config import RunConfig
from orchestrator.errors import ConfigError
from orchestrator.near_words import nearest

Path = tuple[str, ...]
INCLUDES = "includes"


def dotted_key(path: Sequence[str]) -> str:
    return ".".join(path)


@cache
def section(kind: Any) -> dict[str, Any]:
    """Return the keys of a dataclass with their types, in declaration order."""
    hints = typing.get_type_hints(kind)
    return {item.name: hints[item.name] for item in fields(kind)}


def is_section(kind: Any) -> bool:
    return is_dataclass(kind)


def is_open(kind: Any) -> bool:
    """Return whether this is a map to which users may add their own keys."""
    return typing.get_origin(kind) is dict


def item_kind(kind: Any) -> Any:
    """Return the element type of a tuple or open map."""
    arguments = typing.get_args(kind)
    return arguments[1] if is_open(kind) else arguments[0]


def key_type(path: Path, where: str) -> Any:
    """Return the type of the key at `path`. If it is unknown, raise ConfigError with the nearest valid key."""
    kind: Any = RunConfig
    for depth, name in enumerate(path):
        if is_open(kind):
            kind = item_kind(kind)
        elif kind is Any:
            return kind
        elif is_section(kind) and name in section(kind):
            kind = section(kind)[name]
        elif is_section(kind):
            raise unknown_key_error(path[: depth + 1], kind, where, path)
        else:
            parent = dotted_key(path[:depth])
            what = f"`{parent}` is a single value without a key `{name}`"
            raise ConfigError(what, where=where, hint=f"{parent}=VALUE")
    return kind


def within_open(path: Path) -> bool:
    """Return whether `path` names an entry of an open map."""
    return any(is_open(key_type(path[:depth], "")) for depth in range(len(path)))


def unknown_key_error(path: Path, kind: Any, where: str, whole: Path = ()) -> ConfigError:
    """Return the error for an unknown key of section `kind`. `whole` is the full key as typed, if it is longer."""
    prefix, there = path[:-1], list(section(kind))
    typed = whole or path
    siblings = [dotted_key((*prefix, name)) for name in there]
    near = nearest_key(dotted_key(typed), siblings) or nearest(dotted_key(path), siblings)
    meant = f"did you mean `{near}`?  " if near else ""
    place = f"keys in `{dotted_key(prefix)}`" if prefix else "keys"
    return ConfigError(f"unknown key `{dotted_key(path)}`", where=where, hint=f"{meant}{place}: {', '.join(there)}")


def nearest_key(typed: str, siblings: Sequence[str] = ()) -> str:
    """Return the key with the closest spelling, or one with the same last part, or "" if nothing matches."""
    present = [*map(dotted_key, every_key()), INCLUDES, *siblings]
    last = typed.rpartition(".")[2]
    same = (key for key in present if key.rpartition(".")[2] == last)
    return nearest(typed, present, 0.8) or next(same, "") or nearest(typed, present)


@cache
def every_key() -> tuple[Path, ...]:
    """Return the paths of all values and open maps."""
    return tuple(_below(RunConfig, ()))


def _below(kind: Any, path: Path) -> Iterator[Path]:
    for name, inner in section(kind).items():
        if is_section(inner):
            yield from _below(inner, (*path, name))
        else:
            yield (*path, name)


def key_default(path: Path) -> Any:
    """Return the default of a key; None for an entry of an open map."""
    value: Any = RunConfig()
    for name in path:
        value = value.get(name) if isinstance(value, dict) else getattr(value, name, None)
    return value


_LISTS = {str: ("texts", "A, B"), float: ("numbers", "1, 2")}
_MAPPINGS = ("mappings", "{KEY: VALUE}")
"""What a list contains, in plain words, with example entries."""


def example_items(kind: Any) -> str:
    """Return example entries for a list."""
    return _LISTS.get(item_kind(kind), _MAPPINGS)[1]


def type_words(kind: Any) -> str:
    """Describe a type in plain words."""
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if typing.get_origin(kind) is tuple:
        return f"a list of {_LISTS.get(item_kind(kind), _MAPPINGS)[0]}"
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " or ".join(type_words(inner) for inner in typing.get_args(kind))
    return words.get(kind, "a mapping" if is_section(kind) or is_open(kind) else "a value")


_WORKLOAD = "workload"


def value(node: Node, path: Path, where: str) -> Any:
    """Return an entry of an open map as data: Slurm options as typed, workload arguments as YAML values.

    Raises ConfigError for an unquoted yes, no, on or off outside Slurm options, and for a number that is not finite,
    because jobs read `config.json` and JSON cannot represent it.
    """
    if path[0] != _WORKLOAD and "sbatch" in path:
        return yaml_text.plain(node, as_typed=True)
    if isinstance(node, SequenceNode):
        return [value(item, path, where) for item in node.value]
    if isinstance(node, MappingNode):
        return {key.value: value(below, (*path, key.value), where) for key, below in node.value}
    if meant := yaml_text.old_boolean(node):
        what = f"`{dotted_key(path)}` is the word {node.value}, which YAML 1.2 reads as text"
        hint = f'write {meant}, or "{node.value}" in quotes for the word'
        raise ConfigError(what, where=yaml_text.node_location(node, where), hint=hint)
    found = yaml_text.plain(node, as_typed=path[0] != _WORKLOAD)
    if isinstance(found, float) and not math.isfinite(found):
        what = f"`{dotted_key(path)}` is {node.value}: must be a finite number"
        hint = f'write "{found}" in quotes, and have the workload call float() on it'
        raise ConfigError(what, where=yaml_text.node_location(node, where), hint=hint)
    return found
