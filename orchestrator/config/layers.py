"""Config sources: files with their includes and overrides become one list of assignments, weakest first."""

import ast
import difflib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from orchestrator.config import keys, redaction, yaml_text
from orchestrator.config.run_config import RunConfig
from orchestrator.config.yaml_text import find_configs, near_file
from orchestrator.errors import ConfigError, NotFound
from orchestrator.home import shipped_folder
from trainer.protocol.config import WorkloadConfig
from trainer.protocol.config_sections.scheduler_kinds import choices

_COMMAND_LINE = ("notify", "command")
"""A list of strings that may be written as one string."""
_COMMAND = ("command",)
_FOLDERS = ("workload", "path")
_CLUSTER = ("cluster",)
_TARGET = re.compile(r"[\w./]+:[A-Za-z_]\w*")
_OVERRIDE = re.compile(r"(?P<sign>[+~]?)(?P<key>[A-Za-z_][\w\-]*(?:\.[\w\-]+)*)(?:=(?P<value>.*))?", re.DOTALL)


def is_override(text: str) -> bool:
    """Return whether the text is `key=value`, `+key...` or `~key`, not a path such as `~/mine.yaml`."""
    match = _OVERRIDE.fullmatch(text)
    return match is not None and bool(match["sign"] or match["value"] is not None)


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """A value for one key, or with `clears` a reset to its default."""

    path: keys.Path
    value: Any
    origin: str
    clears: bool = False
    adds: bool = True  # may add a new entry to an open map
    shipped: bool = False  # from a preset that ships with orch
    folder: str = ""  # folder of its file; relative folders are resolved against it


def standing_files(environ: Mapping[str, str]) -> list[Path]:
    """Return the site and user configs that exist. A file named in the environment must exist."""
    found = []
    for variable in ("ORCH_SITE_CONFIG", "ORCH_USER_CONFIG"):
        named = environ.get(variable)
        path = Path(named).expanduser() if named else _usual_file(variable, environ)
        if named and not path.is_file():
            what = f"no such file: {path}" if not path.exists() else f"{path} {_no_file(path)}"
            raise ConfigError(what, where=f"${variable}", hint=f"unset {variable}, or name a file there")
        if path.is_file():
            found.append(path)
    return found


def _usual_file(variable: str, environ: Mapping[str, str]) -> Path:
    """Return the default file for an unset variable; raises RuntimeError if the home is needed but unknown."""
    if variable == "ORCH_SITE_CONFIG":
        return Path("/etc/orch/site.yaml")
    folder = environ.get("XDG_CONFIG_HOME")
    home = environ.get("HOME")
    config = Path(folder) if folder else (Path(home) if home else Path.home()) / ".config"
    return config / "orch" / "config.yaml"


def locate(source: str, beside: Path, where: str) -> Path:
    """Return the file of a preset or path. Raises NotFound with similar names, or ConfigError if a file includes it."""
    as_path = Path(source).expanduser()
    path = beside / as_path
    if not where:
        _refuse_script(source, path)
    is_name = source.strip() and not source.startswith((".", "/", "~")) and as_path.suffix not in (".yaml", ".yml")
    if is_name and source in yaml_text.names():
        return shipped_folder("configs") / f"{source}.yaml"
    if source.strip() and path.is_file():
        return path
    what = f"config {source or '(empty)'}: {_no_file(path)}"
    if is_name and not path.exists():
        what = f"no preset `{source}`, and no such file"
    is_special = source.strip() and path.exists() and not path.is_dir()
    hint = "write the configuration to a regular file, and name that" if is_special else _offer(source, where, beside)
    raise (ConfigError if where else NotFound)(what, where=where or (source if is_name else str(path)), hint=hint)


_INTERPRETERS = {".py": "python, ", ".sh": "bash, "}
"""Command prefix by file suffix; a script with a `#!` line needs none."""


def _refuse_script(source: str, path: Path) -> None:
    """Raise ConfigError for a user's script, NotFound if it is missing, with the command that submits it."""
    ending = Path(source).suffix
    if ending not in _INTERPRETERS and (ending or not path.is_file() or not _names_interpreter(path)):
        return
    hint = _as_command(source)
    if not path.is_file():
        near = near_file(path, _INTERPRETERS)
        there = source.removesuffix(path.name) + near if near else source
        offer = f"did you mean {there}?  " if near else "with an existing script: "
        raise NotFound(f"no such file {source}", where=str(path), hint=f"{offer}{_as_command(there)}")
    hint = _workload_hint(path) or hint
    raise ConfigError(f"{source} is a script, not a configuration", where=str(path), hint=hint)


