"""A job's script, built from fragments in `sbatch_templates/`: setup lines, srun arguments, interpreter and payload.

A fragment is shell code with a YAML head between two `#---` lines, each line prefixed with `# `:

    #---
    # about: one sentence
    # args:
    #   image: {help: what it is}                     a required value
    #   mounts: {help: what it is, default: ""}       an optional value
    #   modules: {help: names, kind: words}           several words; `path` expands ~, also after commas
    #   home: {help: what, pattern: "true|false"}     a value that must match; an empty default need not
    # srun: ["--container-image={{ image }}"]         arguments that render empty are left out
    # python: "apptainer exec {{ image }} {{ python }}"
    # orch: mounted                                   this Python has no orch: `agent` is mounted (default: installed)
    #---

Placeholders are quoted for the shell. In addition to its own arguments, a fragment can use `run_dir`, `submission`,
`gpus`, `python`, and `agent`, the folder with orch's packages that must be mounted under the same path.

Without `orch: mounted`, the script loads submitit's pickle of the function to call, from the file name that the job
expects.
"""

import os
import pkgutil
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpointing.storage.durable import fsync_dir, write_durably
from checkpointing.storage.trusted_path import NotPrivate, pin_path_temporarily
from orchestrator.errors import ConfigError, Precondition
from orchestrator.home import expand_home, shipped_folder
from orchestrator.near_words import did_you_mean, nearest
from orchestrator.scheduler.agent_folder import agent_folder, provide_agent
from orchestrator.scheduler.interface import JobSpec
from orchestrator.scheduler.slurm.sbatch_values import check_text

_FENCE = "#---"
_BUILT_IN = ("run_dir", "submission", "gpus", "python", "agent")
_KINDS = ("word", "words", "path")
_ORCH = ("installed", "mounted")
_SEPARATORS = re.compile(r"[\s,:;]")
"""Characters that separate the mounts of container runtimes."""


@dataclass(frozen=True, kw_only=True)
class Argument:
    """Placeholder in a fragment."""

    help: str = ""
    default: str | None = None  # None: required
    kind: str = "word"
    pattern: str = ""  # regular expression for the whole value; empty: any value


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """A file of `sbatch_templates/`."""

    name: str
    body: str
    about: str = ""
    args: dict[str, Argument] = field(default_factory=dict)
    srun: tuple[str, ...] = ()
    python: str = ""
    mounted: bool = False


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """Parts of a job script that its fragments provide."""

    setup: tuple[str, ...]
    srun: tuple[str, ...]
    python: str  # shell text that starts the interpreter, inside the container if there is one
    agent: str  # shell text that starts the agent; `start_arguments` follow
    own_interpreter: bool  # it is the interpreter that runs orch, so orch's packages have the same path
    mounted: bool  # orch's packages are mounted


def prepare(spec: JobSpec) -> Prepared:
    """Fill the fragments chosen for the run. Raises ConfigError for invalid values."""
    fragments = [load(name) for name in spec.templates]
    given = {name: check_text(f"cluster.template_args.{name}", value) for name, value in spec.template_args.items()}
    _refuse_unused(fragments, given)
    chosen = check_text("cluster.python", expand_home(spec.python))
    pythons = [fragment for fragment in fragments if fragment.python]
    if len(pythons) > 1:
        what = f"cluster.templates: {' and '.join(one.name for one in pythons)} both define how Python is started"
        raise ConfigError(what, where="cluster.templates", hint="keep one")
    mounted = any(fragment.mounted for fragment in fragments)
    built_in = {
        "run_dir": str(spec.run_dir), "submission": str(spec.submission), "gpus": str(spec.resources.gpus_per_node),
        "python": chosen or "python3", **({"agent": _mounted_agent(spec)} if mounted else {}),
    }  # fmt: skip
    setup: list[str] = []
    srun: list[str] = []
    python = shlex.quote(chosen or spec.submitter.python)
    for fragment in fragments:
        values = {**built_in, **_values(fragment, given)}
        setup += _fill(fragment, fragment.body, values, quoted=True).splitlines()
        srun += [text for item in fragment.srun if (text := _fill(fragment, item, values, quoted=False))]
        if fragment.python:
            python = _fill(fragment, fragment.python, values, quoted=True)
    lines = tuple(line for line in setup if line.strip())
    start = f"-u {shlex.quote(built_in['agent'])} {spec.attempt}" if mounted else "-P -u -m trainer.agent.main"
    return Prepared(
        setup=lines, srun=tuple(srun), python=python, agent=f"{python} {start}",
        own_interpreter=not chosen and not pythons, mounted=mounted,
    )  # fmt: skip


