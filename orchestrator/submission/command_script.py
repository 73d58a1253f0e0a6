"""Checks of a `command:`: its script, launchers, and shell code that hides a failure."""

import os
import re
import shlex
import shutil
from collections.abc import Iterator, Sequence
from itertools import dropwhile, groupby, pairwise, takewhile
from pathlib import Path
from typing import NamedTuple

from orchestrator.config.run_config import RunConfig
from orchestrator.config.yaml_text import format_list_items, near_file
from orchestrator.errors import ConfigError
from trainer.protocol.command_progress import FOLDER_VARIABLE
from trainer.protocol.config_sections.scheduler_kinds import traits

SHELL = re.compile(r"(?:.*/)?(?:bash|sh|dash|zsh|ksh)")
PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
_ENDS = frozenset({";", "&&", "||", "&", "(", ")"})
_FILTERS = frozenset({"tee", "cat", "grep", "egrep", "sed", "awk", "ts", "tr", "cut", "head", "tail", "logger", "sort"})
"""Pipe filters that succeed even if the program before them fails. None of them does any training."""
_BOTH_STREAMS = re.compile(r"\d*>&\d")
_LAST_WORDS = frozenset({"echo", "printf", "date", "true", ":"})
"""Commands that always succeed; a script that ends with one also succeeds."""
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
    trains = [line for line in lines if any(map(PYTHON.fullmatch, line))][-1:]
    hidden = next(filter(None, map(_filter_after_pipe, trains)), "")
    if hidden and "pipefail" not in f"{text} {' '.join(options)}":
        what = f"command: a pipe returns the exit code of `{hidden}`, so a program that fails would count as done"
        hint = "put `set -o pipefail;` before it in bash; orch already keeps the output: `orch logs RUN`"
        raise ConfigError(what, where="command", hint=hint)
    strict = any(re.fullmatch(r"-\w*e\w*", word) for word in options[1:])
    last = lines[-1]
    ends = last[max((at + 1 for at, word in enumerate(last) if word in (";", "&")), default=0) :] or last
    starts_more = len(lines) > 1 or len(ends) < len(last)
    if starts_more and ends[0] in _LAST_WORDS and not strict and not _KEEPS_CODE.search(text):
        what = f"command: the script ends with `{ends[0]}`, so a failed program before it would count as done"
        raise ConfigError(what, where="command", hint="put `set -e` at the beginning of the script")


def _filter_after_pipe(words: Sequence[str]) -> str:
    """Return the filter that ends the last Python program's pipe in these words; empty if there is none."""
    at = max(place for place, word in enumerate(words) if PYTHON.fullmatch(word))
    piped = ""
    for word, after in pairwise(words[at:]):
        if word in _ENDS:
            break
        if word in ("|", "|&"):
            piped = after.rpartition("/")[2]
    return piped if piped in _FILTERS else ""


def inline_text(command: Sequence[str]) -> str:
    """Return the text of `bash -c TEXT`; empty for any other command."""
    if not command or not SHELL.fullmatch(command[0]):
        return ""
    at = next((place for place, word in enumerate(command) if re.fullmatch(r"-\w*c", word)), 0)
    return command[at + 1] if 0 < at < len(command) - 1 else ""


