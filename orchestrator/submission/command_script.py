"""The script of a `command:`, looked for before anything is submitted, where it is certain which file that is."""

import os
import re
import shlex
import shutil
from pathlib import Path

from orchestrator.config.near_files import near_file
from orchestrator.config.run_config import RunConfig
from orchestrator.config.yaml_text import format_list_items
from orchestrator.errors import ConfigError
from orchestrator.submission.launchers import refuse_launcher
from orchestrator.submission.shell_text import refuse_lost_exit_code
from trainer.contract.config_sections.scheduler_kinds import traits
from trainer.contract.user_command.command_folder import FOLDER_VARIABLE

_INTERPRETER = re.compile(r"(?:.*/)?(?:python[\d.]*|bash|sh)")
_PLAIN = re.compile(r"(?:-[uOBEsSIqv]+|--)")
"""Options of an interpreter that take no value, and after which its script may stand."""
_SCRIPT = re.compile(r"[^$~*?]+\.(?:py|sh)")
_KEEP_FILES = frozenset({"default", "modules", "conda", "nccl"})
"""Templates of jobs that see the files of this machine; in a container, or after a script of somebody's own, nobody
knows."""


def check_command(config: RunConfig, beside: Path) -> None:
    """Raise ConfigError for a script that certainly does not exist, or that would be started twice.

    `beside`: the folder from which the run is submitted.
    """
    _refuse_one_text(config.command, beside)
    script_text = _shell_text(config.command, beside)
    refuse_launcher(config, script_text)
    refuse_lost_exit_code(config.command, script_text)
    for word in config.command[1:]:
        if word.endswith(".py") and word.startswith("/") and not Path(word).is_file():
            raise _missing(config.command, word, Path(word))
    if not traits(config.cluster.kind).simulated_nodes and not set(config.cluster.templates) <= _KEEP_FILES:
        return
    _check_program(config.command, beside)
    script = _script(config.command)
    if FOLDER_VARIABLE in {*config.env, *config.env_from}:
        folder = Path(config.env.get(FOLDER_VARIABLE, ""))
        if not (folder.is_absolute() and folder.is_dir()):
            return
        beside = folder
    if script is not None and not (beside / script).exists():
        raise _missing(config.command, script, beside / script)


def _refuse_one_text(command: tuple[str, ...], beside: Path) -> None:
    """Raise ConfigError for a program with its arguments in one text (`["python train.py"]`)."""
    program, *arguments = command
    if len(program.split()) < 2 or (beside / program).exists() or shutil.which(program):
        return
    try:
        words = shlex.split(program)
    except ValueError:
        words = program.split()
    is_shell = re.search(r"[&|;<>$`(){}*?]", program) is not None
    meant = ["bash", "-c", program] if is_shell and not arguments else [*words, *arguments]
    what = f"command: no program `{program}`: the program and each argument are texts of their own"
    raise ConfigError(what, where="command", hint=shlex.quote(f"command=[{format_list_items(meant)}]"))


_LARGEST_SCRIPT = 1 << 20


def _shell_text(command: tuple[str, ...], beside: Path) -> str:
    """Return the text of the shell script that the command starts; empty if none is readable here."""
    script = _script(command)
    try:
        path = beside / (script or "")
        if script is None or path.suffix != ".sh" or not path.is_file() or path.stat().st_size > _LARGEST_SCRIPT:
            return ""
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _check_program(command: tuple[str, ...], beside: Path) -> None:
    """Raise ConfigError for a script that is there as the program itself, and that nothing starts."""
    program = command[0]
    starter = _STARTERS.get(Path(program).suffix)
    if starter is None or not _SCRIPT.fullmatch(program):
        return
    on_path = "/" not in program
    if not (beside / program).is_file() or (shutil.which(program) if on_path else os.access(beside / program, os.X_OK)):
        return
    why = "is no program on PATH" if on_path else "may not be executed"
    words = shlex.quote(f"command=[{format_list_items([starter, *command])}]")
    raise ConfigError(f"command: {program} {why}", where="command", hint=f"name what starts it: {words}")


_STARTERS = {".py": "python", ".sh": "bash"}


def _script(command: tuple[str, ...]) -> str | None:
    """The file that the command begins with, or that its interpreter is given; None where that is not plain."""
    program, *words = command
    if not _INTERPRETER.fullmatch(program):
        return program if "/" in program and _SCRIPT.fullmatch(program) else None
    given = next((word for word in words if not _PLAIN.fullmatch(word)), "")
    return given if _SCRIPT.fullmatch(given) and not given.startswith("-") else None


def _missing(command: tuple[str, ...], script: str, path: Path) -> ConfigError:
    near = near_file(path, (path.suffix,))
    if near is None:
        hint = "give the script's full path, or submit from the folder that has it"
    else:
        meant = script.removesuffix(path.name) + near
        words = [meant if word == script else word for word in command]
        hint = f"did you mean {shlex.quote(f'command=[{format_list_items(words)}]')}?"
    return ConfigError(f"command: no file {path}", where="command", hint=hint)
