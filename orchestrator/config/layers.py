"""Config sources: files with their includes and overrides become one list of assignments, weakest first."""

import re
import shlex
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from orchestrator.config import keys, redaction, yaml_text
from orchestrator.config.run_config import RunConfig
from orchestrator.config.yaml_text import format_list_items, near_file
from orchestrator.errors import ConfigError, NotFound
from orchestrator.home import shipped_folder
from orchestrator.near_words import did_you_mean, nearest
from trainer.protocol.config import WorkloadConfig

_COMMAND_LINE = ("notify", "command")
"""A list of strings that may be written as one string."""
_STARTERS = {".py": "python", ".sh": "bash"}
"""Programs that run scripts, keyed by file suffix."""
_OVERRIDE = re.compile(r"(?P<sign>[+~]?)(?P<key>[A-Za-z_][\w\-]*(?:\.[\w\-]+)*)(?:=(?P<value>.*))?", re.DOTALL)


def is_override(text: str) -> bool:
    """Return whether the text is `key=value`, `+key...` or `~key`, not a path such as `~/mine.yaml`."""
    match = _OVERRIDE.fullmatch(text)
    return match is not None and bool(match["sign"] or match["value"] is not None)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A value for one key or, with `clears`, a reset to its default."""

    path: keys.Path
    value: Any
    origin: str
    clears: bool = False
    adds: bool = True  # may add a new entry to an open map
    shipped: bool = False  # from a preset that ships with orch
    folder: str = ""  # its file's folder, against which relative folders are resolved


def standing_files(environ: Mapping[str, str]) -> list[Path]:
    """Return the site and user configs that exist. A file named in the environment must exist."""
    found = []
    for variable in ("ORCH_SITE_CONFIG", "ORCH_USER_CONFIG"):
        named = environ.get(variable)
        path = Path(named).expanduser() if named else _usual_file(variable, environ)
        if named and not path.is_file():
            what = f"no such file: {path}" if not path.exists() else f"{path} {_no_file(path)}"
            raise ConfigError(what, where=f"${variable}", hint=f"unset {variable}, or set it to an existing file")
        if path.is_file():
            found.append(path)
    return found


def user_file(environ: Mapping[str, str]) -> Path:
    """Return the user's own config file, which may not exist. Raises RuntimeError if the home is needed but unknown."""
    named = environ.get("ORCH_USER_CONFIG")
    return Path(named).expanduser() if named else _usual_file("ORCH_USER_CONFIG", environ)


def _usual_file(variable: str, environ: Mapping[str, str]) -> Path:
    """Return the default file for an unset variable. Raises RuntimeError if the home is needed but unknown."""
    if variable == "ORCH_SITE_CONFIG":
        return Path("/etc/orch/site.yaml")
    folder = environ.get("XDG_CONFIG_HOME")
    home = environ.get("HOME")
    config = Path(folder) if folder else (Path(home) if home else Path.home()) / ".config"
    return config / "orch" / "config.yaml"


def locate(source: str, folder: Path, where: str) -> Path:
    """Return the file of a preset or path.

    If there is no such file, raises NotFound (or ConfigError for an include) with a similar name. For a script, raises
    ConfigError with the command that submits it.
    """
    as_path = Path(source).expanduser()
    path = folder / as_path
    is_name = source.strip() and not source.startswith((".", "/", "~")) and as_path.suffix not in (".yaml", ".yml")
    if is_name and source in yaml_text.names():
        return shipped_folder("configs") / f"{source}.yaml"
    if source.strip() and path.is_file():
        if _is_job_script(path):
            hint = f"orch submit --from-sbatch {shlex.quote(source)}"
            raise ConfigError(f"{source} is an sbatch script, not a configuration", where=where or str(path), hint=hint)
        if (starter := _STARTERS.get(path.suffix)) is not None:
            hint = f"orch submit torchrun-script {shlex.quote(f'command=[{starter}, {format_list_items([source])}]')}"
            raise ConfigError(f"{source} is a script, not a configuration", where=where or str(path), hint=hint)
        return path
    what = f"config {source or '(empty)'}: {_no_file(path)}"
    if is_name and not path.exists():
        what = f"no preset `{source}`, and no such file"
    is_special = source.strip() and path.exists() and not path.is_dir()
    hint = "write the configuration to a regular file, and use that" if is_special else _offer(source, where, folder)
    raise (ConfigError if where else NotFound)(what, where=where or (source if is_name else str(path)), hint=hint)


def _is_job_script(path: Path) -> bool:
    """Return whether this is a script with `#SBATCH` lines."""
    try:
        with path.open("rb") as file:
            head = file.read(1 << 16)
    except OSError:  # reported where it is read
        return False
    return head.startswith(b"#!") and b"\n#SBATCH" in head