def lines_of_words(text: str) -> Iterator[list[str]]:
    """Yield the words of each line of shell text, with separators; lines with an open quote are skipped."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(_BOTH_STREAMS.sub("", line), posix=True, punctuation_chars=";&|()")
        lexer.whitespace_split = True
        try:
            yield list(lexer)
        except ValueError:
            continue


_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate launch",
    "accelerate.commands.accelerate_cli": "accelerate launch",
    "deepspeed.launcher.runner": "deepspeed",
    "composer.cli.launcher": "composer",
    "horovod.runner.launch": "horovodrun",
    "lightning.fabric.cli": "fabric run",
    "lightning_fabric.cli": "fabric run",
}
_VERBS = {"accelerate": "launch", "fabric": "run", "lightning": "run", "colossalai": "run", "tune": "run"}
"""Programs that start ranks only with this subcommand."""
_SUBCOMMANDS = frozenset({"launch", "run", "model"})
_NO_VALUE = re.compile(
    r"-m|--(?:module|no[-_]python|standalone|multi[-_]gpu|cpu|tpu|use[-_]deepspeed|use[-_]fsdp|run[-_]path|quiet)"
)
"""Launcher options without a value."""
_RUNNABLE = re.compile(r".*\.(?:py|sh)|(?:.*/)?python[\d.]*")
_PYTHON_LAUNCHERS = frozenset(
    {
        "torchrun",
        "torchrun_jsc",
        "deepspeed",
        "composer",
        "accelerate-launch",
        "accelerate launch",
        "fabric run",
        "lightning run",
    }
)
"""Launchers that start a Python script or module, or any program with `--no-python`."""
_PROGRAM_LAUNCHERS = frozenset({"srun", "ibrun", "mpirun", "mpiexec", "horovodrun", "colossalai run"})
_JOINING = ("torchrun", "torchrun_jsc", "accelerate launch", "accelerate-launch", "tune run")
"""Launchers that, given the number of nodes, join them into one world and expect one process on each."""
_NODES = re.compile(r"--(?:nnodes|num[-_]machines|num[-_]nodes)(?:[= ])(?!1(?: |$))")
_RANKS = re.compile(r"--(?:nproc[-_]per[-_]node|nnodes)\b")
_OWN_RANKS = re.compile(r"RANK|WORLD_SIZE|SLURM_|GROUP_|NODE_ID|NODEID")
"""Variables that show that a shell script starts each rank itself."""


class Launcher(NamedTuple):
    """Launcher in a command: its name, its own words, and the words before it and after its options."""

    name: str = ""
    own: Sequence[str] = ()
    before: Sequence[str] = ()
    starts: Sequence[str] = ()


_NONE = Launcher()
_SEPARATORS = frozenset({"&&", "||", "|", ";", "&", "(", ")", "do", "then", "else", "{"})


def refuse_launcher(config: RunConfig, script: str = "") -> None:
    """Raise ConfigError for a launcher if there is more than one rank. `script` is the text of a shell script."""
    cluster, command = config.cluster, config.command
    if cluster.world_size == 1:
        return
    text = inline_text(_from_shell(command)) or script
    commands = [command, *(_simple_commands(text) if not _OWN_RANKS.search(text) else ())]
    launcher = next((found for found in map(find_launcher, commands) if found.name), _NONE)
    found = launcher.name
    joins_nodes = found in _JOINING and _NODES.search(" ".join(launcher.own)) is not None
    if not found or (cluster.ranks_per_node == 1 and joins_nodes):
        return
    each = f"{cluster.world_size} ranks ({cluster.nodes} x {cluster.ranks_per_node}), and {found} on each"
    what = f"command: orch starts {each} would train a separate model"
    hint = f"remove {found} and its options; cluster.nodes and cluster.ranks_per_node set the number of ranks"
    raise ConfigError(what, where="command", hint=hint)


def find_launcher(command: Sequence[str]) -> Launcher:
    """Return the first launcher among these words, after any programs that start it; without a name if there is none.

    Words after a script are its arguments.
    """
    if not command or command[0] in _LAST_WORDS | _FILTERS:
        return _NONE
    launchers = (_read_launcher(command, at) for at in range(_find_script_index(command) + 1))
    return next((found for found in launchers if found.name), _NONE)


def _read_launcher(command: Sequence[str], at: int) -> Launcher:
    """Return the launcher that starts at this word; `_NONE` for any other word.

    Inside a command, a launcher's name counts only if it would start something: a conda environment may have that name.
    """
    words, name = command[at:], command[at].rpartition("/")[2]
    is_module = PYTHON.fullmatch(name) is not None
    if is_module:
        options = list(takewhile(lambda word: word.startswith("-") and word != "-m", words[1:]))
        mark, *words = words[len(options) + 1 :] or ("",)
        name = _MODULES.get(words[0], "") if mark == "-m" and words else ""
    elif _VERBS.get(name) in words[1:2]:
        name = f"{name} {words[1]}"
    elif name in _PYTHON_LAUNCHERS and len(words) > 1 and PYTHON.fullmatch(words[1]):
        return _NONE
    if name not in _PYTHON_LAUNCHERS | _PROGRAM_LAUNCHERS | {"tune run"}:
        return _NONE
    if " " in name:
        words = [words[0], *dropwhile(_SUBCOMMANDS.__contains__, words[1:])]
    end = _find_started(words)
    own, started = words[:end], "".join(words[end : end + 1])
    is_any = name in _PROGRAM_LAUNCHERS or not {"--no-python", "--no_python"}.isdisjoint(own)
    if name == "tune run":  # torchtune uses torchrun only if a number of ranks is given
        starts = any(map(_RANKS.match, own))
    elif at == 0 or is_module or own[-1] in ("-m", "--module"):
        starts = True
    elif _RUNNABLE.fullmatch(started):
        starts = is_any or not started.endswith(".sh")
    else:  # after an option, the name is probably that option's value
        starts = is_any and bool(started) and ("/" in started or not command[at - 1].startswith("-"))
    return Launcher(name, own, command[:at], words[end:]) if starts else _NONE


def _find_started(words: Sequence[str]) -> int:
    """Return the index of the program, script or module after a launcher's options, or len(words) if none follows."""
    for at, (before, word) in enumerate(pairwise(words), 1):
        takes_value = before.startswith("-") and "=" not in before and not _NO_VALUE.fullmatch(before)
        if not word.startswith("-") and not (takes_value and not _RUNNABLE.fullmatch(word)):
            return at
    return len(words)


