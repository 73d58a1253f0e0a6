"""Checks of a `command:`: its script, launchers, and shell code that hides a failure."""

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from orchestrator.config.run_config import RunConfig
from orchestrator.config.yaml_text import format_list_items, near_file
from orchestrator.errors import ConfigError
from trainer.protocol.command_progress import FOLDER_VARIABLE
from trainer.protocol.config_sections.scheduler_kinds import traits
from trainer.protocol.launchers import (
    FILTERS,
    LAST_WORDS,
    PER_RANK,
    PYTHON,
    SCRIPT,
    SPAWN,
    OwnLauncher,
    find_launcher,
    find_own_launcher,
    find_script,
    from_shell,
    given_counts,
    inline_text,
    lines_of_words,
    read_script,
)

_ENDS = frozenset({";", "&&", "||", "&", "(", ")"})
_KEEPS_CODE = re.compile(r"\bset\s+-\w*e|\berrexit\b|\bexit\b|\breturn\b|\btrap\b|\bexec\b|&&|\|\||\$\?")
"""Constructs with which a script may still return its program's exit code."""


def refuse_lost_exit_code(command: Sequence[str], script: str = "") -> None:
    """Raise ConfigError if a failing program would end with exit code 0. `script` is the text of a shell script.

    To orch, exit code 0 means that training has finished.
    """
    text = inline_text(command) or script
    options = command[: command.index(text)] if text in command else command
    lines = [line for line in lines_of_words(text) if line and not line[0].startswith("#")]
    if not lines:
        return
    trains = [line for line in lines if any(map(PYTHON.fullmatch, line)) or find_launcher(line).name][-1:]
    hidden = next(filter(None, map(_filter_after_pipe, trains)), "")
    if hidden and "pipefail" not in f"{text} {' '.join(options)}":
        what = f"command: a pipe returns the exit code of `{hidden}`, so a program that fails would count as done"
        hint = "put `set -o pipefail;` before it in bash; orch already keeps the output: `orch logs RUN`"
        raise ConfigError(what, where="command", hint=hint)
    strict = any(re.fullmatch(r"-\w*e\w*", word) for word in options[1:])
    last = lines[-1]
    ends = last[max((at + 1 for at, word in enumerate(last) if word in (";", "&")), default=0) :] or last
    starts_more = len(lines) > 1 or len(ends) < len(last)
    if starts_more and ends[0] in LAST_WORDS and not strict and not _KEEPS_CODE.search(text):
        what = f"command: the script ends with `{ends[0]}`, so a failed program before it would count as done"
        raise ConfigError(what, where="command", hint="put `set -e` at the beginning of the script")


def _filter_after_pipe(words: Sequence[str]) -> str:
    """Return the filter that ends the pipe of these words' last Python program or launcher, or ""."""
    at = max((place for place, word in enumerate(words) if PYTHON.fullmatch(word)), default=0)
    piped = ""
    for word, after in pairwise(words[at:]):
        if word in _ENDS:
            break
        if word in ("|", "|&"):
            piped = after.rpartition("/")[2]
    return piped if piped in FILTERS else ""


_LOCAL = re.compile(r"localhost|127\.0\.0\.1")


def check_launcher(config: RunConfig, cwd: Path) -> None:
    """Raise ConfigError for a launcher that would train several models, or start other ranks than orch expects.

    `cwd` is the folder from which the run is submitted.
    """
    cluster, found = config.cluster, find_own_launcher(config.command, cwd)
    if found is None:
        return
    name = found.launcher.name or SPAWN
    each = f"command: orch starts {cluster.world_size} ranks ({cluster.nodes} x {cluster.ranks_per_node})"
    kind = found.launcher.kind
    if cluster.world_size > 1 and (config.launcher == PER_RANK or (not kind.place and kind.alone is None)):
        what = f"{each}, and {name} on each would train a separate model"
        remove = f"remove {name} and its options; cluster.nodes and cluster.ranks_per_node set the number of ranks"
        raise ConfigError(what, where="command", hint="type launcher=auto" if kind.place else remove)
    for option, counted, value in given_counts(found.launcher):
        _check_count(config, f"{name} {option}", counted, value)
    if cluster.nodes > 1 and (why := _why_separate(found)):
        what = f"command: {name} on each of {cluster.nodes} nodes would train a separate model: {why[0]}"
        raise ConfigError(what, where="command", hint=why[1])


def _check_count(config: RunConfig, option: str, counted: str, value: int) -> None:
    """Raise ConfigError if a launcher's option disagrees with the cluster's shape."""
    cluster = config.cluster
    key, expected = {
        "ranks": ("cluster.ranks_per_node", cluster.ranks_per_node),
        "nodes": ("cluster.nodes", cluster.nodes),
        "total": ("cluster.nodes x cluster.ranks_per_node", cluster.world_size),
    }[counted]
    if value == expected:
        return
    ranks = value // cluster.nodes
    shape = f"cluster.ranks_per_node={ranks}" if counted == "total" else f"{key}={value}"
    hint = f"type {shape}, or remove the option: orch gives it to the launcher"
    if counted == "total" and ranks * cluster.nodes != value:
        hint = "remove the option: orch gives it to the launcher"
    raise ConfigError(f"command: {option} disagrees with {key}={expected}", where="command", hint=hint)


