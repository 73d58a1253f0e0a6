"""Cluster keys from the options of sbatch and srun, and the numbers of ranks from those of the launchers."""

import math
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.scheduler.slurm.sbatch_values import OWNED, container_template
from orchestrator.submission.from_sbatch.directives import Option
from orchestrator.submission.from_sbatch.launch import NODES, RANKS, TOTAL, Launch, Remark
from orchestrator.submission.from_sbatch.shell_text import expand
from trainer.protocol import time_spans

Key = tuple[str, ...]

_SAME = ("partition", "account", "qos", "constraint", "exclude")
"""Options with a key of the same name."""
_SHAPE = frozenset(
    {
        "nodes", "ntasks", "ntasks-per-node", "ntasks-per-gpu", "gres", "gpus", "gpus-per-node", "gpus-per-task",
        "cpus-per-task", "cpus-per-gpu", "mem", "time",
    }
)  # fmt: skip
_LOGS = "orch keeps logs in the run directory: `orch logs RUN`"
_LEFT_OUT = {
    **dict.fromkeys(("output", "error", "open-mode", "label", "unbuffered"), _LOGS),
    "requeue": "orch submits a new job after a failure itself",
    "no-requeue": "orch submits every job so, and continues the run in a new one",
    "signal": "before the time limit, ranks get SIGTERM, whatever signal the script asked for",
    "export": "every rank gets the variables below `env` and those of the setup file",
}
_SRUN_LEFT_OUT = re.compile(
    r"label|unbuffered|kill-on-bad-exit|wait|mpi|output|error|open-mode|jobid|job-name|overlap|exact|cpu-bind|pty|"
    r"gpu-bind|distribution|export|exclusive|threads-per-core|mem|time|partition|account|quiet|verbose|nodelist|gres|"
    r"hint|mem-bind|resv-ports|multi-prog"
)
"""Options of srun that orch replaces by its own for the one task per node that it starts."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Value of one configuration key, with the line of the script from which it comes (0: none)."""

    value: Any
    line: int
    text: str


@dataclass(kw_only=True)
class Conversion:
    """Settings found so far, and remarks about what they leave out."""

    settings: dict[Key, Setting] = field(default_factory=dict)
    left_out: list[Remark] = field(default_factory=list)
    unclear: list[Remark] = field(default_factory=list)
    open_keys: dict[str, str] = field(default_factory=dict)  # keys that the user must set -> why

    def set(self, key: str, value: Any, origin: Option | None = None, text: str = "") -> None:
        """Set a key. `origin` is the option behind it; `text` replaces the option's own text."""
        line = origin.line if origin else 0
        self.settings[tuple(key.split("."))] = Setting(
            value=value, line=line, text=text or (origin.text if origin else "")
        )


def read_directives(found: Conversion, options: Iterable[Option], values: Mapping[str, str]) -> dict[str, Option]:
    """Convert all options but those of the job's shape, which are returned by name. As in Slurm, the last one wins."""
    last = {(option.name or f"line {option.line}"): option for option in options}
    for name, option in last.items():
        if option.name == "":
            found.unclear.append(Remark(option.line, option.text.strip(), str(option.value)))
        elif option.value is not None and "$" in option.value and name not in ("output", "error"):
            found.unclear.append(Remark(option.line, option.text, "Slurm does not expand variables in directives"))
        elif name in _SAME and option.value:
            found.set(f"cluster.{name}", option.value, option)
        elif name == "job-name" and option.value:
            found.set("name", run_name(option.value), option)
        elif name == "chdir" and option.value:
            folder = os.path.abspath(option.value)
            if folder != os.getcwd():
                found.set("env.ORCH_SUBMIT_DIR", folder, option)
        elif name not in _SHAPE:
            _read_other(found, option)
    return last


