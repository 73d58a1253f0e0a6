"""Compose files and overrides into one RunConfig, with its digest and the origin of each value."""

import copy
import json
import math
import os
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import canonical, dump_line
from orchestrator.config import keys, layers, redaction, validation
from orchestrator.config.detected_gpus import fill_in_gpus
from orchestrator.config.layers import Assignment
from orchestrator.config.run_config import RunConfig
from orchestrator.config.validation import refuse_ineffective
from orchestrator.errors import ConfigError
from orchestrator.home import expand_home
from trainer.parallel.layout import MayChange
from trainer.protocol.config import hash_config
from trainer.protocol.plain_data import build


@lru_cache(maxsize=64)  # a controller recomposes the same configs in every pass, and merging is most of the work
def _merge_cached(written: str) -> dict[str, Any]:
    from omegaconf import OmegaConf  # heavy

    whole = OmegaConf.merge(writable_schema(RunConfig), json.loads(written))
    found: dict[str, Any] = plain(OmegaConf.to_container(whole, resolve=True))
    return found


@cache  # building the schema takes as long as the rest of a composition, and `merge` copies its arguments
def writable_schema(kind: Any) -> Any:
    """Return an OmegaConf schema that `merge` can write to, although the dataclasses are frozen."""
    from omegaconf import DictConfig, OmegaConf  # heavy

    schema = OmegaConf.structured(kind)
    sections = [schema]
    for section in sections:
        OmegaConf.set_readonly(section, False)
        sections += [section[name] for name in section if isinstance(section[name], DictConfig)]
    return schema


def plain(value: Any) -> Any:
    """Copy nested dicts and lists, with string keys. Tuples become lists, and dataclasses become dicts."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in _field_names(type(value))}
    return value


@cache
def _field_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(item.name for item in fields(kind))


DEFAULT = "default"
_DOLLAR = "\ud8fe"
"""Placeholder for a literal `$` until all values are resolved. No text or file name can contain it."""
_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)\})", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Composed:
    """A resolved config: dataclasses, plain JSON data, SHA-256 digest and the origin of each value."""

    config: RunConfig
    data: dict[str, Any]
    digest: str
    origins: dict[str, str]


def compose(
    source: str,
    overrides: Sequence[str] = (),
    *,
    environ: Mapping[str, str] = os.environ,
    preset_wins: bool = False,
    settings: Sequence[str] = (),
) -> Composed:
    """Resolve a preset or file.

    Layers, weakest first: defaults, presets, site, user, the file's includes, the file, `settings` (set by a verb),
    overrides. With `preset_wins`, presets override site and user configs, for runs that must be the same everywhere.
    Raises a ConfigError that names the key, its origin and the remedy.
    """
    path = layers.locate(source, Path.cwd(), "")
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", path.stem).strip("-.") or "run"
    name = Assignment(path=("name",), value=stem, origin=f"name of {path}")
    standing = [item for file in layers.standing_files(environ) for item in layers.from_file(file)]
    wanted = layers.from_file(path)
    shipped = [item for item in wanted if item.shipped and not preset_wins]
    own = [item for item in wanted if preset_wins or not item.shipped]
    given = [*layers.from_overrides(settings, "set by orch"), *layers.from_overrides(overrides)]
    label = f"{path}, which is empty" if not wanted else str(path)
    composed = _compose_assignments([name, *shipped, *standing, *own, *given], environ, source=label)
    if not preset_wins:
        refuse_ineffective(composed.config, [*own, *layers.from_overrides(overrides)])
    return without_secrets(composed)


def recompose(
    data: dict[str, Any],
    overrides: Sequence[str],
    *,
    environ: Mapping[str, str] = os.environ,
    checked: bool = True,
    may_change: MayChange = lambda key: True,
) -> Composed:
    """Return the config of a submitted run with overrides applied. Raises ConfigError as `compose` does.

    Neither the text that was tokenized into `data.path` nor the code that was copied at submission is read again. Keys
    that this version of orch does not know are dropped. `checked` is False for a config that was accepted earlier. If
    sizes do not fit, the hint suggests changes only to keys that `may_change`.
    """
    gone = {("data", "text")} if data.get("data", {}).get("path") else set()
    gone |= {("workload", "path")} if data.get("workload", {}).get("snapshot") else set()
    found = [
        Assignment(path=path, value=_literal(value), origin="the run's configuration")
        for path, value in _values(data, RunConfig, ())
        if path not in gone
    ]
    changes = layers.from_overrides(overrides)
    composed = _compose_assignments([*found, *changes], environ, checked=checked, may_change=may_change)
    refuse_ineffective(composed.config, changes)
    composed = without_secrets(composed) if overrides else composed
    whole = dict(composed.data)
    for section, name in gone:
        whole[section] = {**whole[section], name: whole[section][name] or data[section].get(name, [])}
    return replace(composed, data=whole, digest=hash_config(whole))


def without_secrets(composed: Composed) -> Composed:
    """Return `composed`. Raises ConfigError for a secret that would be written to `config.json` and the registry."""
    redaction.require_none(flat(composed.data), composed.origins, composed.config.env_from)
    return composed


def _values(data: Mapping[str, Any], kind: Any, above: keys.Path) -> Iterator[tuple[keys.Path, Any]]:
    """Yield each value of a resolved config with its path; entries of open maps may have dots in their names."""
    for name, value in data.items():
        path = (*above, str(name))
        if keys.is_section(kind):
            if name in keys.section(kind):
                inner = keys.section(kind)[name]
                known = keys.is_section(inner) or keys.is_open(inner)
                yield from _values(value, inner, path) if known else [(path, value)]
        elif isinstance(value, dict) and value:
            yield from _values(value, Any, path)
        else:
            yield path, value


def _literal(value: Any) -> Any:
    """Escape every `$` in a resolved value, so that it is not interpolated again."""
    return _replace_text(value, "$", _DOLLAR)


def _replace_text(value: Any, old: str, new: str) -> Any:
    if isinstance(value, str):
        return value.replace(old, new)
    if isinstance(value, dict):
        return {key: _replace_text(item, old, new) for key, item in value.items()}
    return [_replace_text(item, old, new) for item in value] if isinstance(value, (list, tuple)) else value


def _compose_assignments(
    assignments: Sequence[Assignment],
    environ: Mapping[str, str],
    *,
    checked: bool = True,
    source: str = "",
    may_change: MayChange = lambda key: True,
) -> Composed:
    values, origins = _apply_assignments(assignments)
    folders = {item.path: item.folder for item in assignments}
    _make_folders_absolute(values, folders)
    data = _absolute(_resolve_values(values, origins), origins, environ, folders)
    config = _built(data, origins)
    if checked:
        validation.check(config, origins, source, may_change)
    data = plain(config)
    return Composed(
        config=config,
        data=data,
        digest=hash_config(data),
        origins={key: _origin(key, origins) for key in flat(data)},
    )


def diff(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the differences between two resolved configs: dotted key -> (before, after), None for a missing key."""
    old, new = flat(before), flat(after)
    changed = [key for key in dict.fromkeys([*old, *new]) if _text(old, key) != _text(new, key)]
    return {key: (old.get(key), new.get(key)) for key in changed}