def _no_file(path: Path) -> str:
    """Return why a path cannot be read."""
    if path.is_dir():
        return "is a folder"
    return "is a pipe or a device; only regular files are read" if path.exists() else "no such file"


def _offer(source: str, where: str, folder: Path) -> str:
    """Return a hint with the nearest file or preset; only files may include partial presets."""
    typed = Path(source).expanduser()
    near = near_file(folder / typed, (".yaml", ".yml", typed.suffix or ".yaml")) if source.strip(" ./~") else None
    if near is not None:
        return f"did you mean {shlex.quote(source.rstrip('/').removesuffix(typed.name) + near)}?"
    known = [name for name in yaml_text.names() if where or "/" not in name]
    return did_you_mean(nearest(source, known, 0.8) or nearest(typed.stem, known), f"presets: {', '.join(known)}")


def from_file(path: Path, above: tuple[Path, ...] = ()) -> list[Assignment]:
    """Return a file's assignments, preceded by those of its includes. Raises ConfigError."""
    path = path.resolve()
    if path in above:
        chain = " -> ".join(str(step) for step in (*above, path))
        raise ConfigError("a config includes itself", where=str(path), hint=f"break the cycle {chain}")
    node = yaml_text.parse(_text(path), str(path))
    if node is None or yaml_text.is_null(node):
        return []
    if not isinstance(node, MappingNode):
        what = "a list" if isinstance(node, SequenceNode) else "a single value"
        hint = "write keys and values, as in `train: {steps: 100}`"
        raise ConfigError(f"a config must be a mapping, not {what}", where=str(path), hint=hint)
    found = []
    for included, where in _read_includes(node, path):
        found += from_file(locate(included, path.parent, where), (*above, path))
    pairs = [(key, value) for key, value in node.value if key.value != keys.INCLUDES]
    rest = MappingNode(node.tag, pairs, node.start_mark, node.end_mark)
    shipped = path.is_relative_to(shipped_folder("configs").resolve())
    own = _assignments(rest, RunConfig, (), str(path))
    return found + [replace(item, shipped=shipped, folder=str(path.parent)) for item in own]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        what = f"not YAML: the file is not UTF-8 text ({error.reason})"
        raise ConfigError(what, where=str(path), hint="name a text file of keys and values") from error
    except OSError as error:
        hint = f"chmod u+r {shlex.quote(str(path))}" if isinstance(error, PermissionError) else "name another file"
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path), hint=hint) from error


def _read_includes(node: MappingNode, path: Path) -> Iterator[tuple[str, str]]:
    for key, value in node.value:
        if key.value != keys.INCLUDES:
            continue
        items = value.value if isinstance(value, SequenceNode) else [value]
        for item in items:
            where = yaml_text.node_location(item, str(path))
            if not isinstance(item, ScalarNode) or yaml_text.is_null(item):
                raise ConfigError("`includes` must be a list of presets", where=where, hint="includes: [model/tiny]")
            yield str(item.value), where


def _assignments(node: Node, kind: Any, path: keys.Path, where: str) -> Iterator[Assignment]:
    here = yaml_text.node_location(node, where)
    nested = keys.is_section(kind) or keys.is_open(kind) or (kind is Any and isinstance(node, MappingNode))
    if kind is WorkloadConfig and isinstance(node, ScalarNode) and not yaml_text.is_null(node):
        # `workload=my_pkg.mod:Class` is short for `workload.target`.
        yield Assignment(path=(*path, "target"), value=str(node.value), origin=here)
    elif (
        path == _COMMAND_LINE and isinstance(node, ScalarNode) and not (yaml_text.is_null(node) or _is_reference(node))
    ):
        # A single line is a shell command.
        yield Assignment(path=path, value=["sh", "-c", str(node.value)], origin=here)
    elif not nested or (kind is Any and not node.value):
        yield Assignment(path=path, value=_value(node, kind, path, where), origin=here)
    elif isinstance(node, MappingNode):
        for key, value in node.value:
            below = (*path, str(key.value))
            inner = _kind_below(kind, below, yaml_text.node_location(key, where))
            yield from _assignments(value, inner, below, where)
    elif not yaml_text.is_null(node):
        key = keys.dotted_key(path)
        hint = f"keys in `{key}`: {', '.join(keys.section(kind))}" if keys.is_section(kind) else f"{key}={{key: value}}"
        if presets := [name for name in yaml_text.names() if name.startswith(f"{key}/")]:
            hint += f"; a file includes a preset: `includes: [{presets[0]}]`; available: {', '.join(presets)}"
        raise ConfigError(f"`{key}` must be a mapping", where=here, hint=hint)


