"""Launchers in a `command:`: orch starts each rank itself, so a launcher would start all of them once more. Pure."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from orchestrator.config.run_config import RunConfig
from orchestrator.config.yaml_text import format_list_items
from orchestrator.errors import ConfigError
from orchestrator.submission.shell_text import SHELL, inline_text, lines_of_words

_PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate launch",
    "accelerate.commands.accelerate_cli": "accelerate launch",
    "deepspeed.launcher.runner": "deepspeed",
}
_PROGRAMS = {
    **{name: name for name in ("torchrun", "deepspeed", "srun", "mpirun", "mpiexec", "horovodrun", "composer")},
    "accelerate-launch": "accelerate launch",
}
_VERBS = {"accelerate": "launch", "fabric": "run", "colossalai": "run"}
"""Programs that start ranks with this verb only."""
_WRAPPERS = {
    "env": 0, "nice": 0, "ionice": 0, "nohup": 0, "time": 0, "timeout": 0, "stdbuf": 0, "setsid": 0, "exec": 0,
    "numactl": 0, "taskset": 0, "uv": 1, "poetry": 1, "pipenv": 1, "pixi": 1,
}  # fmt: skip
"""Programs that start the words after their options, and how many words of their own they have (`uv run`)."""
_WRAPPERS_OWN = re.compile(r"-.*|\w+=.*|[\d.,-]+[smhd]?|0x[\da-fA-F]+")
_FLAGS = frozenset(
    {"standalone", "multi-gpu", "cpu", "tpu", "use-deepspeed", "use-fsdp", "no-python", "run-path", "quiet"}
)
"""Options of launchers that take no value."""
_PER_NODE = ("nproc-per-node", "num-gpus", "ntasks-per-node", "npernode")
_IN_ALL = ("num-processes", "ntasks", "np", "n")
_NODES = ("nnodes", "num-machines", "num-nodes")
_OWN_RANKS = re.compile(r"RANK|WORLD_SIZE|SLURM_|GROUP_|NODE_ID|NODEID")
"""Variables by which a shell script starts on each rank what belongs there."""
_SEPARATORS = frozenset({"&&", "||", "|", ";", "&", "(", ")", "do", "then", "else", "{"})


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launcher with its options (without dashes in front, `-` for `_`), and the words that it starts."""

    name: str
    options: dict[str, str]
    program: tuple[str, ...]

    def number(self, names: Sequence[str]) -> int:
        """The value of the first of these options; 0 without a number."""
        values = [self.options[name] for name in names if name in self.options]
        return int(values[0]) if values and values[0].isdigit() else 0


def refuse_launcher(config: RunConfig, script: str = "") -> None:
    """Raise ConfigError for a launcher where there is more than one rank; `script`: text of a shell script."""
    if config.cluster.world_size == 1:
        return
    found = _launch(config.command)
    text = inline_text(_strip_wrappers(list(config.command))) or script
    if found is None and text and not _OWN_RANKS.search(text):
        found = next(filter(None, map(_launch, _simple_commands(text))), None)
    if found is None or (config.cluster.ranks_per_node == 1 and _joins_nodes(found)):
        return
    cluster = config.cluster
    each = f"{cluster.world_size} ranks ({cluster.nodes} x {cluster.ranks_per_node}), and {found.name} on each"
    what = f"command: orch starts {each} would train a model of its own"
    raise ConfigError(what, where="command", hint=_instead(found, config))


def _joins_nodes(found: Launch) -> bool:
    """Whether the launcher makes one world of all nodes itself: it is started once on each."""
    nodes = next((found.options[name] for name in _NODES if name in found.options), "1")
    return nodes != "1" and found.name in ("torchrun", "accelerate launch")


def _instead(found: Launch, config: RunConfig) -> str:
    command = f"command=[{format_list_items(found.program or ('python', 'YOUR_SCRIPT.py'))}]"
    per_node = found.number(_PER_NODE) or (found.number(_IN_ALL) if config.cluster.nodes == 1 else 0)
    names = ("ranks_per_node", "gpus_per_node") if config.cluster.gpus_per_node else ("ranks_per_node",)
    ranks = "".join(f" cluster.{name}={per_node}" for name in names) if per_node > 1 else ""
    settings = "; what its configuration sets (precision, sharding) goes into the script or `env`"
    return f"{shlex.quote(command)}{ranks}" + (settings if found.name in ("accelerate launch", "deepspeed") else "")


def _launch(command: Sequence[str]) -> Launch | None:
    """Return the launcher at the start of these words, after wrappers such as `env X=Y`; None for other programs."""
    words = _strip_wrappers(list(command))
    if not words:
        return None
    program = words[0].rpartition("/")[2]
    if _PYTHON.fullmatch(words[0]) and "-m" in words and (at := words.index("-m")) + 1 < len(words):
        is_module = all(word.startswith("-") for word in words[1:at])
        name, rest = _MODULES.get(words[at + 1], "") if is_module else "", words[at + 2 :]
        rest = rest[1:] if rest[:1] == ["launch"] else rest
    elif _VERBS.get(program) in words[1:2]:
        name, rest = f"{program} {words[1]}", words[2:]
    else:
        name, rest = _PROGRAMS.get(program, ""), words[1:]
    return _read(name, rest) if name else None


def _strip_wrappers(words: list[str]) -> list[str]:
    while words and (words[0].rpartition("/")[2] in _WRAPPERS or re.match(r"[A-Za-z_]\w*=", words[0])):
        words, option = words[1 + _WRAPPERS.get(words[0].rpartition("/")[2], 0) :], False
        while words and (_WRAPPERS_OWN.fullmatch(words[0]) or (option and not _may_start(words[0]))):
            option = words[0].startswith("-") and "=" not in words[0]
            words = words[1:]
    return words


def _may_start(word: str) -> bool:
    """Whether this word is a program that matters here, and not the value of an option before it."""
    name = word.rpartition("/")[2]
    known = {*_PROGRAMS, *_VERBS, *_WRAPPERS}
    return name in known or any(form.fullmatch(word) for form in (_PYTHON, SHELL))


def _read(name: str, words: list[str]) -> Launch:
    """Read options up to the program; a word after an option is its value, unless a program begins there."""
    options: dict[str, str] = {}
    while words and words[0].startswith("-"):
        option, mark, value = words.pop(0).lstrip("-").partition("=")
        option = option.replace("_", "-")
        if option in ("m", "module"):
            return Launch(name=name, options=options, program=("python", "-m", *words))
        has_value = not mark and option not in _FLAGS and words and not words[0].startswith("-")
        if has_value and not _is_program(words[0]):
            value = words.pop(0)
        options[option] = value
    script = words[:1]
    is_python = bool(script) and script[0].endswith(".py")
    return Launch(name=name, options=options, program=(*(["python"] if is_python else []), *words))


def _is_program(word: str) -> bool:
    return word.endswith((".py", ".sh")) or _PYTHON.fullmatch(word) is not None


def _simple_commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a shell text, roughly: words between separators and ends of lines."""
    for line in lines_of_words(text):
        words: list[str] = []
        for word in line:
            if word in _SEPARATORS:
                yield words
                words = []
            else:
                words.append(word)
        yield words