def _text(values: dict[str, Any], key: str) -> bytes | None:
    """Return the canonical JSON of a value, so that 1 differs from true and null from absent."""
    return canonical({key: values[key]}) if key in values else None


def flat(data: dict[str, Any], prefix: keys.Path = ()) -> dict[str, Any]:
    """Flatten a resolved config to dotted keys; lists and empty maps count as values."""
    found: dict[str, Any] = {}
    for key, value in data.items():
        below = (*prefix, key)
        found |= flat(value, below) if isinstance(value, dict) and value else {keys.dotted_key(below): value}
    return found


def _apply_assignments(assignments: Sequence[Assignment]) -> tuple[dict[str, Any], dict[keys.Path, str]]:
    """Apply assignments in order. The origin of a replaced value is dropped."""
    values: dict[keys.Path, Any] = {}
    origins: dict[keys.Path, str] = {}
    sections: set[keys.Path] = set()  # paths that have had values below them
    for item in assignments:
        over = [item.path[:depth] for depth in range(1, len(item.path))]
        above = [path for path in over if path in values]
        below = [item.path] if item.path in values else []
        if item.path in sections:
            below = [path for path in values if path[: len(item.path)] == item.path]
        sections.update(over)
        _check_entry(item, known=bool(below or above))
        for path in (*above, *below):
            del values[path]
            origins.pop(path, None)
        if not item.clears:
            values[item.path] = item.value
        origins[item.path] = f"{DEFAULT} ({item.origin})" if item.clears else item.origin
    return _nest_keys(values), origins


def _check_entry(item: Assignment, *, known: bool) -> None:
    """Require `+` for a new entry of an open map, to catch typos in existing names."""
    if known or not keys.within_open(item.path) or (item.adds and not item.clears):
        return
    key = keys.dotted_key(item.path)
    hint = f"to add it: +{key}=VALUE" if not item.clears else "`orch config show CONFIG` lists what is set"
    raise ConfigError(f"`{key}` is not set in this config", where=item.origin, hint=hint)


