"""Conversion of an sbatch script into a configuration, with the line of the script behind every key."""

import json
import os
import re
import shlex
import stat
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from orchestrator.config.yaml_text import format_list_items
from orchestrator.errors import ConfigError, NotFound
from orchestrator.scheduler.job_environment import OF_RUNTIMES, SECRET, passes
from orchestrator.submission.from_sbatch import resources
from orchestrator.submission.from_sbatch.directives import Option, read_directives, refuse_components
from orchestrator.submission.from_sbatch.launch import RANK_VARIABLES, Launch, Remark, find_launch_line, take_apart
from orchestrator.submission.from_sbatch.resources import Conversion
from orchestrator.submission.from_sbatch.setup_lines import Setup, read_setup, script_values
from orchestrator.submission.from_sbatch.shell_text import (
    assignment,
    expand,
    names_set_to_default,
    names_with_default,
    needed_references,
    read_lines,
    references,
    unquote,
)

_LARGEST = 1 << 20
_LOGIN = re.compile(r"#!.*\b(?:bash|sh)\s+(?:-\w*l\w*|--login)\b")
_OWN_PYTHON = re.compile(r"python3?")
FROM_JOB = "PATH=$JOB_PATH PYTHONPATH=$JOB_PYTHONPATH"
"""Assignments with which a rank finds the Python that the setup has selected."""


_SET_BY_BASH = frozenset(
    {"PWD", "OLDPWD", "RANDOM", "HOSTNAME", "SECONDS", "UID", "BASHPID", "PPID", "LINENO", "TMPDIR"}
)
_SET_BY_ORCH = re.compile(r"SLURM_(?!ARRAY_)\w+|JOB_PATH|JOB_PYTHONPATH|PYTHONPATH|LD_LIBRARY_PATH")
"""Variables that need no value from the shell that submits."""


@dataclass(frozen=True, kw_only=True)
class ConvertedScript:
    """Result: the files' text, and what they leave out."""

    config: str
    setup: str  # empty: no setup file is needed
    left_out: tuple[Remark, ...]
    unclear: tuple[Remark, ...]
    open_keys: dict[str, str]  # keys that the user must set -> why


def convert(script: Path, environ: Mapping[str, str]) -> ConvertedScript:
    """Convert a script. Raises ConfigError if it is no shell script, or no single line of it starts the training."""
    text = read_script(script)
    refuse_components(text, str(script))
    lines, found = read_lines(text), Conversion()
    values = script_values(lines, before=len(text))
    candidate = find_launch_line(lines, values, str(script))
    values = script_values(lines, before=candidate.line.number)
    launch = take_apart(find_launch_line(lines, values, str(script)), values)
    job = resources.read_directives(found, read_directives(text), values)
    numbers = resources.read_shape(found, job, launch, values)
    resources.read_step(found, launch)
    program = [expand(word, numbers) for word in launch.program]
    body = "; ".join(filter(None, [launch.before, " ".join(program)]))
    setup = read_setup(lines, candidate, body, values, numbers, login_shell=bool(_LOGIN.match(text)))
    _set_program(found, launch, setup, program)
    _set_env(found, launch, setup, environ)
    for line in lines:
        if line.number <= candidate.line.number or line.words[:1] in (["wait"], ["exit"]):
            continue
        found.left_out.append(Remark(line.number, line.text.split("\n")[0], "runs after the training: not run"))
    _note_unset(found, setup, candidate.line.number, environ)
    has_setup = bool(setup.lines)
    if has_setup:
        templates = found.settings.get(("cluster", "templates"))
        names = ["default", *(templates.value[1:] if templates else []), f"./{script.stem}.setup.sh"]
        found.set("cluster.templates", names, text="the script's setup lines")
    return ConvertedScript(
        config=_config_text(script, found),
        setup=_setup_text(script, setup, environ, _chdir(job)) if has_setup else "",
        left_out=tuple(sorted({*found.left_out, *launch.left_out, *setup.left_out})),
        unclear=tuple(sorted({*found.unclear, *launch.unclear, *setup.unclear})), open_keys=found.open_keys,
    )  # fmt: skip


