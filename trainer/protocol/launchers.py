"""Launchers of ranks in a `command:`: how to recognize them, and the options that give each its place."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile, groupby, pairwise, takewhile
from pathlib import Path
from typing import NamedTuple

SHELL = re.compile(r"(?:.*/)?(?:bash|sh|dash|zsh|ksh)")
PYTHON = re.compile(r"(?:.*/)?python[\d.]*")
AUTO, PER_RANK, PER_NODE = "auto", "orch", "node"
"""Values of `launcher`."""


@dataclass(frozen=True, kw_only=True)
class LauncherKind:
    """Kind of launcher. Options are written without their leading hyphens."""

    place: str = ""
    """Options that give one launcher per node its place among several nodes; empty: it can only run on one node."""
    alone: str | None = None
    """The same for a single node; None: those of `place`."""
    no_devices: str = ""
    """Options for a node where CUDA_VISIBLE_DEVICES is not set; otherwise they would replace the job's devices."""
    ranks: tuple[str, ...] = ()
    """Options with the number of ranks per node."""
    total: tuple[str, ...] = ()
    """Options with the number of all ranks."""
    nodes: tuple[str, ...] = ()
    """Options with the number of nodes."""
    starts_any: bool = False
    """It starts any program. Others start a Python script or module, or any program with `--no-python`."""
    by_variables: bool = False
    """It also takes the options of `place` from the variables that orch sets, so it may be in a shell script."""


_TORCHRUN = LauncherKind(
    place="--nnodes={nodes} --nproc-per-node={ranks} --node-rank={node} --rdzv-backend=static --rdzv-endpoint= "
    "--master-addr={host} --master-port={port} --max-restarts=0",
    ranks=("nproc-per-node",), nodes=("nnodes",), by_variables=True,
)  # fmt: skip
_ACCELERATE = LauncherKind(
    place="--num_machines={nodes} --num_processes={world} --machine_rank={node} --rdzv_backend=static "
    "--main_process_ip={host} --main_process_port={port} --max_restarts=0 --deepspeed_multinode_launcher=standard",
    alone="--num_machines=1 --num_processes={world} --main_process_port={port} --max_restarts=0",
    total=("num-processes",), nodes=("num-machines",),
)  # fmt: skip
_FABRIC = LauncherKind(
    place="--num-nodes={nodes} --devices={ranks} --node-rank={node} --main-address={host} --main-port={port}",
    ranks=("devices",), nodes=("num-nodes",),
)  # fmt: skip
_DEEPSPEED = LauncherKind(
    place="--num_nodes={nodes} --num_gpus={ranks} --hostfile={hostfile} --no_ssh --node_rank={node} "
    "--master_addr={host} --master_port={port}",
    alone="--master_port={port}", no_devices="--num_gpus={ranks}",
    ranks=("num-gpus",), nodes=("num-nodes",),
)  # fmt: skip
_COMPOSER = LauncherKind(
    place="--nproc={ranks} --world_size={world} --base_rank={first} --node_rank={node} --master_addr={host} "
    "--master_port={port}",
    ranks=("n", "nproc"), total=("world-size",),
)  # fmt: skip
_MPI = LauncherKind(total=("n", "np", "num-proc"), starts_any=True, alone="")
_SLURM = LauncherKind(starts_any=True)

KINDS: Mapping[str, LauncherKind] = {
    "torchrun": _TORCHRUN,
    "torchrun_jsc": _TORCHRUN,
    "tune run": _TORCHRUN,
    "accelerate launch": _ACCELERATE,
    "accelerate-launch": _ACCELERATE,
    "deepspeed": _DEEPSPEED,
    "fabric run": _FABRIC,
    "lightning run": _FABRIC,
    "composer": _COMPOSER,
    "colossalai run": LauncherKind(ranks=("nproc-per-node",), starts_any=True, alone=""),
    "horovodrun": _MPI,
    "mpirun": _MPI,
    "mpiexec": _MPI,
    "srun": _SLURM,
    "ibrun": _SLURM,
}
"""Launchers keyed by name. One with neither `place` nor `alone` starts tasks of the job, which orch does itself."""

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
_RANKS = re.compile(r"--(?:nproc[-_]per[-_]node|nnodes)\b")
FILTERS = frozenset({"tee", "cat", "grep", "egrep", "sed", "awk", "ts", "tr", "cut", "head", "tail", "logger", "sort"})
"""Pipe filters that succeed even if the program before them fails. None of them does any training."""
LAST_WORDS = frozenset({"echo", "printf", "date", "true", ":"})
"""Commands that always succeed; a script that ends with one also succeeds."""