def _why_separate(found: OwnLauncher) -> tuple[str, str] | None:
    """Return why launchers on several nodes would not form one world, and what to do, or None."""
    own, name = found.launcher.own, found.launcher.name
    per_rank = "start the Python program without it: orch starts the ranks"
    if found.spawns:
        own_address = "its script connects its ranks through localhost"
        return (own_address, "use cluster.nodes=1, or MASTER_ADDR and NODE_RANK") if _LOCAL.search(found.text) else None
    if not found.launcher.kind.place:
        return "it starts its ranks without regard to orch's nodes", per_rank
    if "--standalone" in own:
        return "--standalone is for one node", "remove --standalone"
    names = {word.lstrip("-").partition("=")[0].replace("_", "-") for word in own if word.startswith("-")}
    if found.in_shell and not found.launcher.kind.by_variables and names.isdisjoint(found.launcher.kind.nodes):
        return (
            f"orch adds no options to {name} in a shell script",
            "give its options for several nodes with $NNODES, $NODE_RANK, $MASTER_ADDR and $MASTER_PORT",
        )
    return None


_KEEP_FILES = frozenset({"default", "modules", "conda", "nccl"})
"""Templates whose jobs see this machine's files; jobs in containers or from custom scripts may not."""


def check_command(config: RunConfig, cwd: Path) -> None:
    """Raise ConfigError for a script that certainly does not exist, or that would be started twice.

    `cwd` is the folder from which the run is submitted.
    """
    _refuse_one_text(config.command, cwd)
    check_launcher(config, cwd)
    refuse_lost_exit_code(config.command, _shell_text(config.command, cwd))
    for word in config.command[1:]:
        if word.endswith(".py") and word.startswith("/") and not Path(word).is_file():
            raise _missing(config.command, word, Path(word))
    if not traits(config.cluster.kind).simulated_nodes and not set(config.cluster.templates) <= _KEEP_FILES:
        return
    _check_program(config.command, cwd)
    script = find_script(config.command) or _started_script(config.command)
    if FOLDER_VARIABLE in {*config.env, *config.env_from}:
        folder = Path(config.env.get(FOLDER_VARIABLE, ""))
        if not (folder.is_absolute() and folder.is_dir()):
            return
        cwd = folder
    if script is not None and not (cwd / script).exists():
        raise _missing(config.command, script, cwd / script)


def _refuse_one_text(command: tuple[str, ...], cwd: Path) -> None:
    """Raise ConfigError for a program and its arguments in one string (`["python train.py"]`)."""
    program, *arguments = command
    if len(program.split()) < 2 or (cwd / program).exists() or shutil.which(program):
        return
    try:
        words = shlex.split(program)
    except ValueError:
        words = program.split()
    is_shell = re.search(r"[&|;<>$`(){}*?]", program) is not None
    meant = ["bash", "-c", program] if is_shell and not arguments else [*words, *arguments]
    what = f"command: no program `{program}`: the program and each argument must be separate strings"
    raise ConfigError(what, where="command", hint=shlex.quote(f"command=[{format_list_items(meant)}]"))


def _shell_text(command: tuple[str, ...], cwd: Path) -> str:
    """Return the text of the shell script that the command starts; empty if none is readable here."""
    script = find_script(from_shell(command) or command) or ""
    return read_script(command, cwd) if script.endswith(".sh") else ""


def _check_program(command: tuple[str, ...], cwd: Path) -> None:
    """Raise ConfigError for a script that is run as the program but is not executable."""
    program = command[0]
    starter = _STARTERS.get(Path(program).suffix)
    if starter is None or not SCRIPT.fullmatch(program):
        return
    on_path = "/" not in program
    if not (cwd / program).is_file() or (shutil.which(program) if on_path else os.access(cwd / program, os.X_OK)):
        return
    why = "is not a program on PATH" if on_path else "is not executable"
    words = shlex.quote(f"command=[{format_list_items([starter, *command])}]")
    raise ConfigError(f"command: {program} {why}", where="command", hint=f"name its interpreter: {words}")


_STARTERS = {".py": "python", ".sh": "bash"}


def _started_script(command: tuple[str, ...]) -> str | None:
    """Return the Python script that a launcher starts."""
    found = find_launcher(command)
    name = found.starts[0] if found.starts and found.own[-1] not in ("-m", "--module") else ""
    return name if name.endswith(".py") and SCRIPT.fullmatch(name) else None


def _missing(command: tuple[str, ...], script: str, path: Path) -> ConfigError:
    near = near_file(path, (path.suffix,))
    if near is None:
        hint = "give the script's full path, or submit from the folder that contains it"
    else:
        meant = script.removesuffix(path.name) + near
        words = [meant if word == script else word for word in command]
        hint = f"did you mean {shlex.quote(f'command=[{format_list_items(words)}]')}?"
    return ConfigError(f"command: no file {path}", where="command", hint=hint)