def _nest_keys(values: dict[keys.Path, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in values.items():
        branch = tree
        for name in path[:-1]:
            branch = branch.setdefault(name, {})
        branch[path[-1]] = value
    return tree


def _resolve_values(values: dict[str, Any], origins: dict[keys.Path, str]) -> dict[str, Any]:
    """Check and convert types, resolve interpolations and fill in defaults."""
    from omegaconf.errors import OmegaConfBaseException  # heavy; only verbs that read configs need it

    try:
        data: dict[str, Any] = plain(_merge_cached(dump_line(fill_in_gpus(values))))
    except OmegaConfBaseException as error:
        _check_lists(copy.deepcopy(values), values, origins)  # it names the key, which OmegaConf 2.3 does not
        what, path, hint = _type_complaint(error, values)
        raise ConfigError(what, where=_where(path, origins), hint=hint) from error
    _check_lists(data, values, origins)
    return data


def _check_lists(data: dict[str, Any], values: dict[str, Any], origins: dict[keys.Path, str]) -> None:
    """Check that lists are lists, also those that refer to something else, and convert their entries' values.

    `values` has them as they were written.
    """
    for path in keys.every_key():
        kind, found = keys.key_type(path, ""), (_branch(data, path) or {}).get(path[-1])
        if typing.get_origin(kind) is not tuple or found is None or isinstance(found, str):
            continue  # a string is a reference, or OmegaConf refuses it
        is_section = keys.is_section(keys.item_kind(kind))
        if not isinstance(found, list) or (is_section and not all(isinstance(entry, dict) for entry in found)):
            given = (_branch(values, path) or {}).get(path[-1])
            what, hint = _wrong_type(path, given)
            raise ConfigError(what, where=_where(path, origins), hint=hint)
        if is_section:
            _typed_entries(found, keys.item_kind(kind), path, origins)


def _typed_entries(entries: list[dict[str, Any]], kind: Any, path: keys.Path, origins: dict[keys.Path, str]) -> None:
    """Check and convert the entries of a list of mappings, which OmegaConf ignores."""
    from omegaconf import OmegaConf  # heavy
    from omegaconf.errors import OmegaConfBaseException

    for entry in entries:
        try:
            entry.update(plain(OmegaConf.to_container(OmegaConf.merge(writable_schema(kind), entry))))
        except OmegaConfBaseException as error:
            what = f"{keys.dotted_key(path)}: `{error.full_key}`: {str(error).splitlines()[0]}"
            expected = keys.type_words(keys.section(kind)[str(error.full_key)])
            raise ConfigError(what, where=_where(path, origins), hint=f"write {expected}") from error


def _where(path: keys.Path, origins: dict[keys.Path, str]) -> str:
    return _origin(keys.dotted_key(path), origins)


def _origin(key: str, origins: dict[keys.Path, str]) -> str:
    """Return the origin of a value, of its nearest enclosing section, or of the values below it."""
    path = tuple(key.split("."))
    for depth in range(len(path), 0, -1):
        if path[:depth] in origins:
            return origins[path[:depth]]
    below = {origin: None for other, origin in origins.items() if other[: len(path)] == path}
    return ", ".join(below) or DEFAULT


_FOLDERS: dict[keys.Path, Callable[[str], bool]] = {
    ("cluster", "root"): lambda name: True,
    ("cluster", "stage", "archive"): bool,
    ("cluster", "templates"): lambda name: "/" in name,
    ("data", "path"): bool,
    ("data", "text"): lambda name: name not in validation.KNOWN_TEXTS and "://" not in name,
    ("data", "tokenizer"): lambda name: name.startswith(("./", "../")),  # others may be names in the hub's cache
    ("secrets_file",): bool,
    ("workload", "path"): lambda name: True,
}
"""Keys for files or folders, each with a predicate that selects the values that are paths."""


_NOT_RELATIVE = ("/", "~", "$", "\\$")
"""Prefixes of paths that are not relative, including references and shell variables (the last two)."""


def _make_folders_absolute(values: dict[str, Any], folders: Mapping[keys.Path, str]) -> None:
    """Make relative folders absolute before other values refer to them (`${cluster.root}/x`)."""
    for path, is_folder in _FOLDERS.items():
        branch, place = _branch(values, path), _literal(os.path.abspath(folders.get(path, "")))
        if branch is None or path[-1] not in branch:
            continue
        given = branch[path[-1]]
        names = [
            os.path.normpath(os.path.join(place, name))
            if isinstance(name, str) and name.strip() and not name.startswith(_NOT_RELATIVE) and is_folder(name)
            else name
            for name in (given if isinstance(given, list | tuple) else [given])
        ]
        branch[path[-1]] = names if isinstance(given, list | tuple) else names[0]


def _branch(data: dict[str, Any], path: keys.Path) -> dict[str, Any] | None:
    """Return the map that contains the last name of a path, or None."""
    branch: Any = data
    for name in path[:-1]:
        branch = branch.get(name) if isinstance(branch, dict) else None
    return branch if isinstance(branch, dict) else None


def _absolute(
    data: dict[str, Any], origins: dict[keys.Path, str], environ: Mapping[str, str], folders: Mapping[keys.Path, str]
) -> dict[str, Any]:
    """Resolve folders relative to the file that names them, or to the current folder for overrides.

    This shell's variables are expanded here, because the job starts elsewhere.
    """

    def folder(name: str, *key: str) -> str:
        def value(match: re.Match[str]) -> str:
            variable = match[1] or match[2]
            if variable not in environ:
                shown = _replace_text(name, _DOLLAR, "$")
                what = f"`{keys.dotted_key(key)}`={shown}: the variable {variable} is not set here"
                hint = f"export {variable}=..., or write the full path"
                raise ConfigError(what, where=_where(key, origins), hint=hint)
            return environ[variable]

        written = _VARIABLE.sub(value, name)
        if not written.strip():  # an unset shell variable would mean the current folder
            what = f"`{keys.dotted_key(key)}`={name}: is empty, but must be a folder"
            raise ConfigError(what, where=_where(key, origins), hint=f"~{keys.dotted_key(key)} restores the default")
        return os.path.abspath(os.path.join(folders.get(key, ""), expand_home(written)))

    for path, is_folder in _FOLDERS.items():
        branch = _branch(data, path)
        assert branch is not None
        given = branch[path[-1]]
        if isinstance(given, list):
            branch[path[-1]] = [folder(name, *path) if is_folder(name) else name for name in given]
        elif is_folder(given):
            branch[path[-1]] = folder(given, *path)
    # Relative paths here are resolved later: from the command's folder, or for tiers from the run's folder.
    for path, owner in [
        (("checkpoints", "path"), data["checkpoints"]),
        *((("checkpoint", "tiers"), tier) for tier in data["checkpoint"]["tiers"]),
    ]:
        if owner["path"].startswith(("/", "~", "$")):
            owner["path"] = folder(owner["path"], *path)
    restored: dict[str, Any] = _replace_text(data, _DOLLAR, "$")
    return restored


def _built(data: dict[str, Any], origins: dict[keys.Path, str]) -> RunConfig:
    for key, value in flat(data).items():
        if not all(math.isfinite(number) for number in redaction.leaves(value) if isinstance(number, float)):
            what, hint = f"{key}={value}: must be a finite number", f"~{key} restores the default"
            raise ConfigError(what, where=_origin(key, origins), hint=hint)
    try:
        config = build(RunConfig, data)
    except ValueError as error:
        raise validation.invalid_values_error(str(error), origins) from error
    assert isinstance(config, RunConfig)
    return config


def _type_complaint(error: Any, values: dict[str, Any]) -> tuple[str, keys.Path, str]:
    """Return the error, its key, and the remedy."""
    named = re.sub(r"\[\d+\].*", "", str(error.full_key or ""))
    path = tuple(named.split(".")) if named else _refused_list(values)
    given, name = (_branch(values, path) or {}).get(path[-1]), keys.dotted_key(path)
    if named and "nterpolation" in type(error).__name__:
        hint = "${...} refers to a key, as in ${train.steps}; a shell variable is $NAME, and \\${ is literal"
        return f"`{name}`={given}: {str(error).splitlines()[0]}", path, hint
    what, hint = _wrong_type(path, given)
    return what, path, hint


def _wrong_type(path: keys.Path, given: object) -> tuple[str, str]:
    """Return what is wrong with a value of another type, and what to type."""
    kind, name = keys.key_type(path, ""), keys.dotted_key(path)
    hint = f"its default is {keys.key_default(path)}"
    if typing.get_origin(kind) is tuple:
        hint = f"write a list: '{name}=[{keys.example_items(kind)}]'"
    return f"`{name}`={given}: must be {keys.type_words(kind)}", hint


def _refused_list(values: dict[str, Any]) -> keys.Path:
    """Return the key of a list that is a reference to something else; OmegaConf's error does not name it."""
    from omegaconf import OmegaConf  # heavy
    from omegaconf.errors import OmegaConfBaseException

    whole = OmegaConf.merge(writable_schema(RunConfig), values)
    for path in keys.every_key():
        try:
            OmegaConf.select(whole, keys.dotted_key(path))
        except OmegaConfBaseException:
            return path
    return ()
