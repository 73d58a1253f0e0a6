"""The command line of a script that starts the training, taken apart: launchers, their options, and the program."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile
from typing import NamedTuple

from orchestrator.errors import ConfigError
from orchestrator.submission.from_sbatch.directives import Option, read_options
from orchestrator.submission.from_sbatch.shell_text import (
    ShellLine,
    Token,
    assignment,
    expand,
    read_lines,
    simple_commands,
    tokenize,
    unescape,
    unquote,
)
from trainer.protocol.launchers import PYTHON, SHELL, find_launcher


class Remark(NamedTuple):
    """Line, or part of one, that is not in the configuration, with the reason."""

    line: int
    text: str
    why: str


@dataclass(kw_only=True)
class Launch:
    """The launch line. The lists collect what its launchers' options set."""

    line: int
    srun: list[Option] = field(default_factory=list)
    launchers: list[str] = field(default_factory=list)
    counts: dict[str, str] = field(default_factory=dict)  # number of ranks or nodes as written: RANKS, TOTAL, NODES
    env: dict[str, str] = field(default_factory=dict)
    before: str = ""  # shell commands of `bash -c`, which every rank runs first
    program: list[str] = field(default_factory=list)  # as written, with the programs that start it
    left_out: list[Remark] = field(default_factory=list)
    unclear: list[Remark] = field(default_factory=list)

    @property
    def starts_once_per_task(self) -> bool:
        """Return whether only srun or MPI starts ranks."""
        return bool(self.launchers) and not set(self.launchers) - _TASKS


RANK_VARIABLES = frozenset(
    {
        "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK",
        "SRUN_CPUS_PER_TASK", "OMP_NUM_THREADS",
    }
)  # fmt: skip
"""Variables that orch sets for every rank, or that only srun reads."""
RANKS, TOTAL, NODES = "per node", "in all", "nodes"
_TASKS = frozenset({"srun", "ibrun", "mpirun", "mpiexec"})
_COUNTS = {
    **dict.fromkeys(("nproc-per-node", "num-gpus", "devices"), RANKS),
    **dict.fromkeys(("num-processes", "np", "n"), TOTAL),
    **dict.fromkeys(("nnodes", "num-machines", "num-nodes"), NODES),
}
_ORCH_DOES_IT = re.compile(
    r"rdzv-.*|(node|machine)-rank|master-(addr|port)|main-process-(ip|port)|max-restarts|standalone|monitor-interval|"
    r"role|tee|redirects|log-dir|local-addr|start-method|multi-gpu|same-network|hostfile|no-ssh.*|ssh-port|m|module|"
    r"no-python|run-path|use-env|no-local-rank|accelerator|force-multi"
)
"""Options of launchers for start, rendezvous, restart and logs, all of which orch does itself."""
_NO_VALUE = re.compile(
    r"standalone|m|module|no-python|multi-gpu|run-path|use-.*|no-.*|same-network|force-.*|cpu|quiet|oversubscribe|"
    r"allow-run-as-root|bind-to-none"
)
_ACCELERATE = {
    "mixed-precision": "ACCELERATE_MIXED_PRECISION",
    "gradient-accumulation-steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    "dynamo-backend": "ACCELERATE_DYNAMO_BACKEND",
}
"""Options that `accelerate launch` passes to the program as variables."""
_DIAGNOSTICS = frozenset(
    {
        "hostname", "nvidia-smi", "rocm-smi", "echo", "date", "env", "printenv", "mkdir", "cp", "rsync", "rm", "tar",
        "unzip", "ls", "cat", "sleep", "true", "scontrol", "squeue", "ip", "getent", "dcgmi", "lscpu", "free", "df",
    }
)  # fmt: skip
_FILTERS = frozenset({"tee", "cat", "grep", "sed", "awk", "ts", "tail", "head"})


class LaunchLine(NamedTuple):
    """Simple command that may start the training. Those with the highest rank do."""

    rank: int
    line: ShellLine
    before: list[list[Token]]  # commands of the same line before it
    command: list[str]
    after: list[Token]


def find_launch_line(lines: Sequence[ShellLine], values: Mapping[str, str], where: str) -> LaunchLine:
    """Return the command that starts the training. Raises ConfigError if there is none, or more than one."""
    found = [item for line in lines for item in _candidates(line, values)]
    best = [item for item in found if item.rank == max(one.rank for one in found)]
    if not best:
        what = "no line starts a training program: srun, torchrun, accelerate launch, deepspeed or python"
        hint = "write a configuration: `orch submit -h`, docs/torchrun-scripts.md"
        raise ConfigError(what, where=where, hint=hint)
    if len(best) > 1:
        numbers = " and ".join(str(item.line.number) for item in best)
        hint = "keep one of them in a copy of the script; the others can be runs of their own"
        raise ConfigError(f"lines {numbers} each start a program, but a run has one", where=where, hint=hint)
    if best[0].line.is_nested:
        what = "the line that starts the training is inside a loop, a condition, a function or a group"
        hint = "move it out of that in a copy of the script; orch repeats a failed run itself"
        raise ConfigError(what, where=f"{where}:{best[0].line.number}", hint=hint)
    plain = plain_words(best[0].command)
    if ":" in plain and (launcher := find_launcher(plain).name) in _TASKS:
        what = f"{launcher} starts several programs, one after each `:`, but a run has one"
        hint = "keep one of them in a copy of the script; the others can be runs of their own"
        raise ConfigError(what, where=f"{where}:{best[0].line.number}", hint=hint)
    return best[0]