class Launcher(NamedTuple):
    """Launcher in a command: its name, its own words, and the words before it and after its options."""

    name: str = ""
    own: Sequence[str] = ()
    before: Sequence[str] = ()
    starts: Sequence[str] = ()

    @property
    def kind(self) -> LauncherKind:
        return KINDS.get(self.name, LauncherKind(alone=""))


NO_LAUNCHER = Launcher()


def find_launcher(command: Sequence[str]) -> Launcher:
    """Return the first launcher among these words, after any programs that start it; without a name if there is none.

    Words after a script are its arguments.
    """
    if not command or command[0] in FILTERS | LAST_WORDS:
        return NO_LAUNCHER
    launchers = (_read_launcher(command, at) for at in range(_find_script_index(command) + 1))
    return next((found for found in launchers if found.name), NO_LAUNCHER)


def _read_launcher(command: Sequence[str], at: int) -> Launcher:
    """Return the launcher that starts at this word; `NO_LAUNCHER` for any other word.

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
    elif name in KINDS and not KINDS[name].starts_any and len(words) > 1 and PYTHON.fullmatch(words[1]):
        return NO_LAUNCHER
    if name not in KINDS:
        return NO_LAUNCHER
    if " " in name:
        words = [words[0], *dropwhile(_SUBCOMMANDS.__contains__, words[1:])]
    end = _find_started(words)
    own, started = words[:end], "".join(words[end : end + 1])
    is_any = KINDS[name].starts_any or not {"--no-python", "--no_python"}.isdisjoint(own)
    if name == "tune run":  # torchtune uses torchrun only if a number of ranks is given
        starts = any(map(_RANKS.match, own))
    elif at == 0 or is_module or own[-1] in ("-m", "--module"):
        starts = True
    elif _RUNNABLE.fullmatch(started):
        starts = is_any or not started.endswith(".sh")
    else:  # after an option, the name is probably that option's value
        starts = is_any and bool(started) and ("/" in started or not command[at - 1].startswith("-"))
    return Launcher(name, own, command[:at], words[end:]) if starts else NO_LAUNCHER


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


# -- shell and Python scripts

_BOTH_STREAMS = re.compile(r"\d*>&\d")
_SEPARATOR = re.compile(r"&&|\|\|?|[;&(){]|do|then|else")
_INTERPRETER = re.compile(r"(?:.*/)?(?:python[\d.]*|bash|sh)")
_PLAIN = re.compile(r"(?:-[uOBEsSIqv]+|--)")
"""Interpreter options without a value, which may precede a script."""
SCRIPT = re.compile(r"[^$~*?]+\.(?:py|sh)")
_LARGEST_SCRIPT = 1 << 20
_TAKES_RANK = re.compile(r"\$\{?(?:LOCAL_RANK|RANK|SLURM_PROCID|SLURM_LOCALID)\b")
"""Variables in a shell script that differ between the ranks of a node, so it is started once per rank."""
_SPAWNS = re.compile(r"\b(?:mp|multiprocessing)\.spawn\(|\bimport spawn\b")
_READS_RANK = re.compile(r"LOCAL_RANK|SLURM_LOCALID")


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


def simple_commands(text: str) -> Iterator[list[str]]:
    """Yield the simple commands in shell text, approximately: the words between separators and line ends."""
    for line in lines_of_words(text):
        for is_separator, words in groupby(line, lambda word: _SEPARATOR.fullmatch(word) is not None):
            if not is_separator:
                yield list(words)


def from_shell(command: Sequence[str]) -> Sequence[str]:
    """Return the command's words from its shell onwards; empty if it does not start a shell."""
    at = _find_script_index(command)
    return command[at:] if SHELL.fullmatch(command[at]) else ()


def find_script(command: Sequence[str]) -> str | None:
    """Return the file that the command or its interpreter runs; None if that is unclear."""
    program, *words = command
    if not _INTERPRETER.fullmatch(program):
        return program if "/" in program and SCRIPT.fullmatch(program) else None
    given = next((word for word in words if not _PLAIN.fullmatch(word)), "")
    return given if SCRIPT.fullmatch(given) and not given.startswith("-") else None