def _find_script_index(words: Sequence[str]) -> int:
    """Return the index of the first script, or of the Python or shell that runs one, or else of the last word."""
    for at, (word, after) in enumerate(pairwise(words)):
        if word.endswith((".py", ".sh")) or SHELL.fullmatch(word):
            return at
        if PYTHON.fullmatch(word) and (after.startswith("-") or after.endswith(".py")):
            return at
    return len(words) - 1


def _from_shell(command: Sequence[str]) -> Sequence[str]:
    """Return the command's words from its shell onwards; empty if it does not start a shell."""
    at = _find_script_index(command)
    return command[at:] if SHELL.fullmatch(command[at]) else ()


def _simple_commands(text: str) -> Iterator[list[str]]:
    """Yield the simple commands in shell text, approximately: the words between separators and line ends."""
    for line in lines_of_words(text):
        for is_separator, words in groupby(line, _SEPARATORS.__contains__):
            if not is_separator:
                yield list(words)


_INTERPRETER = re.compile(r"(?:.*/)?(?:python[\d.]*|bash|sh)")
_PLAIN = re.compile(r"(?:-[uOBEsSIqv]+|--)")
"""Interpreter options without a value, which may precede a script."""
_SCRIPT = re.compile(r"[^$~*?]+\.(?:py|sh)")
_KEEP_FILES = frozenset({"default", "modules", "conda", "nccl"})
"""Templates whose jobs see this machine's files; jobs in containers or from custom scripts may not."""


def check_command(config: RunConfig, cwd: Path) -> None:
    """Raise ConfigError for a script that certainly does not exist, or that would be started twice.

    `cwd` is the folder from which the run is submitted.
    """
    _refuse_one_text(config.command, cwd)
    script_text = _shell_text(config.command, cwd)
    refuse_launcher(config, script_text)
    refuse_lost_exit_code(config.command, script_text)
    for word in config.command[1:]:
        if word.endswith(".py") and word.startswith("/") and not Path(word).is_file():
            raise _missing(config.command, word, Path(word))
    if not traits(config.cluster.kind).simulated_nodes and not set(config.cluster.templates) <= _KEEP_FILES:
        return
    _check_program(config.command, cwd)
    script = _script(config.command)
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


_LARGEST_SCRIPT = 1 << 20


def _shell_text(command: tuple[str, ...], cwd: Path) -> str:
    """Return the text of the shell script that the command starts; empty if none is readable here."""
    script = _script(tuple(_from_shell(command)) or command)
    try:
        path = cwd / (script or "")
        if script is None or path.suffix != ".sh" or not path.is_file() or path.stat().st_size > _LARGEST_SCRIPT:
            return ""
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _check_program(command: tuple[str, ...], cwd: Path) -> None:
    """Raise ConfigError for a script that is run as the program but is not executable."""
    program = command[0]
    starter = _STARTERS.get(Path(program).suffix)
    if starter is None or not _SCRIPT.fullmatch(program):
        return
    on_path = "/" not in program
    if not (cwd / program).is_file() or (shutil.which(program) if on_path else os.access(cwd / program, os.X_OK)):
        return
    why = "is not a program on PATH" if on_path else "is not executable"
    words = shlex.quote(f"command=[{format_list_items([starter, *command])}]")
    raise ConfigError(f"command: {program} {why}", where="command", hint=f"name its interpreter: {words}")


_STARTERS = {".py": "python", ".sh": "bash"}


def _script(command: tuple[str, ...]) -> str | None:
    """Return the file that the command or its interpreter runs; None if that is unclear."""
    program, *words = command
    if not _INTERPRETER.fullmatch(program):
        return program if "/" in program and _SCRIPT.fullmatch(program) else None
    given = next((word for word in words if not _PLAIN.fullmatch(word)), "")
    return given if _SCRIPT.fullmatch(given) and not given.startswith("-") else None


def _missing(command: tuple[str, ...], script: str, path: Path) -> ConfigError:
    near = near_file(path, (path.suffix,))
    if near is None:
        hint = "give the script's full path, or submit from the folder that contains it"
    else:
        meant = script.removesuffix(path.name) + near
        words = [meant if word == script else word for word in command]
        hint = f"did you mean {shlex.quote(f'command=[{format_list_items(words)}]')}?"
    return ConfigError(f"command: no file {path}", where="command", hint=hint)