def _candidates(line: ShellLine, values: Mapping[str, str]) -> Iterator[LaunchLine]:
    before: list[list[Token]] = []
    commands = list(simple_commands(line.tokens))
    for at, (_, tokens) in enumerate(commands):
        words = _command_words(tokens, values)
        if rank := _rate_command(words):
            rest = [Token(operator, is_operator=True) if operator else None for operator, _ in commands[at + 1 :]]
            after = [item for pair in zip(rest, (more for _, more in commands[at + 1 :]), strict=True) for item in pair]
            flat = [one for item in after for one in (item if isinstance(item, list) else [item]) if one]
            yield LaunchLine(rank, line, before, words, [*_redirections(tokens), *flat])
        before = [*before, tokens]


def _command_words(tokens: Sequence[Token], values: Mapping[str, str]) -> list[str]:
    """Return a simple command's words with known variables filled in, without redirections and leading keywords."""
    found, is_target = [], False
    for token in tokens:
        if token.redirects:
            is_target = not re.search(r"&\d?$", token.raw) or token.raw.endswith("&")
        elif not is_target:
            found.append(token.raw)
        else:
            is_target = False
    while found[:1] and found[0] in ("time", "exec", "then", "do", "else", "{", "!"):
        found.pop(0)
    filled = " ".join(expand(word, values) for word in found)
    return [token.raw for token in tokenize(filled)]


def _redirections(tokens: Sequence[Token]) -> list[Token]:
    at = next((place for place, token in enumerate(tokens) if token.redirects), len(tokens))
    return list(tokens[at:])


def plain_words(words: Sequence[str]) -> list[str]:
    """Return the words without quotes; a word with expansions stays as written."""
    return [word if (text := unquote(word)) is None else text for word in words]


def _rate_command(words: Sequence[str]) -> int:
    """Return how surely a command starts the training: 0, not; 1, a program; 2, one of srun; 3, a launcher."""
    plain = plain_words(words)
    plain = plain[next((at for at, word in enumerate(plain) if assignment(word) is None), len(plain)) :]
    if not plain or plain[0] in ("alias", "export", "echo", "printf", "source", ".", "which", "type"):
        return 0
    launcher = find_launcher(plain)
    has_python = any(PYTHON.fullmatch(word) or word.endswith(".py") for word in plain) or "python" in plain[-1]
    if launcher.name in _TASKS:
        _, rest = read_options(list(plain[len(launcher.before) + 1 :]), 0)
        program = rest[0].rpartition("/")[2] if rest else ""
        inner = has_python or bool(find_launcher(rest).name) or any(map(_mentions_launcher, rest))
        return 0 if not program or program in _DIAGNOSTICS else 3 if inner else 2
    if launcher.name:
        return 3
    if SHELL.fullmatch(plain[0]):
        return 1 if len(plain) > 1 else 0
    return 1 if has_python and not re.fullmatch(r"(.*/)?(pip|conda|mamba|rm|cp|mv|ls|cat|cd)[\d.]*", plain[0]) else 0


def _mentions_launcher(word: str) -> bool:
    return " " in word and re.search(r"\b(torchrun|accelerate launch|deepspeed|python[\d.]*)\b", word) is not None


def take_apart(candidate: LaunchLine, values: Mapping[str, str]) -> Launch:
    """Return the launch line without its launchers."""
    launch = Launch(line=candidate.line.number)
    _peel(launch, candidate.command, values)
    if candidate.after:
        _explain_rest(launch, candidate.after)
    return launch


def _explain_rest(launch: Launch, after: Sequence[Token]) -> None:
    text = re.sub(r"& (\d)", r"&\1", " ".join(token.raw for token in after))
    piped = [token.raw for before, token in zip(after, after[1:], strict=False) if before.raw in ("|", "|&")]
    others = {token.raw for token in after if token.is_operator and not token.redirects} - {"|", "|&", "&"}
    if any(token.redirects and "<" in token.raw for token in after):
        launch.unclear.append(Remark(launch.line, text, "ranks read no input"))
    elif set(piped) <= _FILTERS and not others:
        launch.left_out.append(Remark(launch.line, text, "orch keeps each rank's output: `orch logs RUN`"))
    else:
        launch.unclear.append(Remark(launch.line, text, "commands after the training are not run"))