def _kind_below(kind: Any, path: keys.Path, where: str) -> Any:
    if kind is Any:
        return Any
    if keys.is_open(kind):
        return keys.item_kind(kind)
    if path[-1] not in keys.section(kind):
        raise keys.unknown_key_error(path, kind, where)
    return keys.section(kind)[path[-1]]


def _value(node: Node, kind: Any, path: keys.Path, where: str, part: str = "") -> Any:
    """Return a node as data; text keeps its spelling (`017` keeps its zero). OmegaConf checks other types.

    `part` begins the error message for a list entry, because OmegaConf's own error would not name the key.
    """
    if kind is Any:
        return keys.value(node, path, where)
    if isinstance(node, SequenceNode) and typing.get_origin(kind) is tuple:
        return [_value(item, keys.item_kind(kind), path, where, "an entry of ") for item in node.value]
    if isinstance(node, MappingNode) and keys.is_section(kind):
        found = {}
        for key, value in node.value:
            below = (*path, str(key.value))
            found[below[-1]] = _value(
                value, _kind_below(kind, below, yaml_text.node_location(key, where)), below, where
            )
        return found
    is_single = isinstance(node, ScalarNode) and not yaml_text.is_null(node) and not keys.is_section(kind)
    is_list, is_number_entry = typing.get_origin(kind) is tuple, bool(part) and kind is float
    is_wrong = is_list or (is_number_entry and isinstance(yaml_text.plain(node), str))
    if not is_single or (is_wrong and not _is_reference(node)):
        shown = "empty" if yaml_text.is_null(node) else yaml_text.plain(node)
        what = f"{part}`{keys.dotted_key(path)}` is {shown}, but must be {keys.type_words(kind)}"
        raise ConfigError(what, where=yaml_text.node_location(node, where), hint=_remedy(node, kind, path))
    return str(node.value) if kind is str else yaml_text.plain(node)


def _remedy(node: Node, kind: Any, path: keys.Path) -> str:
    key = keys.dotted_key(path)
    if keys.is_section(kind):
        return f"keys of an entry: {', '.join(keys.section(kind))}"
    if typing.get_origin(kind) is tuple and not yaml_text.is_null(node):
        is_text = isinstance(node, ScalarNode) and keys.item_kind(kind) is str
        items = format_list_items(node.value.split()) if is_text else keys.example_items(kind)
        return f"write a list: {shlex.quote(f'{key}=[{items}]')}"
    return f"leave `{key}` out for its default" + (", or write ''" if kind is str else "")


def _is_reference(node: Node) -> bool:
    return isinstance(node, ScalarNode) and str(node.value).startswith("${")


def from_overrides(overrides: Sequence[str], source: str = "override #{}") -> list[Assignment]:
    """Return the assignments for texts in override syntax, in order. Raises ConfigError."""
    return [item for number, text in enumerate(overrides, 1) for item in _override(source.format(number), text)]


def _override(source: str, text: str) -> list[Assignment]:
    where = f"{source}: {redaction.shown_override(text)}"
    match = _OVERRIDE.fullmatch(text)
    if match is None:
        raise ConfigError("an override must be key=value, +key=value or ~key", where=where, hint="train.steps=100")
    if match["value"] is None and not match["sign"] and text.endswith((".yaml", ".yml")):
        hint = f"to combine them, write `includes: [{text}]` at the top of the first"
        raise ConfigError(f"{text} is a second configuration, but only one is accepted", where=where, hint=hint)
    sign, path, value = match["sign"], tuple(match["key"].split(".")), match["value"]
    kind = keys.key_type(path, where)
    if sign == "~":
        if value is not None:
            raise ConfigError("`~key` takes no value", where=where, hint=f"~{match['key']}")
        return [Assignment(path=path, value=None, origin=where, clears=True)]
    if value is None:
        hint = f"{sign}{match['key']}=VALUE, or ~{match['key']} for its default"
        raise ConfigError("the override has no value", where=where, hint=hint)
    if sign == "+" and not keys.within_open(path):
        hint = f"remove the +: {text[1:]}"
        raise ConfigError(
            f"`{match['key']}` is not an entry of an open map, and + only adds such entries", where=where, hint=hint
        )
    found = _assignments(_node(value, kind, where), kind, path, where)
    return [replace(item, adds=sign == "+") for item in found]


def _node(text: str, kind: Any, where: str) -> Node:
    if kind is str and text[:1] not in ("'", '"'):
        return ScalarNode("tag:yaml.org,2002:str", text)
    return yaml_text.parse(text, where) or ScalarNode("tag:yaml.org,2002:null", "")