def _read_other(found: Conversion, option: Option) -> None:
    name, remark = option.name, None
    if name == "signal" and (seconds := re.search(r"@(\d+)$", option.value or "")):
        found.set("cluster.signal_lead", int(seconds[1]), option)
    if why := _LEFT_OUT.get(name) or OWNED.get(name):
        remark = Remark(option.line, option.text, why)
        (found.unclear if name in ("array", "dependency", "begin", "clusters") else found.left_out).append(remark)
    elif (container := container_template(name)) is not None:
        _read_container(found, option, container)
    else:  # Slurm's own, or a site's plugin's
        found.set(f"cluster.sbatch.{name}", True if option.value is None else option.value, option)


def run_name(text: str) -> str:
    """Return a valid name for a run."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")[:40] or "run"


def read_shape(found: Conversion, job: dict[str, Option], launch: Launch, values: Mapping[str, str]) -> dict[str, str]:
    """Set nodes, ranks, GPUs, cores, memory and time. Return values of Slurm's variables in the script's own job."""
    step = {option.name: option for option in launch.srun}
    options = {**job, **{name: step[name] for name in step if name in _SHAPE - {"mem", "time", "gres"}}}
    nodes = _set_nodes(found, options)
    tasks = _tasks_per_node(found, options, nodes)
    gpus = _gpus_per_node(found, options, nodes, tasks)
    numbers = _slurm_variables(options, nodes, tasks, gpus)
    ranks = _set_ranks(found, launch, {**values, **numbers}, (nodes, tasks, gpus))
    _set_gpus(found, options, gpus, ranks)
    _set_cores(found, options, tasks, gpus)
    _set_limits(found, options)
    return numbers


def _set_nodes(found: Conversion, options: Mapping[str, Option]) -> int | None:
    option = options.get("nodes")
    if option is not None and option.value:
        least, dash, _ = option.value.partition("-")
        if least.isdigit():
            if dash:
                why = f"orch asks for a fixed number; {least} is taken"
                found.unclear.append(Remark(option.line, option.text, why))
            found.set("cluster.nodes", int(least), option)
            return int(least)
    tasks, per_node = _number(options.get("ntasks")), _number(options.get("ntasks-per-node"))
    if tasks is None or tasks == 1:
        found.set("cluster.nodes", 1, options.get("ntasks"), text="Slurm's default without --nodes")
        return 1
    if per_node:
        found.set("cluster.nodes", math.ceil(tasks / per_node), options["ntasks"])
        return math.ceil(tasks / per_node)
    found.open_keys["cluster.nodes"] = f"{options['ntasks'].text} alone leaves the number of nodes to Slurm"
    return None


def _tasks_per_node(found: Conversion, options: Mapping[str, Option], nodes: int | None) -> int:
    tasks, per_node = _number(options.get("ntasks")), _number(options.get("ntasks-per-node"))
    if tasks is not None and nodes:
        if tasks % nodes:
            text = options["ntasks"]
            found.unclear.append(Remark(text.line, text.text, f"is not a multiple of the {nodes} nodes"))
        return max(1, tasks // nodes)
    return per_node or 1


def _number(option: Option | None) -> int | None:
    return int(option.value) if option is not None and option.value and option.value.isdigit() else None


_GPUS = re.compile(r"(?:gres[:/])?(gpu)?:?(?:([A-Za-z_][\w.-]*):)?(\d+)(?:\(.*\))?")


def _gpus_per_node(found: Conversion, options: Mapping[str, Option], nodes: int | None, tasks: int) -> int:
    for name, factor in (("gpus-per-node", 1.0), ("gres", 1.0), ("gpus-per-task", tasks), ("gpus", 1 / (nodes or 1))):
        option = options.get(name)
        if option is None or not option.value:
            continue
        parts = option.value.split(",")
        counts = [
            re.fullmatch(r"(?:gres[:/])?(gpu)?:?(?:([A-Za-z_][\w.-]*):)?(\d+)(?:\(.*\))?", part) for part in parts
        ]
        gpus = [match for match in counts if match and (name != "gres" or match[1])]
        rest = [part for part, match in zip(parts, counts, strict=True) if match not in gpus]
        if rest:
            why = "only GPUs are read from it: set cluster.sbatch.gres yourself"
            found.unclear.append(Remark(option.line, option.text, why))
        if kind := next((match[2] for match in gpus if match[2]), None):
            why = f"the kind of GPU is left out: add cluster.constraint={kind} if the partition has several kinds"
            found.unclear.append(Remark(option.line, option.text, why))
        if gpus:
            return int(sum(int(match[3]) for match in gpus) * factor)
    return 0


def _slurm_variables(options: Mapping[str, Option], nodes: int | None, tasks: int, gpus: int) -> dict[str, str]:
    cpus = _number(options.get("cpus-per-task"))
    numbers = {
        "SLURM_NTASKS_PER_NODE": tasks, "SLURM_CPUS_PER_TASK": cpus, "SLURM_GPUS_ON_NODE": gpus or None,
        "SLURM_GPUS_PER_NODE": gpus or None, "SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": tasks * nodes if nodes else None, "SLURM_NPROCS": tasks * nodes if nodes else None,
    }  # fmt: skip
    return {name: str(number) for name, number in numbers.items() if number is not None}


def _set_ranks(
    found: Conversion, launch: Launch, values: Mapping[str, str], shape: tuple[int | None, int, int]
) -> int | None:
    """Set and return the ranks of a node."""
    nodes, tasks, gpus = shape
    own = Option(name="", value=None, line=launch.line, text=" ".join(launch.launchers) or "one program")
    if not launch.launchers or launch.starts_once_per_task and not launch.counts:
        ranks, text = (
            (tasks, f"{own.text}: {_count(tasks, 'task')} per node")
            if launch.launchers
            else (1, "no launcher: one rank")
        )
        found.set("cluster.ranks_per_node", ranks, own, text=text)
        return ranks
    given = {name: expand(text, values) for name, text in launch.counts.items()}
    _compare_nodes(found, launch, given.get(NODES, ""), nodes)
    for name, factor in ((RANKS, 1), (TOTAL, nodes or 1)):
        text = given.get(name, "")
        if text.isdigit() and int(text) % factor == 0:
            found.set("cluster.ranks_per_node", int(text) // factor, own, text=f"{launch.launchers[-1]}: {text} {name}")
            return int(text) // factor
    if gpus:
        text = given.get(RANKS) or given.get(TOTAL) or "no number"
        found.set("cluster.ranks_per_node", gpus, own, text=f"{launch.launchers[-1]} ({text}): one rank per GPU")
        return gpus
    if not given:
        found.set("cluster.ranks_per_node", 1, own, text=f"{launch.launchers[-1]} without a number of ranks")
        return 1
    found.open_keys["cluster.ranks_per_node"] = (
        f"line {launch.line}: {next(iter(given.values()))} is known only in a job"
    )
    return None


def _compare_nodes(found: Conversion, launch: Launch, text: str, nodes: int | None) -> None:
    most = text.rpartition(":")[2]
    if most.isdigit() and nodes and int(most) != nodes:
        why = f"the job has {nodes} nodes, which is taken"
        found.unclear.append(Remark(launch.line, f"{launch.launchers[-1]}: {text} nodes", why))
    elif (nodes or 1) > 1 and not {"srun", "ibrun", "mpirun", "mpiexec"} & set(launch.launchers):
        why = f"without srun the script starts ranks on its first node only; orch starts them on all {nodes} nodes"
        found.unclear.append(Remark(launch.line, launch.launchers[-1], why))


def _set_gpus(found: Conversion, options: Mapping[str, Option], gpus: int, ranks: int | None) -> None:
    origin = next(
        (options[name] for name in ("gpus-per-node", "gres", "gpus-per-task", "gpus") if name in options), None
    )
    if gpus and ranks in (gpus, None):
        found.set("cluster.gpus_per_node", gpus, origin)
    elif gpus and origin is not None:
        found.set("cluster.sbatch.gres", f"gpu:{gpus}", origin)
        why = (
            f"orch counts one GPU per rank; {_count(ranks or 1, 'rank')} with {_count(gpus, 'GPU')} get them as --gres"
        )
        found.left_out.append(Remark(origin.line, origin.text, why))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _set_cores(found: Conversion, options: Mapping[str, Option], tasks: int, gpus: int) -> None:
    """Set the cores of a node, which its ranks share: Slurm starts one task per node."""
    if (cores := _number(options.get("cpus-per-task"))) is not None:
        option = options["cpus-per-task"]
        found.set(
            "cluster.cpus_per_task", cores * tasks, option, text=f"{option.text}, {_count(tasks, 'task')} per node"
        )
    elif (cores := _number(options.get("cpus-per-gpu"))) is not None and gpus:
        option = options["cpus-per-gpu"]
        found.set("cluster.cpus_per_task", cores * gpus, option, text=f"{option.text}, {_count(gpus, 'GPU')} per node")
    elif tasks > 1:
        found.set("cluster.cpus_per_task", tasks, text=f"one core for each of {tasks} tasks per node, Slurm's default")
    elif "exclusive" in options:
        why = "without --cpus-per-task, orch's task gets one core: set cluster.cpus_per_task (`sinfo -o %c`)"
        found.unclear.append(Remark(options["exclusive"].line, options["exclusive"].text, why))


def _set_limits(found: Conversion, options: Mapping[str, Option]) -> None:
    if (option := options.get("mem")) is not None and option.value:
        value = f"{option.value}M" if option.value.isdigit() and option.value != "0" else option.value
        found.set("cluster.mem", value, option)
    if (option := options.get("time")) is not None and option.value:
        _set_time(found, option, option.value)
    else:
        found.open_keys.setdefault("cluster.time", "the script has no --time, and orch's own default is an hour")


def _set_time(found: Conversion, option: Option, value: str) -> None:
    try:
        seconds = 0 if time_spans.is_no_limit(value) else time_spans.seconds(value)
    except ValueError:
        found.unclear.append(Remark(option.line, option.text, "is not a time limit in Slurm's notation"))
        return
    if seconds == 0:  # Slurm's notation for no limit
        why = f"{option.text} asks for no limit, and a run of orch needs one (`sinfo -o '%P %l'` shows the longest)"
        found.open_keys["cluster.time"] = why
        return
    minutes = int(value) if value.isdigit() else 0
    found.set("cluster.time", f"{minutes // 60}:{minutes % 60:02}:00" if minutes else value, option)


def _read_container(found: Conversion, option: Option, container: tuple[str, str, str]) -> None:
    """Convert an option of a container plugin to a template and its argument."""
    template, argument, switch = container
    value = switch if option.value is None else option.value
    if "$" in value:
        why = "its value is known only in a job: set cluster.template_args yourself"
        found.unclear.append(Remark(option.line, option.text, why))
        return
    found.set("cluster.templates", ["default", template], option)
    found.set(f"cluster.template_args.{argument}", value, option)
    if argument == "workdir":
        found.set("env.ORCH_SUBMIT_DIR", value, option)


def read_step(found: Conversion, launch: Launch) -> None:
    """Convert srun's options: containers, and the variables of --export."""
    for option in launch.srun:
        if option.name == "export" and option.value:
            for pair in option.value.split(","):
                name, equals, value = pair.partition("=")
                if equals:
                    found.set(f"env.{name}", value, option)
        elif (container := container_template(option.name)) is not None:
            _read_container(found, option, container)
        elif option.name in _SHAPE:
            continue
        elif _SRUN_LEFT_OUT.fullmatch(option.name):
            why = "orch starts one task per node with options of its own"
            found.left_out.append(Remark(option.line, option.text, why))
        else:
            found.unclear.append(Remark(option.line, option.text, "orch does not know this option of srun"))
    _check_folder(found)


def _check_folder(found: Conversion) -> None:
    """Note that the command's folder may be missing in its container."""
    mounts = found.settings.get(("cluster", "template_args", "mounts"))
    image = found.settings.get(("cluster", "template_args", "image"))
    if image is None or ("env", "ORCH_SUBMIT_DIR") in found.settings:
        return
    places = [mount.split(":")[1] for mount in str(mounts.value if mounts else "").split(",") if ":" in mount]
    if not any(os.getcwd().startswith(place) for place in places):
        why = "the command runs in this folder: mount it, or set +env.ORCH_SUBMIT_DIR=FOLDER of the container"
        found.unclear.append(Remark(image.line, image.text, why))