def read_script(script: Path) -> str:
    """Return the text of a bash script. Raises NotFound or ConfigError."""
    hint = "name the script that you give to sbatch"
    try:
        if not script.is_file():
            _refuse_path(script, hint)
        if script.stat().st_size > _LARGEST:
            raise ConfigError("is larger than 1 MiB, so not a job script", where=str(script), hint=hint)
        text = script.read_text()
    except UnicodeDecodeError as error:
        raise ConfigError("is not a text file", where=str(script), hint=hint) from error
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(script), hint=hint) from error
    first = text.partition("\n")[0]
    if first.startswith("#!") and not re.search(r"\b(?:ba|da|z|k)?sh\b", first):
        raise ConfigError(f"its interpreter is not a shell: {first}", where=str(script), hint=hint)
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        what = f"bash cannot read it: {done.stderr.strip().splitlines()[0]}"
        raise ConfigError(what, where=str(script), hint=f"`bash -n {shlex.quote(str(script))}` shows the error")
    return text


_KINDS: Mapping[int, str] = {
    stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}  # fmt: skip
"""Kinds of files that are no script. A pipe can be read only once, and the configuration is named after the script."""


def _refuse_path(script: Path, hint: str) -> NoReturn:
    """Raise NotFound if there is no such path, and otherwise ConfigError."""
    try:
        kind = _KINDS.get(stat.S_IFMT(script.stat().st_mode), "a special file")
    except FileNotFoundError as error:
        raise NotFound(f"no such file: {script}", hint=hint) from error
    raise ConfigError(f"is {kind}, not a file with a job script", where=str(script), hint=hint)


def _set_program(found: Conversion, launch: Launch, setup: Setup, program: list[str]) -> None:
    """Set `command`: a list of words if bash has nothing to do, else one text for bash."""
    count = next((at for at, word in enumerate(program) if assignment(word) is None), len(program))
    assigned, words = program[:count], program[count:]
    in_container = any(key[:2] == ("cluster", "template_args") for key in found.settings)
    selects = setup.selects_python and bool(setup.lines) and not in_container
    literal = [unquote(word) for word in words]
    text = " ".join([*assigned, *([FROM_JOB] if selects else []), "exec", *words])
    text = "; ".join([*([launch.before] if launch.before else []), text])
    text = " && ".join([*(f"cd {folder}" for folder in setup.folders), text])
    needs_shell = None in literal or assigned or launch.before or setup.folders or selects
    value = ["bash", "-c", text] if needs_shell else literal
    option = resources.Setting(value=value, line=launch.line, text=" ".join(launch.launchers) or "the program")
    found.settings["command",] = option
    if not selects and words and _OWN_PYTHON.fullmatch(words[0]) and not in_container:
        why = "it is the Python that runs orch, because the script selects none (docs/torchrun-scripts.md)"
        found.left_out.append(Remark(launch.line, words[0], why))


def _set_env(found: Conversion, launch: Launch, setup: Setup, environ: Mapping[str, str]) -> None:
    for name, value in launch.env.items():
        found.settings["env", name] = resources.Setting(value=value, line=launch.line, text=launch.launchers[-1])
    for name, (value, line, text) in setup.env.items():
        found.settings["env", name] = resources.Setting(value=value, line=line, text=text)
    command = found.settings["command",].value
    text = command[2] if command[:2] == ["bash", "-c"] else ""
    setup_text = "\n".join(setup.lines)
    if "SLURM_SUBMIT_DIR" in references(text):
        found.set("env.SLURM_SUBMIT_DIR", os.getcwd(), text="this folder: sbatch would set it")
    assigned = set(re.findall(r"\b([A-Za-z_]\w*)=", f"{setup_text}\n{text}"))
    for name in sorted(references(text) - assigned):
        if _comes_from_shell(name, environ):
            found.set(f"env.{name}", environ[name], text="from this shell")


def _note_unset(found: Conversion, setup: Setup, line: int, environ: Mapping[str, str]) -> None:
    """Note variables that nothing sets: they would be empty in the job."""
    command = found.settings["command",].value
    text = "\n".join([*setup.lines, command[2] if command[:2] == ["bash", "-c"] else ""])
    assigned = {*re.findall(r"\b([A-Za-z_]\w*)=", text), *re.findall(r"\b(?:for|read)\s+(\w+)", text), *setup.env}
    known = assigned | names_set_to_default(text) | RANK_VARIABLES | _SET_BY_BASH | set(environ)
    arguments = {name for name in references(text) if name.isdigit()}
    for name in sorted((needed_references(text) | arguments) - known):
        if _SET_BY_ORCH.fullmatch(name):
            continue
        why = "is an argument of the script, which is not known here" if name.isdigit() else "is not set in this shell"
        found.unclear.append(Remark(line, f"${name}", why))


