"""Fragments of `sbatch_templates/`: setup lines, srun arguments and the interpreter, with their placeholders filled.

A fragment is shell code with a YAML head between two `#---` lines, each line prefixed with `# `:

    #---
    # about: one sentence
    # args:
    #   image: {help: what it is}                     a required value
    #   mounts: {help: what it is, default: ""}       an optional value
    #   modules: {help: names, kind: words}           several words; `path` expands ~
    # srun: ["--container-image={{ image }}"]         arguments that render empty are left out
    # python: "apptainer exec {{ image }} {{ python }}"
    #---

Placeholders are quoted for the shell. Besides its own arguments a fragment can use `run_dir`, `gpus` and `python`.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from orchestrator.errors import ConfigError
from orchestrator.home import expand_home
from orchestrator.near_words import did_you_mean, nearest
from orchestrator.scheduler.interface import JobSpec
from orchestrator.scheduler.slurm.sbatch_values import check_text

_FENCE = "#---"
_BUILT_IN = ("run_dir", "gpus", "python")
_KINDS = ("word", "words", "path")


@dataclass(frozen=True, kw_only=True)
class Argument:
    """A placeholder of a fragment."""

    help: str = ""
    default: str | None = None  # None: required
    kind: str = "word"


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """A file of `sbatch_templates/`."""

    name: str
    body: str
    about: str = ""
    args: dict[str, Argument] = field(default_factory=dict)
    srun: tuple[str, ...] = ()
    python: str = ""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Parts of a job script from its fragments; `python` is shell text."""

    setup: tuple[str, ...]
    srun: tuple[str, ...]
    python: str
    own_interpreter: bool  # the interpreter that runs orch, which finds its packages in the same place


def prepare(spec: JobSpec, folder: Path | None = None) -> Prepared:
    """Fill the fragments chosen for the run; raises ConfigError for invalid values."""
    fragments = [load(name, folder) for name in spec.templates]
    given = {name: check_text(f"cluster.template_args.{name}", value) for name, value in spec.template_args.items()}
    _refuse_unused(fragments, given)
    chosen = check_text("cluster.python", expand_home(spec.python))
    pythons = [fragment for fragment in fragments if fragment.python]
    if len(pythons) > 1:
        names = " and ".join(fragment.name for fragment in pythons)
        raise ConfigError(
            f"cluster.templates: {names} both say how Python is started", where="cluster.templates", hint="keep one"
        )
    built_in = {"run_dir": str(spec.run_dir), "gpus": str(spec.resources.gpus_per_node), "python": chosen or "python3"}
    setup: list[str] = []
    srun: list[str] = []
    python = shlex.quote(chosen or spec.submitter.python)
    for fragment in fragments:
        values = {**built_in, **_values(fragment, given)}
        setup += _fill(fragment, fragment.body, values, quoted=True).splitlines()
        srun += [text for item in fragment.srun if (text := _fill(fragment, item, values, quoted=False))]
        if fragment.python:
            python = _fill(fragment, fragment.python, values, quoted=True)
    return Prepared(
        setup=tuple(line for line in setup if line.strip()),
        srun=tuple(srun),
        python=f"{python} -P",
        own_interpreter=not chosen and not pythons,
    )


def load(name: str, folder: Path | None = None) -> Fragment:
    """Return a fragment by name, or a user's file by its path (one with a '/'); raises ConfigError."""
    if "/" in name:
        path = Path(name).expanduser()
    else:
        place = folder or _shipped_templates()
        path = place / f"{name}.sh"
        if not path.is_file():
            raise _unknown_template_error(name, sorted(item.stem for item in place.glob("*.sh")))
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        what = f"cluster.templates: {name} cannot be read: {error}"
        raise ConfigError(what, where="cluster.templates", hint="cluster.templates=[FILE] names text files") from error
    return parse(name, text)


def _shipped_templates() -> Path:
    from orchestrator.config.yaml_text import folder  # differs between wheel and source tree

    return folder("sbatch_templates")


def _unknown_template_error(name: str, known: list[str]) -> ConfigError:
    hint = did_you_mean(nearest(name, known), f"there are {', '.join(known)}; or give the path of your own")
    return ConfigError(f"cluster.templates: no template {name!r}", where="cluster.templates", hint=hint)