def _workload_hint(path: Path) -> str:
    """Return a hint with the config of the workload class that a module defines, or an empty string."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and any(getattr(each, "name", "") == "build_model" for each in node.body):
            named = f"workload: {{target: {path.stem}:{node.name}, path: [.]}}"
            return f"it defines a workload; a configuration names it: `{named}`"
    return ""


def _as_command(source: str) -> str:
    """Return the command that submits a script."""
    starter = _INTERPRETERS.get(Path(source).suffix, "")
    script = source if starter or "/" in source else f"./{source}"
    word = script if re.fullmatch(r"[\w./~+-]+", script) else json.dumps(script, ensure_ascii=False)
    return f"orch submit torchrun-script {shlex.quote(f'command=[{starter}{word}]')}"


def _names_interpreter(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            return stream.read(2) == b"#!"
    except OSError:
        return False


def _no_file(path: Path) -> str:
    """Return why a path cannot be read."""
    if path.is_dir():
        return "is a folder"
    return "is a pipe or a device; only regular files are read" if path.exists() else "no such file"


def _offer(source: str, where: str, beside: Path) -> str:
    """Return a hint with the nearest file or presets; only files may include partial presets."""
    typed = Path(source).expanduser()
    source = source.rstrip("/") or source
    if source.strip() and (inside := find_configs(beside / typed)):
        return f"did you mean {' or '.join(shlex.quote(str(typed / file.name)) for file in inside)}?"
    if _TARGET.fullmatch(source):
        module, _, kind = source.removeprefix("./").replace(".py:", ":").replace("/", ".").partition(":")
        return f"a configuration names the workload: `workload: {{target: {module}:{kind}, path: [.]}}`"
    near_by = near_file(beside / typed, (".yaml", ".yml")) if source.strip(" ./~") else None
    if near_by is not None:
        return f"did you mean {shlex.quote(source.removesuffix(typed.name) + near_by)}?"
    if (key := keys.nearest_key(source)) and "." in source:
        return f"this is a key; name a configuration before it: orch submit tiny-gpt {key}=VALUE"
    known = [name for name in yaml_text.names() if where or "/" not in name]
    near = difflib.get_close_matches(source, known, n=1, cutoff=0.8)
    near = near or difflib.get_close_matches(Path(source).stem, known, n=3, cutoff=0.5)
    return f"did you mean {' or '.join(near)}?" if near else f"presets: {', '.join(known)}"


def from_file(path: Path, above: tuple[Path, ...] = ()) -> list[Assignment]:
    """Return the assignments of a file, after those of its includes; raises ConfigError."""
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
        there = (
            f"keys in `{keys.dotted_key(path)}`: {', '.join(keys.section(kind))}"
            if keys.is_section(kind)
            else f"{keys.dotted_key(path)}={{key: value}}"
        )
        offer = _preset_meant(path, str(node.value)) if isinstance(node, ScalarNode) else ""
        raise ConfigError(f"`{keys.dotted_key(path)}` must be a mapping", where=here, hint=offer or there)


def _preset_meant(path: keys.Path, value: str) -> str:
    """Return a suggested replacement of a scalar for a section (`model=NAME`); empty if unknown."""
    if _TARGET.fullmatch(value):
        return f"did you mean `workload: {{target: {value}}}`?"
    parts = [name for name in yaml_text.names() if name.startswith(f"{keys.dotted_key(path)}/")]
    if not parts:
        return ""
    if path == _CLUSTER and value in choices():
        return f"{keys.dotted_key((*path, 'kind'))}={value}"
    near = yaml_text.nearest_part(keys.dotted_key(path), value)
    if not near and path != _CLUSTER:  # `train=3` needs a key
        return ""
    suggestion = f"did you mean the preset {near}?  " if near else ""
    return f"{suggestion}a YAML file includes a preset: `includes: [{near or parts[0]}]`; available: {', '.join(parts)}"


def _kind_below(kind: Any, path: keys.Path, where: str) -> Any:
    if kind is Any:
        return Any
    if keys.is_open(kind):
        return keys.item_kind(kind)
    if path[-1] not in keys.section(kind):
        raise keys.unknown_key_error(path, kind, where)
    return keys.section(kind)[path[-1]]


def _value(node: Node, kind: Any, path: keys.Path, where: str) -> Any:
    """Return a node as data; a value of type text keeps its spelling (`017` keeps its zero)."""
    is_list = keys.type_words(kind).startswith("a list")
    if yaml_text.is_null(node) and kind is not Any:
        hint = f"leave `{keys.dotted_key(path)}` out for its default" + (", or write ''" if kind is str else "")
        raise _wrong(path, "empty", kind, yaml_text.node_location(node, where), hint)
    if kind is str:
        if not isinstance(node, ScalarNode):
            raise _wrong(path, yaml_text.plain(node), kind, yaml_text.node_location(node, where), "put it in quotes")
        return str(node.value)
    if kind is Any:
        return keys.value(node, path, where)
    if not is_list or _is_reference(node):
        return yaml_text.plain(node)
    if not isinstance(node, SequenceNode):
        shown = str(yaml_text.plain(node))
        of_mappings = keys.type_words(kind) == "a list of mappings"
        what = "{KEY: VALUE}" if of_mappings else _as_list(path, shown)
        hint = f"write a list: {shlex.quote(f'{keys.dotted_key(path)}=[{what}]')}"
        raise _wrong(path, shown, kind, yaml_text.node_location(node, where), hint)
    inner = keys.item_kind(kind)
    return [_item(item, inner, path, where) for item in node.value]


def _as_list(path: keys.Path, text: str) -> str:
    """Return the items of a list that was written as one string."""
    if path == _FOLDERS:
        return str(Path(text).parent) if Path(text).suffix == ".py" else text
    words = text.split()
    starter = _INTERPRETERS.get(Path(text).suffix, "") if path == _COMMAND and len(words) == 1 else ""
    return starter + ", ".join(words)


def _item(node: Node, kind: Any, path: keys.Path, where: str) -> Any:
    if not keys.is_section(kind) or _is_reference(node):
        return _value(node, kind, path, where)
    here = yaml_text.node_location(node, where)
    if not isinstance(node, MappingNode):
        hint = f"keys: {', '.join(keys.section(kind))}"
        raise ConfigError(f"every entry of `{keys.dotted_key(path)}` must be a mapping", where=here, hint=hint)
    item = {}
    for key, value in node.value:
        if key.value not in keys.section(kind):
            raise keys.unknown_key_error((*path, str(key.value)), kind, yaml_text.node_location(key, where))
        item[key.value] = _value(value, keys.section(kind)[key.value], (*path, str(key.value)), where)
    return item


def _is_reference(node: Node) -> bool:
    return isinstance(node, ScalarNode) and str(node.value).startswith("${")


def _wrong(path: keys.Path, shown: Any, kind: Any, where: str, hint: str) -> ConfigError:
    return ConfigError(f"`{keys.dotted_key(path)}` is {shown}, must be {keys.type_words(kind)}", where=where, hint=hint)


def from_overrides(overrides: Sequence[str]) -> list[Assignment]:
    """Return the assignments of the command line, in order; raises ConfigError."""
    return [item for number, text in enumerate(overrides, 1) for item in _override(f"override #{number}", text)]


def from_settings(settings: Sequence[str]) -> list[Assignment]:
    """Return the assignments that a verb makes itself, in override syntax."""
    return [item for text in settings for item in _override("set by orch", text)]


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
    return [_as_override(item, sign) for item in _assignments(_node(value, kind, where), kind, path, where)]


def _as_override(item: Assignment, sign: str) -> Assignment:
    return Assignment(path=item.path, value=item.value, origin=item.origin, adds=sign == "+")


def _node(text: str, kind: Any, where: str) -> Node:
    mark = None
    if kind is str and text[:1] not in ("'", '"'):
        return ScalarNode("tag:yaml.org,2002:str", text, mark, mark)
    node = yaml_text.parse(text, where)
    return node if node is not None else ScalarNode("tag:yaml.org,2002:null", "", mark, mark)