def _peel(launch: Launch, words: list[str], values: Mapping[str, str]) -> None:
    """Remove launchers from the words, outermost first, until a program remains."""
    count = next((at for at, word in enumerate(words) if assignment(word) is None), len(words))
    assigned, words = words[:count], words[count:]
    plain = plain_words(words)
    launcher = find_launcher(plain)
    if launcher.name:
        at = len(launcher.before)
        raw_before = [*assigned, *words[:at]]
        if launcher.name in ("srun", "ibrun"):
            options, rest = read_options(words[at + 1 :], launch.line)
            launch.srun += options
        else:
            rest = _read_launcher_options(launch, launcher.name, words[at:], len(launcher.starts))
        launch.launchers.append(launcher.name)
        kept = list(dropwhile(("exec", "time", "nohup").__contains__, raw_before))
        _peel(launch, [*kept, *rest], values)
        return
    if plain and SHELL.fullmatch(plain[0]) and len(plain) > 2 and re.fullmatch(r"-\w*c", plain[1]):
        _peel_inner(launch, _inner_text(words[2], values), assigned, values)
        return
    launch.program = [*assigned, *words]
    if words and words[0].startswith(("$", '"$')):
        why = "its value is known only in the job; if it contains torchrun or another launcher, write it out"
        launch.unclear.append(Remark(launch.line, words[0], why))


def _read_launcher_options(launch: Launch, name: str, words: list[str], started: int) -> list[str]:
    """Note the launcher's options, and return the words of the program that it starts."""
    own, rest = words[: len(words) - started], words[len(words) - started :]
    plain = plain_words(own)
    runs_module = PYTHON.fullmatch(plain[0]) is not None
    start = plain.index("-m") if runs_module else 0
    options = dict(_launcher_options(plain[start + 1 :]))
    for option, value in options.items():
        if option in _COUNTS and value:
            launch.counts.setdefault(_COUNTS[option], value)
        elif name.startswith("accelerate") and option in _ACCELERATE:
            launch.env[_ACCELERATE[option]] = value
        elif name in _TASKS:
            launch.left_out.append(Remark(launch.line, f"-{option} {value}".strip(), "orch starts the ranks itself"))
        elif name.startswith("accelerate") and option == "cpu":
            launch.env["ACCELERATE_USE_CPU"] = "true"
        elif not _ORCH_DOES_IT.fullmatch(option):
            why = f"{name} applies this to the program's environment, and orch starts the program without {name}"
            launch.unclear.append(Remark(launch.line, f"--{option} {value}".strip(), why))
    starts_any = name in ("mpirun", "mpiexec", "horovodrun") or "no-python" in options
    if starts_any or (rest and PYTHON.fullmatch(rest[0])):
        return rest
    is_module = plain[-1] in ("-m", "--module") and name != "fabric run"
    program = [*(own[:start] if runs_module else [_neighbour(own[0])]), *(["-m"] if is_module else []), *rest]
    if name == "deepspeed" and "no-local-rank" not in options:
        program.append("--local_rank=$LOCAL_RANK")
    elif "torch.distributed.launch" in plain and "use-env" not in options:
        program.append("--local-rank=$LOCAL_RANK")
    return program


def _neighbour(launcher: str) -> str:
    """Return the Python in the launcher's folder."""
    folder, slash, _ = launcher.rpartition("/")
    return f"{folder}{slash}python"


def _launcher_options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.startswith("-"):
            continue
        name, equals, value = word.lstrip("-").replace("_", "-").partition("=")
        value = word.partition("=")[2] if equals else ""
        if not equals and not _NO_VALUE.fullmatch(name) and at < len(words) and not words[at].startswith("-"):
            value = words[at]
            at += 1
        if name == "m" and value == "":
            continue
        yield name, value


def _inner_text(raw: str, values: Mapping[str, str]) -> str:
    """Return the text that bash -c gets, with references left to the rank that runs it."""
    text = unquote(raw)
    if text is None and raw[0] == '"' and raw[-1] == '"':
        text = unescape(raw[1:-1])
    return expand(text or raw, values, quoted=True)


def _is_idle(text: str) -> bool:
    """Return whether a command only prints, or sets variables that orch sets for every rank."""
    words = [token.raw for token in tokenize(text)]
    names = [found[0] for word in words if (found := assignment(word))]
    sets_ranks = bool(names) and len(names) >= len(words) - 1 and set(names) <= RANK_VARIABLES
    return sets_ranks or words[0] in ("set", "hostname", "nvidia-smi", "echo", "date")


def _peel_inner(launch: Launch, text: str, assigned: Sequence[str], values: Mapping[str, str]) -> None:
    """Take apart the program inside the text of `bash -c`."""
    lines = read_lines(text)
    last = find_launch_line(lines, values, f"the shell code of line {launch.line}")
    kept = [line.text for line in lines if line.number < last.line.number]
    kept += [" ".join(token.raw for token in command) for command in last.before]
    kept = [line.strip() for line in kept if not _is_idle(line)]
    _peel(launch, [*assigned, *last.command], values)
    launch.before = "; ".join([*kept, *([launch.before] if launch.before else [])])
    later = [line.text for line in lines if line.number > last.line.number]
    launch.unclear += [Remark(launch.line, line, "commands after the training are not run") for line in later]
    if last.after:
        _explain_rest(launch, last.after)