def _comes_from_shell(name: str, environ: Mapping[str, str]) -> bool:
    """Return whether ranks have this variable of the submitting shell only if its value is written down."""
    is_own = name in _SET_BY_BASH or _SET_BY_ORCH.fullmatch(name) is not None or name in RANK_VARIABLES
    is_passed = passes(name) and name not in OF_RUNTIMES
    return name in environ and not is_own and not is_passed and not SECRET.search(name)


def _chdir(job: Mapping[str, Option]) -> str:
    """Return the folder in which the job runs the script."""
    option = job.get("chdir")
    return os.path.abspath(option.value) if option and option.value and "$" not in option.value else os.getcwd()


def _setup_text(script: Path, setup: Setup, environ: Mapping[str, str], folder: str) -> str:
    """Return the setup file, which is a template as orchestrator/scheduler/script.py describes it."""
    text = "\n".join(setup.lines)
    assigned = set(re.findall(r"\b([A-Za-z_]\w*)=", text)) - names_with_default(text)
    from_shell = sorted(name for name in references(text) - assigned if _comes_from_shell(name, environ))
    exports = [f"export {name}={shlex.quote(environ[name])}" for name in from_shell]
    here = shlex.quote(os.getcwd())
    uses_folder = "SLURM_SUBMIT_DIR" in references(text)
    return "\n".join(
        [
            "#---",
            f"# about: setup lines of {script.name}; the job runs them once, on its first node",
            "#---",
            f"cd {shlex.quote(folder)} || exit 1",
            *([f"export SLURM_SUBMIT_DIR={here}"] if uses_folder else []),
            *exports,
            "{% raw %}",
            *setup.lines,
            "{% endraw %}",
            "# The ranks get this PATH and PYTHONPATH; orch's agents use their own.",
            "export JOB_PATH=$PATH JOB_PYTHONPATH=${PYTHONPATH-}",
            "unset PYTHONPATH PYTHONHOME",
            "cd {{ run_dir }} || exit 1",
            "",
        ]
    )


def _config_text(script: Path, found: Conversion) -> str:
    """Return the configuration as YAML, with the origin of each value as a comment."""
    rows: list[tuple[str, str]] = []
    none = resources.Setting(value=resources.run_name(script.stem), line=0, text="")
    settings = {("name",): none, ("cluster", "kind"): replace(none, value="slurm"), **found.settings}
    for section in ("name", "command", "cluster", "env"):
        own = {key[1:]: item for key, item in settings.items() if key[0] == section}
        if () in own:
            rows.append((f"{section}: {_value_text(own[()].value)}", _origin(own[()])))
        elif own:
            rows += [(f"{section}:", ""), *_section_rows(own)]
    lines = [line for row in rows for line in _row_lines(*row)]
    head = f"# Made by `orch submit --from-sbatch {script.name}`; the comments name lines."
    return "\n".join([head, *lines, ""])


_WIDTH = 40
"""Column in which the comments begin. A longer value has its comment above it."""


def _row_lines(text: str, origin: str) -> list[str]:
    if len(text) <= _WIDTH:
        return [f"{text:<{_WIDTH}}  # {origin}" if origin else text]
    indent = " " * (len(text) - len(text.lstrip()))
    return [*([f"{indent}# {origin}"] if origin else []), text]


def _section_rows(own: Mapping[tuple[str, ...], resources.Setting]) -> list[tuple[str, str]]:
    rows, maps = [], dict.fromkeys(key[0] for key in own if len(key) > 1)
    for key, item in own.items():
        if len(key) == 1:
            rows.append((f"  {_value_text(key[0])}: {_value_text(item.value)}", _origin(item)))
    for name in maps:
        rows.append((f"  {name}:", ""))
        inner = {key[1]: item for key, item in own.items() if key[0] == name and len(key) > 1}
        rows += [(f"    {key}: {_value_text(item.value)}", _origin(item)) for key, item in inner.items()]
    return rows


def _origin(item: resources.Setting) -> str:
    text = " ".join(item.text.split())
    text = text if len(text) <= 50 else f"{text[:47]}..."
    return f"line {item.line}: {text}" if item.line else text


_NOT_TEXT = frozenset({"", "true", "false", "null", "yes", "no", "on", "off"})
"""Words that YAML reads as something else than text, or that orch refuses without quotes."""


def _value_text(value: Any) -> str:
    """Return a value as YAML. A literal `${` is escaped: it would refer to a key."""
    if isinstance(value, str):
        escaped = value.replace("${", "\\${")
        return json.dumps(value) if value.lower() in _NOT_TEXT else format_list_items([escaped])
    if isinstance(value, Sequence):
        return f"[{format_list_items([str(word).replace('${', chr(92) + '${') for word in value])}]"
    return json.dumps(value)