def read_script(command: Sequence[str], folder: Path) -> str:
    """Return the text of the script that the command starts; empty if none is readable here."""
    script = find_script(from_shell(command) or command)
    try:
        path = folder / (script or "")
        if script is None or not path.is_file() or path.stat().st_size > _LARGEST_SCRIPT:
            return ""
        return path.read_text(errors="replace")
    except OSError:
        return ""


SPAWN = "torch.multiprocessing.spawn"


@dataclass(frozen=True, kw_only=True)
class OwnLauncher:
    """Launcher of a command's ranks, or a script that starts them itself."""

    launcher: Launcher = NO_LAUNCHER
    in_shell: bool = False  # in a shell script, to whose commands orch adds no options
    spawns: bool = False  # the Python script itself starts its ranks
    text: str = ""  # of the script


def find_own_launcher(command: Sequence[str], folder: Path) -> OwnLauncher | None:
    """Return what starts the ranks of a command, which was submitted from `folder`, or None if orch has to."""
    if (found := find_launcher(command)).name:
        return OwnLauncher(launcher=found)
    text = read_script(command, folder)
    shell = inline_text(from_shell(command)) or (text if not (find_script(command) or "").endswith(".py") else "")
    if not _TAKES_RANK.search(shell):
        found = next((one for one in map(find_launcher, simple_commands(shell)) if one.name), NO_LAUNCHER)
        if found.name:
            return OwnLauncher(launcher=found, in_shell=True, text=shell)
    spawns = text and not shell and _SPAWNS.search(text) and not _READS_RANK.search(text)
    return OwnLauncher(spawns=True, text=text) if spawns else None


def starts_once_per_node(launcher: str, command: Sequence[str], folder: Path) -> bool:
    """Return whether a command is started once per node, given the value of `launcher`, and starts its own ranks."""
    return launcher == PER_NODE or (launcher == AUTO and find_own_launcher(command, folder) is not None)


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """Place of one launcher among the nodes of a job."""

    nodes: int
    ranks: int  # per node
    node: int
    host: str  # of the first node
    port: int
    hostfile: str = ""  # file with a line `NAME slots=RANKS` for each node

    def variables(self) -> dict[str, str]:
        """Return the variables of a launcher's process. PET_* are torchrun's own for its options."""
        return {
            "MASTER_ADDR": self.host, "MASTER_PORT": str(self.port), "NODE_RANK": str(self.node),
            "NNODES": str(self.nodes), "NPROC_PER_NODE": str(self.ranks), "PET_NNODES": str(self.nodes),
            "PET_NPROC_PER_NODE": str(self.ranks), "PET_NODE_RANK": str(self.node), "PET_MASTER_ADDR": self.host,
            "PET_MASTER_PORT": str(self.port), "PET_MAX_RESTARTS": "0",
        }  # fmt: skip


def place_launcher(command: Sequence[str], place: NodePlace, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command with the options that give its launcher this place; the last option of a name counts."""
    found = find_launcher(command)
    if not found.name:
        return tuple(command)
    kind = found.kind
    options = kind.place if place.nodes > 1 or kind.alone is None else kind.alone
    if place.nodes == 1 and not environ.get("CUDA_VISIBLE_DEVICES"):
        options = f"{options} {kind.no_devices}"
    filled = options.format(
        nodes=place.nodes, ranks=place.ranks, node=place.node, host=place.host, port=place.port,
        hostfile=place.hostfile, world=place.nodes * place.ranks, first=place.node * place.ranks,
    )  # fmt: skip
    at = len(command) - len(found.starts)
    return (*command[:at], *filled.split(), *command[at:])


def given_counts(launcher: Launcher) -> Iterator[tuple[str, str, int]]:
    """Yield the numbers in a launcher's own words: the option as written, what it counts, and its value."""
    kind = launcher.kind
    counts = {"ranks": kind.ranks, "total": kind.total, "nodes": kind.nodes}
    for word, after in pairwise([*launcher.own, ""]):
        name, equals, value = word.partition("=")
        value = value if equals else after
        plain = name.lstrip("-").replace("_", "-")
        for counted, names in counts.items():
            if word.startswith("-") and plain in names and value.isdigit():
                yield (f"{name}={value}" if equals else f"{name} {value}"), counted, int(value)
