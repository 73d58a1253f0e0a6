"""YAML dialect of configs, shipped presets, and the nearest name for a missing file.

YAML 1.1, PyYAML's default, reads `time: 1:00:00` as 3600, `no` as false and `1e5` as text.
"""

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from orchestrator.errors import ConfigError
from orchestrator.home import shipped_folder
from orchestrator.near_words import nearest


def near_file(path: Path, endings: Collection[str]) -> str | None:
    """Return the name nearest to `path` among its siblings with one of these endings, or None."""
    try:
        names = sorted(file.name for file in path.parent.iterdir() if file.suffix in endings and file.is_file())
    except OSError:
        return None
    stems = {Path(name).stem.lower(): name for name in reversed(names)}
    return stems.get(nearest(path.stem.lower(), stems, 0.7))


def names() -> list[str]:
    """Return the names of all presets as users write them: `tiny-gpt`, `model/tiny`."""
    root = shipped_folder("configs")
    return sorted(path.relative_to(root).with_suffix("").as_posix() for path in root.rglob("*.yaml"))


_CORE = "tag:yaml.org,2002:"
_ALLOWED = frozenset(_CORE + name for name in ("str", "int", "float", "bool", "null", "seq", "map"))
_PLAINLY = "write plain values only: words, numbers, lists and mappings"
_TOO_DEEP = "the YAML is nested too deeply, or its aliases expand without end"
_MOST_NODES = 20_000
_MOST_DIGITS = 1_000
"""Maximum number of digits in a number. No key accepts more, and Python refuses to convert more than 4300."""
_SCALARS: tuple[tuple[str, str, str], ...] = (
    ("null", r"^(?:~|null|Null|NULL|)$", "~nN\0"),
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$", "-+0123456789"),
    (
        "float",
        r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$",
        "-+.0123456789",
    ),
)


_OLD_BOOLEANS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


class _Loader(yaml.SafeLoader):
    """Loader that resolves plain scalars by YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, Any] = {}


for _name, _pattern, _first in _SCALARS:
    for _letter in _first:
        _Loader.yaml_implicit_resolvers.setdefault("" if _letter == "\0" else _letter, []).append(
            (_CORE + _name, re.compile(_pattern))
        )


def parse(text: str, where: str) -> Node | None:
    """Return the node of one YAML document, or None for an empty one. Raises ConfigError with the line number."""
    try:
        node: Node | None = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        what = error.problem or error.context or "unreadable"
        is_typed = where.startswith("override")
        hint = "put the text in quotes, or close the bracket" if is_typed else "fix that line, or the one before it"
        if what.startswith("but "):
            what, hint = f"{error.context}, {what}", "write each document to a file of its own"
        elif r"'\t'" in what:
            what, hint = "found a tab", "indent with spaces, and write spaces between words"
        raise ConfigError(f"not YAML: {what}", where=place(where, mark), hint=hint) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"not YAML: {str(error).splitlines()[0]}", where=where, hint="is it a text file?") from error
    except RecursionError as error:  # PyYAML recurses for each level
        raise ConfigError(_TOO_DEEP, where=where, hint=_PLAINLY) from error
    if node is not None:
        _check(node, where, [])
    return node


def place(where: str, mark: Any) -> str:
    """Return `file:line` for a file; an override has only one line."""
    return where if mark is None or where.startswith("override") else f"{where}:{mark.line + 1}"


def node_location(node: Node, where: str) -> str:
    return place(where, node.start_mark)


def _check(node: Node, where: str, count: list[None], depth: int = 0) -> None:
    count.append(None)
    if depth > 60 or len(count) > _MOST_NODES:
        raise ConfigError(_TOO_DEEP, where=where, hint=_PLAINLY)
    if node.tag not in _ALLOWED:
        tag = node.tag.replace(_CORE, "!!")
        raise ConfigError(f"the YAML tag `{tag}` is not allowed", where=node_location(node, where), hint=_PLAINLY)
    if node.tag == _CORE + "int" and len(node.value) > _MOST_DIGITS:
        what = f"a number has {len(node.value)} digits: {node.value[:20]}..."
        raise ConfigError(what, where=node_location(node, where), hint="put it in quotes if it is a string")
    if isinstance(node, SequenceNode):
        for item in node.value:
            _check(item, where, count, depth + 1)
    elif isinstance(node, MappingNode):
        _check_mapping(node, where, count, depth)


def _check_mapping(node: MappingNode, where: str, count: list[None], depth: int) -> None:
    seen: dict[str, Node] = {}
    for key, value in node.value:
        if not isinstance(key, ScalarNode):
            what = "a key must be a word, not a list or mapping"
            raise ConfigError(what, where=node_location(key, where), hint=_PLAINLY)
        if key.value == "<<":
            what, hint = "merge keys (`<<`) are not supported", "write out the keys, or move them to an included file"
            raise ConfigError(what, where=node_location(key, where), hint=hint)
        if key.value in seen:
            first = node_location(seen[key.value], where)
            hint = f"it is also at {first}; keep one of the two"
            raise ConfigError(f"the key `{key.value}` is given twice", where=node_location(key, where), hint=hint)
        seen[key.value] = key
        _check(value, where, count, depth + 1)


def is_null(node: Node) -> bool:
    return bool(node.tag == _CORE + "null")


def old_boolean(node: Node) -> str:
    """Return `true` or `false` for an unquoted YAML 1.1 boolean such as `yes` (text in YAML 1.2); empty for others."""
    is_word = isinstance(node, ScalarNode) and not node.style and node.tag == _CORE + "str"
    return _OLD_BOOLEANS.get(str(node.value).lower(), "") if is_word else ""


def plain(node: Node, *, as_typed: bool = False) -> Any:
    """Return a node as Python data: None, bool, int, float, str, list or dict.

    `as_typed`: a number that Python would print differently stays text (`007`, `1e3`).
    """
    if isinstance(node, SequenceNode):
        return [plain(item, as_typed=as_typed) for item in node.value]
    if isinstance(node, MappingNode):
        return {key.value: plain(value, as_typed=as_typed) for key, value in node.value}
    text = str(node.value)
    value: Any = text
    match node.tag.removeprefix(_CORE):
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            value = int(text, 0) if text[:2] in ("0o", "0x") else int(text)
        case "float":
            value = float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text if as_typed and str(value) != text else value


_UNQUOTED = re.compile(r"(?:[A-Za-z./][\w./+-]*|--?[A-Za-z][\w-]*)")


def format_list_items(words: Sequence[str]) -> str:
    """Format texts as the items of a YAML list."""
    return ", ".join(
        word if _UNQUOTED.fullmatch(word) and word != "null" else json.dumps(word, ensure_ascii=False) for word in words
    )