def _mounted_agent(spec: JobSpec) -> str:
    """Return the folder to mount. Raises ConfigError for a path that container runtimes would split."""
    try:
        folder = agent_folder()
    except OSError as error:
        what, hint = f"the state folder cannot be used: {error.strerror}", "ORCH_HOME=FOLDER names another one"
        raise ConfigError(what, where="ORCH_HOME", hint=hint) from error
    for key, path in (("cluster.root", spec.run_dir), ("ORCH_HOME", folder)):
        if _SEPARATORS.search(str(path)):
            what = f"{key}: {str(path)!r} cannot be mounted in a container"
            raise ConfigError(what, where=key, hint=f"{key}=FOLDER without spaces, commas, colons and semicolons")
    return str(folder)


def mounts_orch(templates: Sequence[str]) -> bool:
    """Return whether a job with these templates runs a mounted copy of orch's packages. Raises ConfigError."""
    return any(load(name).mounted for name in templates)


def load(name: str) -> Fragment:
    """Return a fragment by name, or a user's file by its path (with a '/'). Raises ConfigError."""
    place = shipped_folder("sbatch_templates")
    path = Path(name).expanduser() if "/" in name else place / f"{name}.sh"
    if "/" not in name and not path.is_file():
        known = sorted(item.stem for item in place.glob("*.sh"))
        hint = did_you_mean(nearest(name, known), f"available: {', '.join(known)}; or give the path of your own")
        raise ConfigError(f"cluster.templates: no template {name!r}", where="cluster.templates", hint=hint)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        what = f"cluster.templates: {name} cannot be read: {error}"
        raise ConfigError(what, where="cluster.templates", hint="cluster.templates=[FILE] names text files") from error
    return parse(name, text)