def parse(name: str, text: str) -> Fragment:
    """Split a fragment into head and shell code; raises ConfigError."""
    lines = text.splitlines()
    fences = [index for index, line in enumerate(lines) if line.strip() == _FENCE]
    if len(fences) < 2:
        return Fragment(name=name, body=text)
    start, end = fences[:2]
    head = _head(name, "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[start + 1 : end]))
    body = [line for line in lines[:start] if not line.startswith("#!")] + lines[end + 1 :]
    return Fragment(
        name=name,
        body="\n".join(body),
        about=str(head.get("about", "")),
        args={key: _argument(name, key, value) for key, value in (head.get("args") or {}).items()},
        srun=tuple(str(item) for item in head.get("srun") or ()),
        python=str(head.get("python") or ""),
    )


def _head(name: str, text: str) -> dict[str, Any]:
    import yaml  # heavy: only needed when a script is made

    try:
        head = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise _broken(name, f"its head is not YAML: {error}") from error
    unknown = set(head) - {"about", "args", "srun", "python"} if isinstance(head, dict) else {"head"}
    if unknown:
        raise _broken(name, f"its head has unknown keys: {', '.join(sorted(map(str, unknown)))}")
    return dict(head)


def _argument(fragment: str, name: str, value: object) -> Argument:
    if not isinstance(value, Mapping) or set(value) - {"help", "default", "kind"} or name in _BUILT_IN:
        raise _broken(fragment, f"argument {name} must have help, and may have default and kind")
    kind = str(value.get("kind", "word"))
    if kind not in _KINDS:
        raise _broken(fragment, f"argument {name}: kind must be one of {', '.join(_KINDS)}")
    default = value.get("default")
    return Argument(help=str(value.get("help", "")), default=None if default is None else str(default), kind=kind)


def _broken(name: str, why: str) -> ConfigError:
    return ConfigError(f"template {name}: {why}", where="cluster.templates", hint="the shipped ones show the form")


def _refuse_unused(fragments: list[Fragment], given: Mapping[str, str]) -> None:
    known = {name for fragment in fragments for name in fragment.args}
    for name in given:
        if name not in known:
            hint = did_you_mean(
                nearest(name, sorted(known)), f"{', '.join(sorted(known)) or 'nothing'} can be set here"
            )
            templates = ", ".join(fragment.name for fragment in fragments)
            raise ConfigError(
                f"cluster.template_args.{name}: not used by any of cluster.templates ({templates})",
                where=f"cluster.template_args.{name}",
                hint=hint,
            )


def _values(fragment: Fragment, given: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, argument in fragment.args.items():
        value = given.get(name, argument.default)
        if value is None:
            raise ConfigError(
                f"template {fragment.name} needs cluster.template_args.{name}: {argument.help}",
                where=f"cluster.template_args.{name}",
                hint=f"+cluster.template_args.{name}=VALUE",
            )
        if argument.kind == "words":
            words = value.split()
            for word in words:
                check_text(f"cluster.template_args.{name}", word)
            values[name] = tuple(words)
        else:
            values[name] = expand_home(value) if argument.kind == "path" else value
    return values


def _fill(fragment: Fragment, text: str, values: Mapping[str, Any], *, quoted: bool) -> str:
    """Render a text; placeholders are quoted for the shell unless the text is a single argument."""
    import jinja2  # heavy: only needed when a script is made

    def show(value: Any) -> Any:
        if isinstance(value, jinja2.Undefined):
            return value
        words = [str(word) for word in value] if isinstance(value, tuple) else [str(value)]
        return " ".join(shlex.quote(word) for word in words) if quoted else " ".join(words)

    engine = jinja2.Environment(undefined=jinja2.StrictUndefined, finalize=show, autoescape=False)
    try:
        filled = engine.from_string(text).render(values)
    except jinja2.UndefinedError as error:
        raise ConfigError(
            f"template {fragment.name}: unknown placeholder: {error.message}",
            where="cluster.templates",
            hint="declare it under args in the template's head",
        ) from error
    except jinja2.TemplateError as error:
        raise _broken(fragment.name, f"not a template: {error.message}") from error
    return re.sub(r"\n{2,}", "\n", filled).strip()