def parse(name: str, text: str) -> Fragment:
    """Split a fragment into head and shell code. Raises ConfigError."""
    lines = text.splitlines()
    fences = [index for index, line in enumerate(lines) if line.strip() == _FENCE]
    if len(fences) < 2:
        return Fragment(name=name, body=text)
    start, end = fences[:2]
    head = _head(name, "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines[start + 1 : end]))
    body = [line for line in lines[:start] if not line.startswith("#!")] + lines[end + 1 :]
    args = {key: _argument(name, key, value) for key, value in (head.get("args") or {}).items()}
    return Fragment(
        name=name, body="\n".join(body), about=str(head.get("about", "")), args=args,
        srun=tuple(str(item) for item in head.get("srun") or ()), python=str(head.get("python") or ""),
        mounted=head.get("orch") == "mounted",
    )  # fmt: skip


def _head(name: str, text: str) -> dict[str, Any]:
    import yaml  # heavy: only needed when a script is created

    try:
        head = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise _broken(name, f"its head is not YAML: {error}") from error
    unknown = set(head) - {"about", "args", "srun", "python", "orch"} if isinstance(head, dict) else {"head"}
    if unknown:
        raise _broken(name, f"its head has unknown keys: {', '.join(sorted(map(str, unknown)))}")
    if head.get("orch", "installed") not in _ORCH:
        raise _broken(name, f"orch must be one of {', '.join(_ORCH)}")
    return dict(head)


def _argument(fragment: str, name: str, value: object) -> Argument:
    if not isinstance(value, Mapping) or set(value) - {"help", "default", "kind", "pattern"} or name in _BUILT_IN:
        raise _broken(fragment, f"argument {name} must have help, and may have default, kind and pattern")
    kind = str(value.get("kind", "word"))
    if kind not in _KINDS:
        raise _broken(fragment, f"argument {name}: kind must be one of {', '.join(_KINDS)}")
    default = value.get("default")
    return Argument(
        help=str(value.get("help", "")), default=None if default is None else str(default), kind=kind,
        pattern=str(value.get("pattern", "")),
    )  # fmt: skip


def _broken(name: str, why: str) -> ConfigError:
    return ConfigError(f"template {name}: {why}", where="cluster.templates", hint="see the shipped templates")


def _refuse_unused(fragments: list[Fragment], given: Mapping[str, str]) -> None:
    known = sorted({name for fragment in fragments for name in fragment.args})
    for name in given:
        if name not in known:
            what = f"not used by any of cluster.templates ({', '.join(fragment.name for fragment in fragments)})"
            hint = did_you_mean(nearest(name, known), f"{', '.join(known) or 'nothing'} can be set here")
            key = f"cluster.template_args.{name}"
            raise ConfigError(f"{key}: {what}", where=key, hint=hint)


def _values(fragment: Fragment, given: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, argument in fragment.args.items():
        key, value = f"cluster.template_args.{name}", given.get(name, argument.default)
        if value is None:
            what = f"template {fragment.name} needs {key}: {argument.help}"
            raise ConfigError(what, where=key, hint=f"+{key}=VALUE")
        if argument.pattern and value != argument.default and not re.fullmatch(argument.pattern, value):
            what = f"{key}={value!r}: template {fragment.name} does not accept this"
            raise ConfigError(what, where=key, hint=f"{key}: {argument.help}")
        if argument.kind == "words":
            values[name] = tuple(check_text(key, word) for word in value.split())
        else:
            values[name] = ",".join(map(expand_home, value.split(","))) if argument.kind == "path" else value
    return values


def _fill(fragment: Fragment, text: str, values: Mapping[str, Any], *, quoted: bool) -> str:
    """Render a text; placeholders are quoted for the shell unless the text is a single argument."""
    import jinja2  # heavy: only needed when a script is created

    def show(value: Any) -> Any:
        if isinstance(value, jinja2.Undefined):
            return value
        words = [str(word) for word in value] if isinstance(value, tuple) else [str(value)]
        return " ".join(shlex.quote(word) for word in words) if quoted else " ".join(words)

    engine = jinja2.Environment(undefined=jinja2.StrictUndefined, finalize=show, autoescape=False)
    try:
        filled = engine.from_string(text).render(values)
    except jinja2.UndefinedError as error:
        what = f"template {fragment.name}: unknown placeholder: {error.message}"
        hint = "declare it under args in the template's head"
        raise ConfigError(what, where="cluster.templates", hint=hint) from error
    except jinja2.TemplateError as error:
        raise _broken(fragment.name, f"not a template: {error.message}") from error
    return re.sub(r"\n{2,}", "\n", filled).strip()


AGENT = "trainer.agent.main:run_agent"
_SCRIPT = re.compile(r"(\d+)_submission\.sh", re.ASCII)
_ORPHAN = re.compile(r"[0-9a-f]{32}\.pkl")


def load_entry(entry: str) -> Callable[[str, str], None]:
    """Return the function `module:name`, which submitit pickles by this reference."""
    function: Callable[[str, str], None] = pkgutil.resolve_name(entry)
    return function


def start_arguments(run_dir: Path | str, submission: Path | str) -> str:
    """Return the agent's last arguments in a job's script."""
    return f"{shlex.quote(str(run_dir))} {shlex.quote(str(submission))}"


def provide_mounted_agent() -> None:
    """Create the folder that containers mount, if it is missing. Raises Precondition."""
    try:
        provide_agent()
    except OSError as error:
        what = f"orch's packages cannot be copied for the job: {error.strerror}"
        hint = "ORCH_HOME=FOLDER names another state folder, which all nodes can read"
        raise Precondition(what, where=str(error.filename), hint=hint) from error


@contextmanager
def own_folder(spec: JobSpec) -> Iterator[Path]:
    """Yield the submission folder under a name pinned to it. Raises Precondition if it is not private to this user."""
    try:
        if prepare(spec).mounted:
            provide_mounted_agent()
        spec.submission.mkdir(mode=0o700, exist_ok=True)
        with pin_path_temporarily(spec.run_dir) as place:
            yield place / spec.submission.relative_to(spec.run_dir)
    except NotPrivate as error:
        hint = f"ask who changed it; `chmod go-w {shlex.quote(str(spec.run_dir))}` closes it if it is yours"
        what = f"the run directory is not private: {error.strerror}"
        raise Precondition(what, where=str(spec.run_dir), hint=hint) from error


def find_job_ids(submission: Path) -> set[str]:
    """Return the ids of jobs that submitit submitted from this folder, read from the names of its scripts."""
    try:
        return {match[1] for name in os.listdir(submission) if (match := _SCRIPT.fullmatch(name))}
    except OSError:
        return set()


def adopt_payload(submission: Path, job_id: str) -> None:
    """Give the job its payload under the file name that it expects. This is harmless if the payload exists.

    submitit renames `<uuid>.pkl` only after a clean sbatch. All payloads of one submission folder are equal, so any
    will do. A hard link appears in one step, and keeps the orphan for a duplicate job that may appear later.
    """
    wanted = submission / f"{job_id}_submitted.pkl"
    if wanted.exists():
        return
    names = sorted(os.listdir(submission)) if submission.is_dir() else []
    found = [name for name in names if _ORPHAN.fullmatch(name) or name.endswith("_submitted.pkl")]
    if not found:
        hint = f"scancel {job_id}: without it the job would fail after a minute"
        raise Precondition(f"the payload of job {job_id} is missing: no *.pkl in {submission}", hint=hint)
    try:
        os.link(submission / found[0], wanted)
    except FileExistsError:
        return
    except OSError:  # a file system without hard links
        write_durably(wanted, (submission / found[0]).read_bytes())
    fsync_dir(submission)
